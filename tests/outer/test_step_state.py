"""The states of transforms: stored, wrapped, masked, and the model in them."""

from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dilocox_jax as dx
from tests.outer.problem import assert_equal, nesterov

INNER = optax.sgd(0.1)


def trained(tx, params, num_steps=5):
  """Two replicas whose gradients are ones and twos."""

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), params)
  grads = jax.tree.map(lambda leaf: jnp.stack([leaf[0], leaf[1] + 1]), params)
  state = jax.vmap(tx.init, axis_name="replica")(params)
  replicas = jax.jit(jax.vmap(step, axis_name="replica"))
  for _ in range(num_steps):
    params, state = replicas(params, state, grads)
  return params, state


def params():
  return {"a": jnp.ones((3, 4)), "none": None, "b": jnp.ones(5)}


@pytest.mark.parametrize("codec", ["float32", "int"])
def test_leaves_that_are_none_stay_none(codec):
  found, state = trained(
    dx.diloco(INNER, nesterov(), sync_interval=2, codec=codec), params()
  )
  without = {k: leaf for k, leaf in params().items() if leaf is not None}
  tx = dx.diloco(INNER, nesterov(), sync_interval=2, codec=codec)
  expected, _ = trained(tx, without)
  assert found.pop("none") is None
  assert_equal(found, expected)
  assert dx.outer_params(state)["none"] is None
  assert dx.outer_params(state, params())["none"] is None


def test_a_state_is_stored_by_flax():
  tx = dx.diloco(INNER, nesterov(), sync_interval=2)
  _, state = trained(tx, params())
  stored = flax.serialization.to_bytes(state)
  empty = jax.tree.map(jnp.zeros_like, state)
  assert_equal(flax.serialization.from_bytes(empty, stored), state)


def test_the_model_of_a_masked_transform_lacks_what_was_masked():
  tx = dx.streaming_diloco(
    INNER, nesterov(), sync_interval=2, num_fragments=2, overlap_steps=0
  )
  mask = {"a": True, "b": True, "c": False}
  whole = {"a": jnp.ones((3, 4)), "b": jnp.zeros(5), "c": jnp.ones(7)}
  wrapped: Any = optax.masked(tx, mask).init(whole)
  state = wrapped.inner_state
  assert_equal(dx.outer_params(state, whole), whole)
  found = dx.outer_params(state)
  assert found.pop("c") == optax.MaskedNode()
  assert_equal(found, {"a": whole["a"], "b": whole["b"]})


SLICED = {"sync_interval": 4, "num_fragments": 2}
LABELS = {"a": "sent", "none": None, "b": {"c": "sent", "d": "kept"}}


def tree():
  return {
    "a": jnp.ones((4, 3)),
    "none": None,
    "b": {"c": jnp.ones(5), "d": jnp.ones(2)},
  }


@pytest.mark.parametrize(
  "wrap",
  [
    lambda tx: optax.chain(optax.clip(1.0), tx),
    lambda tx: optax.MultiSteps(tx, 2),
    lambda tx: optax.inject_hyperparams(lambda rate: tx)(rate=0.1),
    lambda tx: optax.masked(tx, {"a": True, "none": None, "b": False}),
    lambda tx: optax.multi_transform(
      {"sent": optax.chain(tx), "kept": optax.set_to_zero()}, LABELS
    ),
    lambda tx: optax.multi_transform(
      {"x": tx, "y": dx.diloco(INNER)}, {"a": "x", "none": None, "b": "y"}
    ),
  ],
)
@pytest.mark.parametrize(
  "tx",
  [
    dx.diloco(INNER),
    dx.overlap_loco(INNER, **SLICED),
    dx.allreduce(INNER),
    dx.allreduce(dx.averaged(INNER, 1)),
  ],
  ids=["diloco", "overlap_loco", "allreduce", "average"],
)
def test_the_model_is_found_inside_wrappers(wrap, tx):
  state = wrap(tx).init(tree())
  assert_equal(dx.outer_params(state, tree()), tree())


@pytest.mark.parametrize(
  ("state", "message"),
  [
    (INNER.init(params()), "holds none of a transform of dilocox_jax"),
    ({}, "holds none of a transform"),
    (2 * (dx.diloco(INNER).init(params()),), r"outer_params\(state, params\)"),
  ],
)
def test_what_holds_no_model_is_refused_in_one_line(state, message):
  with pytest.raises(ValueError, match=message) as raised:
    dx.outer_params(state)
  assert "\n" not in str(raised.value)


def test_an_average_of_averaged_gradients_is_the_model_to_keep():
  tx = dx.allreduce(dx.averaged(INNER, power=1))
  _, state = trained(tx, {"a": jnp.zeros(2)}, num_steps=3)
  # Gradients of 0 and 1: x = -0.05, -0.1 and -0.15 with weights 1, 2 and 3.
  mean = -0.05 * (1 + 2 * 2 + 3 * 3) / 6
  np.testing.assert_allclose(dx.outer_params(state)["a"], mean, rtol=1e-6)
