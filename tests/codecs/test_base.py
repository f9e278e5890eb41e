import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.codecs.base import grouped, split_keys, ungrouped
from dilocox_jax.plan.wire.leaf import Leaf

PATHS = ("embed", "blocks/attention/query", "blocks/attention/key", "debme")


@pytest.mark.parametrize(
  "leaf, groups, width",
  [(Leaf(2, (3, 5)), 4, 4), (Leaf(3, ()), 1, 1), (Leaf(1, (8,)), 2, 4)],
)
def test_grouping_keeps_values_in_order_and_is_undone(leaf, groups, width):
  count = leaf.num_layers * leaf.size
  values = jnp.arange(1, count + 1, dtype=jnp.bfloat16)
  values = values.reshape(leaf.stacked_shape)
  found = grouped(values, groups, width)
  assert found.shape == (leaf.num_layers, groups, width)
  assert found.dtype == jnp.float32
  flat = np.asarray(found).reshape(leaf.num_layers, -1)
  expected = np.asarray(values, np.float32).reshape(leaf.num_layers, -1)
  assert np.array_equal(flat[:, : leaf.size], expected)
  assert np.all(flat[:, leaf.size :] == 0)
  assert np.array_equal(ungrouped(found, leaf), values.astype(jnp.float32))


def bits_of(keys):
  return {
    name: tuple(jax.random.key_data(k).tolist()) for name, k in keys.items()
  }


def test_a_name_has_a_key_of_its_own_whoever_else_is_there():
  key = jax.random.key(0)
  together = bits_of(split_keys(key, PATHS))
  assert len(set(together.values())) == len(PATHS)
  for path in PATHS:
    assert bits_of(split_keys(key, [path])) == {path: together[path]}


def test_keys_follow_from_where_they_come_from():
  first = bits_of(split_keys(jax.random.key(0), PATHS))
  other = bits_of(split_keys(jax.random.key(1), PATHS))
  assert not set(first.values()) & set(other.values())
