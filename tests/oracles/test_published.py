import numpy as np
import pytest

from dilocox_jax.codecs.named import named_codec
from dilocox_jax.config.recipes import RECIPES
from dilocox_jax.reference.exchanges import ErrorFeedback, Lossy
from dilocox_jax.reference.optimizers import AdamW
from tests.codecs.alone import gaussian, through
from tests.oracles.least_squares import arguments, joined
from tests.oracles.published import PUBLISHED
from tests.reference.test_methods import NUM_STEPS, PROBLEM, distance, farthest


def run(name, **changes):
  given = arguments(*PROBLEM, NUM_STEPS)
  return joined(PUBLISHED[name](*given, inner=AdamW(0.02), **changes))


def test_streaming_with_one_fragment_no_delay_and_no_mixing_is_diloco():
  streaming = run(
    "streaming_diloco",
    fragments=1,
    overlap_steps=0,
    mixing_alpha=0.0,
    sync_interval=5,
    exchange=None,
  )
  diloco = run("diloco", sync_interval=5)
  assert distance(streaming.theta, diloco.theta) == 0.0
  assert np.array_equal(streaming.losses, diloco.losses)
  assert farthest(streaming.snapshots, diloco.snapshots) == 0.0


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - {"allreduce"}))
def test_replicas_take_steps_of_their_own(name):
  found, baseline = run(name), run("allreduce")
  assert np.all(np.isfinite(found.losses))
  assert np.array_equal(found.losses[:, 0], baseline.losses[:, 0])
  assert np.all(found.losses[:, 1] != baseline.losses[:, 1])


@pytest.mark.parametrize(
  "name",
  ["open_diloco", "streaming_diloco", "sparse_loco", "muloco", "overlap_loco"],
)
def test_what_is_sent_is_what_the_recipe_sends(name):
  recipe = RECIPES[name]
  exchange = PUBLISHED[name].keywords["exchange"]
  if "exchange.feedback" in recipe:
    assert isinstance(exchange, ErrorFeedback)
    assert exchange.decay == recipe["exchange.feedback"]
    exchange = exchange.exchange
  assert isinstance(exchange, Lossy)
  values = gaussian((1, 90, 100))
  found, _ = through(named_codec(recipe["exchange.codec"]), values)
  expected = exchange.codec("blocks/w/0", values[0])
  np.testing.assert_allclose(found[0], expected, rtol=1e-6)
