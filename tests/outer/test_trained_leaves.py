"""What becomes of leaves that are no arrays of floats with values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.optimizers import standard_promotion
from tests.outer.problem import assert_equal, nesterov

INNER = standard_promotion(optax.adamw(0.1))  # It would let counters decay.


def gradient_of(leaf):
  """Ones of the first replica and twos of the second, as `jax.grad` does."""
  if not jnp.issubdtype(leaf.dtype, jnp.inexact):
    return np.zeros(leaf.shape, jax.dtypes.float0)
  return jnp.full(leaf.shape, 1 + jax.lax.axis_index("replica"), leaf.dtype)


def trained(tx, params, num_steps=5):
  """Two replicas' parameters and states after some steps."""

  def step(params, state):
    grads = jax.tree.map(gradient_of, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), params)
  state = jax.vmap(tx.init, axis_name="replica")(params)
  replicas = jax.jit(jax.vmap(step, axis_name="replica"))
  for _ in range(num_steps):
    params, state = replicas(params, state)
  return params, state


METHODS = {
  "allreduce": lambda **codec: dx.allreduce(INNER, **codec),
  "diloco": lambda **codec: dx.diloco(
    INNER, nesterov(), sync_interval=2, **codec
  ),
  "overlap_loco": lambda **codec: dx.overlap_loco(
    INNER, nesterov(), sync_interval=4, num_fragments=2, **codec
  ),
}
every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)


@every_method
def test_what_cannot_be_averaged_stays_and_changes_nothing_else(make):
  others = {
    "count": jnp.int32(7),
    "seen": jnp.asarray([True, False]),
    "adapter": jnp.zeros((4, 0)),
    "unused": jnp.zeros(0),
  }
  alone = {"a": jnp.ones((3, 4)), "scale": jnp.float32(2.0)}
  found, state = trained(make(codec="int"), alone | others)
  expected, _ = trained(make(codec="int"), alone)
  stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), others)
  assert_equal(found, expected | stacked)
  kept = dx.outer_params(state, found)
  assert_equal({name: kept[name] for name in others}, stacked)


@every_method
@pytest.mark.parametrize(
  ("leaf", "kind"),
  [
    (jax.random.key(0), "key<fry>"),
    (1.5, "float"),
  ],
)
def test_a_leaf_that_nobody_can_train_is_refused_by_its_path(make, leaf, kind):
  with pytest.raises(ValueError) as refused:
    make().init({"a": jnp.ones(3), "b": {"c": leaf}})
  message = str(refused.value)
  assert "'b/c'" in message and f" {kind} " in message
  assert "optax.partition" in message and "\n" not in message


def test_a_leaf_of_another_kind_may_have_an_optimizer_of_its_own():
  make = METHODS["diloco"]
  tx = optax.partition(
    {"trained": make(), "own": optax.sgd(0.5)}, {"a": "trained", "b": "own"}
  )
  start = {"a": jnp.ones((2, 3)), "b": jnp.ones(3, jnp.complex64)}
  found, _ = trained(tx, start, num_steps=1)
  np.testing.assert_allclose(found["b"], [[0.5] * 3, [0.0] * 3])


@pytest.mark.parametrize("codec", ["float32", "int"])
def test_complex_numbers_are_trained_as_two_real_ones(codec):
  tx = dx.diloco(optax.sgd(0.1), optax.sgd(1.0), sync_interval=2, codec=codec)
  start = {"a": jnp.full(3, 1 + 1j, jnp.complex64), "b": jnp.ones(2)}
  found, state = trained(tx, start, num_steps=2)
  np.testing.assert_allclose(found["a"], np.full((2, 3), 0.7 + 1j), rtol=1e-2)
  assert_equal(dx.outer_params(state, found), found)


@every_method
@pytest.mark.parametrize(
  "start", [{}, {"none": None}, {"a": jnp.zeros((0, 2))}]
)
def test_a_tree_without_values_is_trained_in_vain(make, start):
  tx = make()
  state = tx.init(start)
  step = jax.vmap(
    lambda _: tx.update(start, state, start)[0],
    axis_name="replica",
    axis_size=2,
    out_axes=None,
  )
  assert_equal(step(jnp.zeros(2)), start)


@pytest.mark.parametrize("make", list(METHODS.values())[:2])
def test_leaves_of_several_precisions_are_trained_as_optax_does(make):
  start = {
    "half": jnp.ones((4, 3), jnp.bfloat16),
    "fp16": jnp.ones(5, jnp.float16),
    "full": jnp.ones((2, 3)),
  }
  found, _ = trained(make(codec="float32"), start)
  for path, leaf in start.items():
    expected, _ = trained(
      make(codec="float32"), {path: leaf.astype(jnp.float32)}
    )
    assert found[path].dtype == leaf.dtype
    np.testing.assert_allclose(
      found[path].astype(jnp.float32), expected[path], atol=0.03
    )
