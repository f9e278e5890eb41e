"""One step at a time, a method does what its rounds and its numpy twin do."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from dilocox_jax.aggregators.mean import (
  mean_of_finite_replicas,
)
from dilocox_jax.outer.cuts import Cuts
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.outer.step_state import outer_params
from dilocox_jax.outer.step_transform import pseudo_gradient_steps
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.fragments import Fragments
from tests.oracles.least_squares import make_problem
from tests.outer.problem import assert_close, loss, nesterov
from tests.outer.test_against_oracles import CASES, INNER_RATE, oracle, stacked

EXACT = 1e-11  # float64; an update is a difference of two parameters
ROUNDS = 6
NUM_REPLICAS, LAYERS = 3, 4
QUICK = ("streaming_diloco", "dilocox_continue", "delay_over_a_round", "eager")
SPEC = PartitionSpec("replica")


def transform(method, num_layers=LAYERS):
  """The method's transform, with fragments as the trainer has them."""
  schedule = method.schedule
  fragments = Fragments(
    schedule.num_fragments, num_layers, method.fragment_order
  )
  return pseudo_gradient_steps(
    OuterStep(method, nesterov(), mean_of_finite_replicas()),
    optax.sgd(INNER_RATE),
    Cuts(schedule.num_fragments, fragments),
  )


def one_step(tx):
  """The code of one replica: (params, state, batch) -> the same two."""

  def step(params, state, batch):
    gradients = jax.grad(loss)(params, batch)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  return step


def on_devices(tx, check_vma=True):
  """The jitted step with a device for every replica."""
  mesh = jax.make_mesh(
    (NUM_REPLICAS,),
    ("replica",),
    axis_types=(AxisType.Auto,),
    devices=jax.devices()[:NUM_REPLICAS],
  )
  return jax.jit(
    jax.shard_map(
      jax.vmap(one_step(tx)),
      mesh=mesh,
      in_specs=SPEC,
      out_specs=SPEC,
      check_vma=check_vma,
    )
  )


def start(tx, problem):
  """Parameters and state of all replicas, leaves [M, ...]."""
  params = jax.tree.map(
    lambda leaf: jnp.stack([jnp.asarray(leaf)] * NUM_REPLICAS), problem[0]
  )
  return params, jax.vmap(tx.init)(params)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in CASES
  ],
)
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
  whole = jax.tree.map(lambda leaf: leaf[0], outer_params(state, params))
  theta = expected.theta[0] if method.rule == "eager" else expected.theta
  assert_close(whole, theta, EXACT)


@pytest.mark.parametrize(
  ("name", "check_vma"),
  [
    ("streaming_diloco", True),
    pytest.param("streaming_diloco", False, marks=pytest.mark.slow),
    pytest.param("eager", True, marks=pytest.mark.slow),
    pytest.param("eager", False, marks=pytest.mark.slow),
    pytest.param("diloco", True, marks=pytest.mark.slow),
    ("diloco", False),
  ],
)
def test_a_device_for_each_replica_changes_nothing(name, check_vma):
  method = CASES[name]
  num_steps = 2 * method.schedule.sync_interval + 1
  problem = make_problem(0, NUM_REPLICAS, num_steps, 4, 2, 3)
  problem = jax.tree.map(lambda x: np.asarray(x, np.float32), problem)
  tx = transform(method)
  devices = on_devices(tx, check_vma)
  stacked_steps = jax.jit(jax.vmap(one_step(tx), axis_name="replica"))
  params, state = start(tx, problem)
  other_params, other_state = params, state
  for step_number in range(num_steps):
    batch = problem[1][:, step_number], problem[2][:, step_number]
    params, state = stacked_steps(params, state, batch)
    other_params, other_state = devices(other_params, other_state, batch)
  assert_close(other_params, params, 1e-5)


COLLECTIVE = re.compile(
  r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
  r"(-start)?\("
)
BRANCHES = re.compile(r"(?:branch|true|false)_computations?=\{?([^}=]*)")


def computations(text):
  """Instructions of a compiled program by computation; the entry's is ""."""
  found, name = collections.defaultdict(list), None
  for line in text.splitlines():
    if opened := re.match(r"(ENTRY )?%?(\S+) .*\{$", line):
      name = "" if opened[1] else opened[2]
    elif name is not None:
      found[name].append(line)
  return found


def test_a_step_without_an_exchange_sends_nothing():
  """All collectives of the compiled step stand in branches of conditionals."""
  tx = transform(methods.delayed(6, 2, 3, "continue"))
  problem = make_problem(0, NUM_REPLICAS, 1, 4, 2, 3)
  problem = jax.tree.map(lambda x: np.asarray(x, np.float32), problem)
  params, state = start(tx, problem)
  batch = problem[1][:, 0], problem[2][:, 0]
  program = on_devices(tx).lower(params, state, batch).compile()
  found = computations(program.as_text())
  sending = {
    name for name, lines in found.items() if any(map(COLLECTIVE.search, lines))
  }
  branches = {
    name.strip(" %,")
    for lines in found.values()
    for line in lines
    for listed in BRANCHES.findall(line)
    for name in listed.split()
  }
  assert sending
  assert sending <= branches


def num_lines(method, num_layers):
  """Length of the step's program."""
  tx = transform(method, num_layers)
  problem = make_problem(0, NUM_REPLICAS, 1, num_layers, 2, 3)
  params, state = start(tx, problem)
  step = jax.jit(jax.vmap(tx.update, axis_name="replica"))
  return step.lower(params, state, params).as_text().count("\n")


@pytest.mark.parametrize("order", ["sliced", "strided"])
def test_the_program_grows_neither_with_the_interval_nor_with_fragments(order):
  few, long, many = (
    num_lines(methods.delayed(h, p, 1, "continue", fragment_order=order), 16)
    for h, p in ((16, 4), (64, 4), (64, 16))
  )
  assert max(long, many) <= 1.3 * few


def test_states_work_with_the_functions_of_optax():
  method = methods.streaming_diloco(6, 3, 2, 0.5)
  outer = OuterStep(method, nesterov(), mean_of_finite_replicas())
  tx = pseudo_gradient_steps(outer, optax.adam(0.1), Cuts(3))
  params = jax.tree.map(jnp.asarray, make_problem(0, 1, 1, 4, 2, 3)[0])
  state = tx.init(params)
  shapes = jax.eval_shape(tx.init, params)
  assert jax.tree.structure(shapes) == jax.tree.structure(state)
  marked = optax.tree.map_params(
    tx,
    lambda value: "parameter",
    state,
    transform_non_params=lambda value: "other",
  )
  flat = jax.tree.leaves(marked)
  # Two moments of 4 leaves; in the fragments theta, momentum, one in flight.
  assert flat.count("parameter") == 4 * (2 + 3)
  assert flat.count("other") == len(jax.tree.leaves(state)) - 4 * (2 + 3)
  counts = optax.tree.get_all_with_path(state, "count")
  assert len(counts) >= 1


def test_update_without_parameters_says_what_is_missing():
  tx = transform(methods.diloco(2))
  params = jax.tree.map(jnp.asarray, make_problem(0, 1, 1, 4, 2, 3)[0])
  with pytest.raises(ValueError, match="update needs the parameters"):
    tx.update(params, tx.init(params))
