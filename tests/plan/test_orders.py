import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.plan.pipeline.orders import (
  Tick,
  gpipe,
  interleaved,
  one_forward_one_backward,
  zb_h1,
)
from dilocox_jax.plan.pipeline.stage_layers import StageLayers

LETTERS = {
  "forward": "F",
  "backward": "B",
  "input_gradient": "I",
  "weight_gradient": "W",
}


def written(order):
  """Ticks as figures write them: micro-batches from 1, later chunks primed."""
  return " ".join(
    LETTERS[tick.direction] + str(tick.micro_batch + 1) + "'" * tick.chunk
    for tick in order
  )


def every_order(stages, groups, chunks):
  """Micro-batches, directions, chunks and order, of every schedule's stages."""
  batches = stages * groups
  whole, split = ("forward", "backward"), ("input_gradient", "weight_gradient")
  for stage in range(stages):
    yield batches, whole, 1, gpipe(batches)
    yield batches, whole, 1, one_forward_one_backward(stage, stages, batches)
    yield batches, ("forward", *split), 1, zb_h1(stage, stages, batches)
    order = interleaved(stage, stages, batches, chunks)
    yield batches, whole, chunks, order


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_every_tick_stands_once_in_the_list_of_its_stage(
  stages, groups, chunks
):
  for batches, directions, has_chunks, order in every_order(
    stages, groups, chunks
  ):
    assert sorted(order) == sorted(
      itertools.starmap(
        Tick, itertools.product(directions, range(batches), range(has_chunks))
      )
    )


# Beginnings of the lists that the papers draw for four stages.
FIGURES = {
  "1f1b": {  # arXiv 2104.04473, Figure 4, above.
    0: "F1 F2 F3 F4 B1 F5 B2 F6 B3 F7 B4 F8 B5 B6 B7 B8",
    1: "F1 F2 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 F8 B6 B7 B8",
    3: "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8",
  },
  "interleaved": {  # Two chunks a stage; the same figure, below (recalled).
    0: "F1 F2 F3 F4 F1' F2' F3' F4' F5 F6 F7 B1' F8 B2' F5' B3' F6' B4' F7' B1",
    3: "F1 F2 F3 F4 F1' B1' F2' B2' F3' B3' F4' B4' F5 B1 F6 B2 F7 B3 F8 B4",
  },
  "zb_h1": {  # arXiv 2401.10241, Figure 3, above.
    0: "F1 F2 F3 F4 I1 W1 F5 I2 W2 F6 I3 W3",
    1: "F1 F2 F3 I1 F4 I2 W1 F5 I3 W2 F6 I4 W3",
    3: "F1 I1 F2 I2 F3 I3 F4 I4 W1 F5 I5 W2",
  },
}


@pytest.mark.parametrize(
  "name, stage", [(name, stage) for name in FIGURES for stage in FIGURES[name]]
)
def test_the_orders_are_those_of_the_papers_figures(name, stage):
  order = {
    "1f1b": lambda: one_forward_one_backward(stage, 4, 8),
    "interleaved": lambda: interleaved(stage, 4, 8, 2),
    "zb_h1": lambda: zb_h1(stage, 4, 8),
  }[name]()
  drawn = FIGURES[name][stage]
  assert written(order)[: len(drawn)] == drawn


@given(st.integers(1, 6), st.integers(1, 12), st.data())
def test_gpipe_goes_back_as_it_came_and_zb_h1_without_weights_is_1f1b(
  stages, batches, data
):
  order = gpipe(batches)
  came = [tick.micro_batch for tick in order[:batches]]
  goes = [tick.micro_batch for tick in order[batches:]]
  assert came == list(range(batches)) == goes[::-1]
  assert {tick.direction for tick in order[:batches]} == {"forward"}
  stage = data.draw(st.integers(0, stages - 1))
  left = [
    tick
    for tick in zb_h1(stage, stages, batches)
    if tick.direction != "weight_gradient"
  ]
  plain = one_forward_one_backward(stage, stages, batches, "input_gradient")
  assert tuple(left) == plain


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 3))
def test_layers_are_cut_into_even_neighbouring_parts(layers, stages, chunks):
  if stages * chunks > layers:
    with pytest.raises(ValueError, match=f"num_layers={layers} cannot be cut"):
      StageLayers(layers, stages, chunks)
    return
  parts = StageLayers(layers, stages, chunks)
  found = []
  for chunk, stage in itertools.product(range(chunks), range(stages)):
    count, row = parts.counts[stage][chunk], parts.table[stage, chunk]
    assert all(row[count:] == layers)
    found.extend(row[:count])
  assert found == list(range(layers))
  counts = np.asarray(parts.counts)
  assert counts.max() - 1 <= counts.min() == counts[-1, -1] > 0
  flat = parts.table.reshape(-1)
  np.testing.assert_array_equal(flat[parts.places], found)
  is_even = layers % stages == 0 and chunks == 1
  assert parts.is_in_order == (
    is_even or (stages == 1 and layers % chunks == 0)
  )
