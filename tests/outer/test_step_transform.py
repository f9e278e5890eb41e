"""One step at a time, a method does what its rounds and its numpy twin do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from dilocox_jax.exchange.mean import mean_of_finite_replicas
from dilocox_jax.outer.step_transform import pseudo_gradient_steps
from dilocox_jax.plan.schedule import leaf_fragments, methods
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.trees import leaves_by_path
from tests.oracles.least_squares import make_problem
from tests.outer.problem import assert_close, loss, nesterov
from tests.outer.test_against_oracles import CASES, INNER_RATE, oracle, stacked

EXACT = 1e-11  # float64; an update is a difference of two parameters
ROUNDS = 6
NUM_REPLICAS = 3
SPEC = PartitionSpec("replica")


def shapes_of(tree):
  return {path: leaf.shape for path, leaf in leaves_by_path(tree).items()}


def by_layer(method):
  """Fragments as the trainer has them: rows of the stacked leaves."""

  def divide(tree):
    shapes = shapes_of(tree)
    fragments = Fragments(
      method.schedule.num_fragments,
      shapes["blocks/b"][0],
      method.fragment_order,
    )
    return leaf_fragments.by_layer(shapes, fragments)

  return divide


def transform(method):
  return pseudo_gradient_steps(
    method,
    optax.sgd(INNER_RATE),
    nesterov(),
    mean_of_finite_replicas(),
    by_layer(method),
  )


def one_step(tx):
  """The code of one replica: (params, state, batch) -> the same two."""

  def step(params, state, batch):
    gradients = jax.grad(loss)(params, batch)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  return step


def start(tx, problem):
  """Parameters and state of all replicas, leaves [M, ...]."""
  params = jax.tree.map(
    lambda leaf: jnp.stack([jnp.asarray(leaf)] * NUM_REPLICAS), problem[0]
  )
  return params, jax.vmap(tx.init)(params)


def outer_parameters(state):
  """Outer parameters of all replicas by path, as far as leaves are whole."""
  leaves = {}
  for fragment in state.fragments:
    leaves |= fragment.params
  return leaves


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_the_numpy_twin(name, x64):
  method = CASES[name]
  num_steps = ROUNDS * method.schedule.sync_interval
  problem = make_problem(0, NUM_REPLICAS, num_steps, 4, 2, 3)
  expected = oracle(problem, method, num_steps, flush=False)
  tx = transform(method)
  params, state = start(tx, problem)
  program = jax.jit(jax.vmap(one_step(tx), axis_name="replica"))
  for step in range(num_steps):
    batch = problem[1][:, step], problem[2][:, step]
    params, state = program(params, state, batch)
  assert program._cache_size() == 1  # pyright: ignore
  assert_close(params, stacked(expected.params), EXACT)
  theta = leaves_by_path(expected.theta) if method.rule != "eager" else None
  if theta and method.schedule.num_fragments == 1:
    for path, leaf in outer_parameters(state).items():
      np.testing.assert_allclose(leaf[0], theta[path], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["streaming_diloco", "eager", "diloco"])
def test_a_device_for_each_replica_changes_nothing(name, check_vma):
  method = CASES[name]
  num_steps = 2 * method.schedule.sync_interval + 1
  problem = make_problem(0, NUM_REPLICAS, num_steps, 4, 2, 3)
  problem = jax.tree.map(lambda x: np.asarray(x, np.float32), problem)
  tx = transform(method)
  step = one_step(tx)

  def local(*arguments):
    out = step(*jax.tree.map(lambda leaf: leaf[0], arguments))
    return jax.tree.map(lambda leaf: leaf[None], out)

  mesh = jax.make_mesh(
    (NUM_REPLICAS,),
    ("replica",),
    axis_types=(AxisType.Auto,),
    devices=jax.devices()[:NUM_REPLICAS],
  )
  on_devices = jax.jit(
    jax.shard_map(
      local, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=check_vma
    )
  )
  stacked_steps = jax.jit(jax.vmap(step, axis_name="replica"))
  params, state = start(tx, problem)
  other_params, other_state = params, state
  for step_number in range(num_steps):
    batch = problem[1][:, step_number], problem[2][:, step_number]
    params, state = stacked_steps(params, state, batch)
    other_params, other_state = on_devices(other_params, other_state, batch)
  assert_close(other_params, params, 1e-5)


def test_the_exchange_stands_under_a_conditional():
  """All collectives are in branches: a step without an event sends nothing."""
  method = methods.delayed(6, 2, 3, "continue")
  tx = transform(method)
  problem = make_problem(0, NUM_REPLICAS, 2, 4, 2, 3)
  params, state = start(tx, problem)
  batch = problem[1][:, 0], problem[2][:, 0]
  step = jax.vmap(one_step(tx), axis_name="replica", spmd_axis_name=None)
  jaxpr = jax.make_jaxpr(
    lambda p, s, b: step(p, s, b), axis_env=[("devices", NUM_REPLICAS)]
  )(params, state, batch)
  assert "cond" in {str(eqn.primitive) for eqn in jaxpr.jaxpr.eqns}


def test_update_without_parameters_says_what_is_missing():
  tx = transform(methods.diloco(2))
  params = jax.tree.map(jnp.asarray, make_problem(0, 1, 1, 4, 2, 3)[0])
  with pytest.raises(ValueError, match="update needs the parameters"):
    tx.update(params, tx.init(params))
