import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.inner.pipeline_stage import TickNumbers, get, put, when
from tests.products import product_flops


def tick(number=0):
  return TickNumbers(*[jnp.int32(number)] * len(TickNumbers._fields))


@pytest.mark.parametrize(("condition", "expected"), [(True, 5.0), (False, 2.0)])
def test_an_action_runs_if_its_condition_holds(condition, expected):
  def run(condition):
    return when(condition, "add", lambda at, x: x + at.chunk, tick(3), 2)

  assert int(jax.jit(run)(jnp.bool_(condition))) == expected


@pytest.mark.parametrize("num_slots", [1, 2])
def test_an_action_that_does_not_run_multiplies_nothing(num_slots):
  def run(condition, factors, kernel, at):
    def action(at, total):
      return total + get(factors, at.pair_slot) @ kernel

    return when(condition, "action", action, at, jnp.zeros((3, 4)))

  lowered = jax.jit(run).lower(
    jnp.bool_(True), jnp.ones((num_slots, 3, 5)), jnp.ones((5, 4)), tick()
  )
  text = lowered.compile().as_text()
  # The product needs nothing that the loop changes, and yet stays inside it.
  assert product_flops(text, lambda name, branch: 0) == 0
  assert product_flops(text, lambda name, branch: 1) == 2 * 3 * 5 * 4


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_put_somewhere_is_there_and_nothing_else_changes(count):
  rng = np.random.default_rng(0)
  tree = {"a": rng.normal(size=(4, 3, 2)), "b": rng.normal(size=(4, 3, 2, 5))}
  tree = jax.tree.map(jnp.float32, tree)
  place = tuple(map(jnp.int32, (2, 1)[:count]))
  new = jax.tree.map(lambda x: -x[place], tree)
  changed = jax.jit(put)(tree, new, *place)
  for name in tree:
    expected = np.array(tree[name])
    expected[place] *= -1
    np.testing.assert_array_equal(changed[name], expected)
    np.testing.assert_array_equal(get(changed, *place)[name], new[name])
