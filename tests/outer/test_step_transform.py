"""Transforms of single steps: their programs, their states and their leaves."""

import functools
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, PartitionSpec

import dilocox_jax as dx
from dilocox_jax.aggregators.exchange import mean_of_finite_replicas
from dilocox_jax.optimizers import standard_promotion
from dilocox_jax.outer.fragment_view import FragmentView
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.outer.step_transform import pseudo_gradient_steps
from dilocox_jax.plan.schedule import methods
from tests.oracles.least_squares import make_problem
from tests.outer.problem import (
  assert_close,
  assert_equal,
  nesterov,
  one_step,
  transform,
)
from tests.tiers import slow

PROBLEM = jax.tree.map(
  lambda x: np.asarray(x, np.float32), make_problem(0, 3, 13, 4, 2, 3)
)
SGD = optax.sgd(0.1)


def on_devices(tx, check_vma=True):
  """The jitted step with a device for every replica."""
  mesh = jax.make_mesh(
    (3,), ("replica",), (AxisType.Auto,), devices=jax.devices()[:3]
  )
  spec = PartitionSpec("replica")
  step = jax.vmap(one_step(tx))
  return jax.jit(
    jax.shard_map(
      step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
  )


def start(tx, params=PROBLEM[0]):
  """Parameters and state of all replicas, leaves [M, ...]."""
  params = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), params)
  return params, jax.vmap(tx.init)(params)


@pytest.mark.parametrize(
  ("method", "check_vma"),
  [
    (methods.diloco(4), True),
    *slow((methods.streaming_diloco(6, 3, 1), False), (methods.eager(4), True)),
  ],
  ids=["diloco", "streaming", "eager"],
)
def test_a_device_for_each_replica_changes_nothing(method, check_vma):
  tx = transform(method, SGD)
  devices = on_devices(tx, check_vma)
  stacked = jax.jit(jax.vmap(one_step(tx), axis_name="replica"))
  one = other = start(tx)
  for step in range(2 * method.schedule.sync_interval + 1):
    batch = PROBLEM[1][:, step], PROBLEM[2][:, step]
    one = stacked(*one, batch)
    other = devices(*other, batch)
  assert_close(other[0], one[0], 1e-5)


def equations(jaxpr, outside=()):
  """Names of the equations of a program, but for those below some others."""
  for equation in jaxpr.eqns:
    yield equation.primitive.name
    if equation.primitive.name not in outside:
      for inner in jaxprs_in_params(equation.params):
        yield from equations(inner, outside)


def test_a_step_without_an_exchange_sends_nothing():
  """All collectives of a step stand in branches of conditionals."""
  tx = transform(methods.delayed(6, 2, 3, "continue"), SGD)
  batch = PROBLEM[1][:, 0], PROBLEM[2][:, 0]
  program = jax.make_jaxpr(on_devices(tx))(*start(tx), batch).jaxpr
  collectives = {"psum", "psum_invariant", "all_gather", "all_to_all"}
  assert collectives & set(equations(program))
  assert not collectives & set(equations(program, outside=("cond",)))


def test_replicas_of_several_runs_exchange_only_when_it_is_due():
  """A conditional stays one if runs are mapped around their replicas."""
  tx = transform(methods.diloco(4), SGD)
  runs = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), start(tx))
  batch = PROBLEM[1][:, 0], PROBLEM[2][:, 0]
  replicas = jax.vmap(one_step(tx), axis_name="replica")
  step = jax.vmap(replicas, in_axes=(0, 0, None))
  program = jax.make_jaxpr(step)(*runs, batch).jaxpr
  assert "cond" in set(equations(program))


@pytest.mark.parametrize("order", ["strided", *slow("sliced")])
def test_the_program_grows_neither_with_the_interval_nor_with_fragments(order):
  def num_lines(interval, count):
    method = methods.delayed(
      interval, count, 1, "continue", fragment_order=order
    )
    tx = transform(method, SGD, 16)
    params, state = start(tx, make_problem(0, 3, 1, 16, 2, 3)[0])
    step = jax.jit(jax.vmap(tx.update, axis_name="replica"))
    return step.lower(params, state, params).as_text().count("\n")

  few = num_lines(16, 4)
  long = num_lines(64, 4)
  many = num_lines(64, 16)
  assert max(long, many) <= 1.3 * few


def test_states_work_with_the_functions_of_optax_and_flax():
  method = methods.streaming_diloco(6, 3, 2, 0.5)
  outer = OuterStep(method, nesterov(), mean_of_finite_replicas())
  tx: Any = pseudo_gradient_steps(outer, optax.adam(0.1), FragmentView(3))
  state = tx.init(PROBLEM[0])
  marked = optax.tree.map_params(
    tx, lambda _: "parameter", state, transform_non_params=lambda _: "other"
  )
  flat = jax.tree.leaves(marked)
  # Two moments of 4 leaves; in the fragments theta, momentum, one in flight.
  assert flat.count("parameter") == 4 * (2 + 3)
  assert flat.count("other") == len(jax.tree.leaves(state)) - 4 * (2 + 3)
  stored = flax.serialization.to_bytes(state)
  empty = jax.tree.map(jnp.zeros_like, state)
  assert_equal(flax.serialization.from_bytes(empty, stored), state)
  with pytest.raises(ValueError, match="update needs the parameters"):
    tx.update(PROBLEM[0], state)


ADAMW = standard_promotion(optax.adamw(0.1))  # It would let counters decay.
METHODS = {
  "allreduce": functools.partial(dx.allreduce, ADAMW),
  "diloco": functools.partial(dx.diloco, ADAMW, nesterov(), sync_interval=2),
  "overlap_loco": functools.partial(
    dx.overlap_loco, ADAMW, nesterov(), sync_interval=4, num_fragments=2
  ),
}
every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)


def gradient_of(leaf):
  """Ones of the first replica and twos of the second, as `jax.grad` does."""
  if not jnp.issubdtype(leaf.dtype, jnp.inexact):
    return np.zeros(leaf.shape, jax.dtypes.float0)
  return jnp.full(leaf.shape, 1 + jax.lax.axis_index("replica"), leaf.dtype)


def trained(tx, params, num_steps=5):
  """Two replicas' parameters and states after some steps."""

  def step(params, state):
    updates, state = tx.update(jax.tree.map(gradient_of, params), state, params)
    return optax.apply_updates(params, updates), state

  params = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), params)
  state = jax.vmap(tx.init, axis_name="replica")(params)
  replicas = jax.jit(jax.vmap(step, axis_name="replica"))
  for _ in range(num_steps):
    params, state = replicas(params, state)
  return params, state


@pytest.mark.parametrize("name", ["allreduce", "overlap_loco"])
def test_what_cannot_be_averaged_stays_and_changes_nothing_else(name):
  make = METHODS[name]
  others = {
    "count": jnp.int32(7),
    "seen": jnp.asarray([True, False]),
    "adapter": jnp.zeros((4, 0)),
    "none": None,
  }
  alone = {"a": jnp.ones((3, 4)), "scale": jnp.float32(2.0)}
  found, state = trained(make(codec="int"), alone | others)
  expected, _ = trained(make(codec="int"), alone)
  stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), others)
  assert_equal(found, expected | stacked)
  kept = dx.outer_params(state, found)
  assert_equal({name: kept[name] for name in others}, stacked)


@every_method
@pytest.mark.parametrize("leaf", [jax.random.key(0), 1.5, np.ones(3) * 1j])
def test_a_leaf_that_nobody_can_train_is_refused_by_its_path(make, leaf):
  with pytest.raises(ValueError, match="'b/c'.*optax.partition") as refused:
    make().init({"a": jnp.ones(3), "b": {"c": leaf}})
  assert "\n" not in str(refused.value)


def test_two_leaves_of_one_path_are_refused():
  leaf = jnp.ones(3)
  with pytest.raises(ValueError, match="two leaves have the path 'a/b': ren"):
    dx.diloco(SGD, codec="int").init({"a/b": leaf, "a": {"b": leaf}})


def test_leaves_of_several_precisions_are_trained_as_optax_does():
  make = METHODS["diloco"]
  params = {
    "half": jnp.ones((4, 3), jnp.bfloat16),
    "fp16": jnp.ones(5, jnp.float16),
    "full": jnp.ones((2, 3)),
  }
  found, _ = trained(make(codec="float32"), params)
  wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
  expected, _ = trained(make(codec="float32"), wide)
  for path, leaf in params.items():
    assert found[path].dtype == leaf.dtype
    near = found[path].astype(jnp.float32)
    np.testing.assert_allclose(near, expected[path], atol=0.03)
  inner = optax.adamw(0.1, mu_dtype=jnp.float32)  # Its updates are wider.
  make = dx.diloco(inner, optax.sgd(1.0), sync_interval=2)
  with jax.numpy_dtype_promotion("standard"):
    found, _ = trained(make, {"half": params["half"]})
  assert found["half"].dtype == jnp.bfloat16


TREE = {
  "a": jnp.ones((4, 3)),
  "none": None,
  "b": {"c": jnp.ones(5), "d": jnp.ones(2)},
}


@pytest.mark.parametrize(
  "wrap",
  [
    lambda tx: optax.MultiSteps(optax.chain(optax.clip(1.0), tx), 2),
    lambda tx: optax.inject_hyperparams(lambda rate: tx)(rate=0.1),
    lambda tx: optax.masked(tx, {"a": True, "none": None, "b": False}),
    lambda tx: optax.multi_transform(
      {"x": tx, "y": dx.diloco(SGD)}, {"a": "x", "none": None, "b": "y"}
    ),
  ],
)
@pytest.mark.parametrize(
  "tx",
  [
    dx.streaming_diloco(SGD, num_fragments=1),
    dx.overlap_loco(SGD, sync_interval=4, num_fragments=2),
    dx.allreduce(dx.averaged(SGD, 1)),
  ],
  ids=["streaming", "overlap_loco", "average"],
)
def test_the_model_is_found_inside_wrappers(wrap, tx):
  state = wrap(tx).init(TREE)
  assert_equal(dx.outer_params(state, TREE), TREE)
  other = jax.tree.map(lambda leaf: leaf + 1, TREE)
  assert_equal(dx.outer_params(state, other)["a"], TREE["a"])
  with pytest.raises(ValueError, match="holds none of a transform"):
    dx.outer_params(SGD.init(TREE), TREE)


def test_without_a_trained_leaf_the_model_is_what_it_was():
  params, state = trained(dx.diloco(SGD), {"count": jnp.int32(7)})
  assert_equal(dx.outer_params(state, params), params)


@pytest.mark.parametrize(
  "settings",
  [
    {"outer": dx.averaged(SGD, np.float64(1))},
    {"exchange": dx.exchange("int", feedback=np.float64(1))},
  ],
)
def test_a_factor_of_numpy_does_not_widen_the_state(settings, x64):
  tx = dx.diloco(SGD, sync_interval=2, **settings)
  params = {"a": jnp.ones((2, 3), jnp.float32)}
  state = jax.vmap(tx.init)(params)
  update = jax.vmap(tx.update, axis_name="replica")
  _, after = jax.eval_shape(update, params, state, params)
  types = [jax.tree.map(lambda leaf: leaf.dtype, s) for s in (state, after)]
  assert types[0] == types[1]


def test_an_average_has_the_dtype_of_the_parameters():
  params = {"a": jnp.zeros(2, jnp.bfloat16)}
  state = dx.allreduce(dx.averaged(SGD, power=1)).init(params)
  assert dx.outer_params(state, params)["a"].dtype == jnp.bfloat16


def test_an_average_of_averaged_gradients_is_the_model_to_keep():
  tx = dx.allreduce(dx.averaged(SGD, power=1))
  params, state = trained(tx, {"a": jnp.zeros(2)}, num_steps=3)
  # The mean gradient is 1.5: x = -0.15, -0.3 and -0.45, weights 1, 2 and 3.
  mean = -0.15 * (1 + 2 * 2 + 3 * 3) / 6
  kept = dx.outer_params(state, params)
  np.testing.assert_allclose(kept["a"], np.full((2, 2), mean), rtol=1e-6)
