import jax.numpy as jnp
import pytest

from dilocox_jax.trees import all_finite, leaves_by_path


def test_leaves_are_named_by_the_keys_above_them():
  found = leaves_by_path({"b": {"w": jnp.ones(2)}, "a": jnp.zeros(3)})
  assert {path: leaf.shape for path, leaf in found.items()} == {
    "a": (3,),
    "b/w": (2,),
  }


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_one_value_that_is_not_finite_is_found(bad):
  good = {"count": jnp.int32(3), "w": jnp.ones(4)}
  assert bool(all_finite(good))
  assert not bool(all_finite({**good, "w": jnp.ones(4).at[2].set(bad)}))
