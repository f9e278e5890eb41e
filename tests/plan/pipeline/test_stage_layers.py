import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from dilocox_jax.plan.pipeline.stage_layers import StageLayers

sizes = st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(1, 3))


def made(num_layers, num_stages, chunks):
  hypothesis.assume(num_stages * chunks <= num_layers)
  return StageLayers(num_layers, num_stages, chunks)


@hypothesis.given(sizes)
def test_every_layer_belongs_to_one_part_and_parts_follow_each_other(size):
  parts = made(*size)
  found = []
  for chunk in range(parts.chunks_per_stage):
    for stage in range(parts.num_stages):
      count = parts.counts[stage][chunk]
      row = parts.table[stage, chunk]
      assert all(row[count:] == parts.num_layers)
      found.extend(row[:count])
  assert found == list(range(parts.num_layers))


@hypothesis.given(sizes)
def test_parts_are_as_even_as_can_be_and_the_last_is_among_the_shortest(size):
  parts = made(*size)
  counts = np.asarray(parts.counts)
  assert counts.max() - counts.min() <= 1
  assert counts.min() > 0
  assert counts[-1, -1] == counts.min()


@hypothesis.given(sizes)
def test_places_find_every_layer_in_the_flattened_table(size):
  parts = made(*size)
  flat = parts.table.reshape(-1)
  np.testing.assert_array_equal(flat[parts.places], np.arange(parts.num_layers))


def test_only_one_even_chunk_a_stage_is_in_order():
  assert StageLayers(8, 4).is_in_order
  assert not StageLayers(5, 4).is_in_order
  assert not StageLayers(8, 2, 2).is_in_order
  assert StageLayers(8, 1, 2).is_in_order


def test_more_parts_than_layers_are_refused():
  with pytest.raises(ValueError, match="num_layers=3 cannot be cut into 4"):
    StageLayers(3, 2, 2)
