import numpy as np
import pytest

from dilocox_jax.reference.optimizers import AdamW
from dilocox_jax.reference.published import PUBLISHED
from tests.oracles.least_squares import arguments, joined
from tests.reference.test_methods import (
  NUM_STEPS,
  PROBLEM,
  distance,
  farthest,
)


def run(name, **changes):
  given = arguments(*PROBLEM, NUM_STEPS)
  return joined(PUBLISHED[name](*given, inner=AdamW(0.02), **changes))


def test_streaming_with_one_fragment_no_delay_and_no_mixing_is_diloco():
  streaming = run(
    "streaming_diloco",
    num_fragments=1,
    overlap_steps=0,
    mixing_alpha=0.0,
    sync_interval=5,
  )
  diloco = run("diloco", sync_interval=5)
  assert distance(streaming.theta, diloco.theta) == 0.0
  assert np.array_equal(streaming.losses, diloco.losses)
  assert farthest(streaming.snapshots, diloco.snapshots) == 0.0


@pytest.mark.parametrize("name", set(PUBLISHED) - {"allreduce"})
def test_every_method_differs_from_the_baseline_but_not_in_its_first_step(name):
  found, baseline = run(name), run("allreduce")
  assert np.array_equal(found.losses[:, 0], baseline.losses[:, 0])
  assert np.all(found.losses[:, 1] != baseline.losses[:, 1])
