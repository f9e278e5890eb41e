import numpy as np
import pytest

from dilocox_jax.reference import optimizers
from tests.oracles import least_squares, slices
from tests.reference.test_methods import (
  NUM_STEPS,
  PROBLEM,
  distance,
  farthest,
  train,
)

SETTINGS = {
  "sync_interval": 5,
  "inner": optimizers.AdamW(0.02),
  "outer": optimizers.Sgd(0.5, momentum=0.6, nesterov=True),
}


def train_slices(count, **changes):
  given = least_squares.arguments(*PROBLEM, NUM_STEPS)
  found = slices.train_slices(
    *given, num_fragments=count, **{**SETTINGS, **changes}
  )
  return least_squares.joined(found)


@pytest.mark.parametrize("order", ["sliced", "interleaved"])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_slices_are_disjoint_and_cover_every_leaf(count, order):
  params = least_squares.split(PROBLEM[0])
  cut = slices.cut_into_slices(params, count, order)
  whole = slices.put_together(cut, order)
  assert {k: v.tolist() for k, v in whole.items()} == {
    k: v.tolist() for k, v in params.items()
  }
  sizes = {k: v.size for k, v in params.items()}
  assert sum(v.size for v in cut.values()) == sum(sizes.values())


def test_rows_of_a_layer_are_on_its_second_axis():
  cut = slices.cut_into_slices({"blocks/w/0": np.ones([1, 5, 2])}, 2)
  assert {k: v.shape for k, v in cut.items()} == {
    "blocks/w/0@0": (1, 3, 2),
    "blocks/w/0@1": (1, 2, 2),
  }


def test_a_single_number_is_in_slice_zero():
  cut = slices.cut_into_slices({"scale": np.array(2.0)}, 3)
  assert cut == {"scale@0": 2.0}
  assert slices.put_together(cut) == {"scale": 2.0}


def test_one_slice_is_the_whole_tree():
  found = train_slices(1)
  expected = train("reset")
  assert distance(found.theta, expected.theta) == 0
  assert farthest(found.snapshots, expected.snapshots) == 0


def test_slices_are_sent_at_offsets_of_their_own():
  assert distance(train_slices(3).theta, train_slices(1).theta) > 1e-3
