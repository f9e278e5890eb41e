"""Where the outer state lies changes no bit of what is computed.

The problem is small and its arrays are named and shaped like a model's, so
that the table of divisions knows them and matrices are worth moving.
"""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

from dilocox_jax.config import RunConfig
from dilocox_jax.distributed import host_memory
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.exchange.compressed import Compression
from dilocox_jax.exchange.feedback import Feedback, compressed_mean
from dilocox_jax.inner.step import accumulated_gradient, inner_step
from dilocox_jax.outer.average import averaged
from dilocox_jax.outer.partition import Partition
from dilocox_jax.outer.programs import RoundPrograms
from dilocox_jax.outer.transforms import OuterTransform
from dilocox_jax.plan.model.division import Division
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.wire.payload import Int
from dilocox_jax.training import build, evaluation
from dilocox_jax.training.checkpoint import Checkpoints
from tests import runs

HOST = "pinned_host"
INTERVAL, NUM_LAYERS = 4, 3
STEPS = 5 * INTERVAL
# Three layers in two fragments: one of them is short.
METHODS = {
  "synchronous": methods.diloco(INTERVAL),
  "whole_round": methods.dilocox(INTERVAL),
  "fragments": methods.streaming_diloco(INTERVAL, 3, 1),
  "two_in_flight": methods.delayed(INTERVAL, 3, 6),
  "eager": methods.eager(INTERVAL, 3),
}
INNER = optax.sgd(0.05, momentum=0.9)
LAYOUTS = {
  "stacked": Replicas(2),
  "mesh": Replicas(2, "mesh"),
  "divided": Replicas(2, "mesh", Division(2, 2, layers_on_stages=False)),
}
# Every method, and every layout with one fragment and with several; how
# fragments go on one device is seen below.
CASES = (
  ("synchronous", "mesh"),
  ("whole_round", "stacked"),
  ("whole_round", "divided"),
  ("fragments", "divided"),
  ("two_in_flight", "mesh"),
  ("eager", "stacked"),
)

has_host_memory = pytest.mark.skipif(
  host_memory.unsupported(HOST, jax.local_devices()) is not None,
  reason="these devices have no host memory of their own",
)


def params():
  keys = jax.random.split(jax.random.key(0), 3)
  draw = jax.random.normal
  return {
    "blocks": {"up": {"kernel": draw(keys[0], (NUM_LAYERS, 32, 16))}},
    "embed": {"embedding": draw(keys[1], (32, 16))},
    "final_norm": {"scale": draw(keys[2], (16,))},
  }


def loss(tree, batch):
  """Every replica and step has another minimum, and no leaf the same."""
  terms = [
    jnp.sum(
      jnp.square(leaf - jnp.mean(jnp.cos(number * batch)) * jnp.sin(leaf))
    )
    for number, leaf in zip((1.0, 2.0, 3.0), jax.tree.leaves(tree), strict=True)
  ]
  return sum(terms, start=jnp.float32(0))


def programs_of(method, replicas, kind, power=None) -> RoundPrograms:
  fragments = Fragments(
    method.schedule.num_fragments, NUM_LAYERS, method.fragment_order
  )
  optimizer = optax.sgd(0.7, momentum=0.6, nesterov=True)
  outer = OuterTransform(
    method,
    Partition(fragments),
    averaged(optimizer, power) if power is not None else optimizer,
    compressed_mean(Compression(Int(8)), Feedback()),
  )
  step = inner_step(accumulated_gradient(loss), INNER)
  return RoundPrograms(outer, step, replicas, kind)


def first_state(programs):
  return programs.init(params(), INNER.init(params()))


def batches_of(start, stop):
  drawn = np.random.default_rng(0).normal(size=(2, STEPS, 4))
  return drawn[:, start:stop].astype(np.float32)


def train(programs, state, start=0, stop=STEPS):
  """Runs whole rounds; returns (state, losses [M, steps], drifts)."""
  losses, drifts = [], []
  schedule = programs.outer.method.schedule
  for step in range(start, stop, INTERVAL):
    windows = schedule.round_windows(step // INTERVAL)
    state, seen, drift = programs.round(
      state, batches_of(step, step + INTERVAL), windows
    )
    losses.append(np.asarray(seen.loss))
    drifts.append(jax.device_get(drift))
  return state, np.concatenate(losses, axis=1), drifts


def kinds(tree):
  """Where the leaves of a state lie, which their types must say as well."""
  found = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name, kind = jax.tree_util.keystr(path), leaf.sharding.memory_kind
    assert host_memory.is_on_host(leaf) == (kind == HOST), name
    found[name] = kind
  return found


def slow_after(count, cases):
  """The first cases as they are, the others for the slow tier."""
  rest = [pytest.param(*case, marks=pytest.mark.slow) for case in cases[count:]]
  return [*cases[:count], *rest]


@has_host_memory
@pytest.mark.parametrize(("name", "layout"), slow_after(2, CASES))
def test_rounds_and_flush_are_the_same_from_host_memory(name, layout):
  ends = []
  for kind in (host_memory.DEVICE, HOST):
    programs = programs_of(METHODS[name], LAYOUTS[layout], kind)
    first = first_state(programs)
    placed = kinds(first)
    state, losses, drifts = train(programs, first)
    assert kinds(state) == placed  # No round leaves a part elsewhere.
    flushed, _ = programs.flush(state, STEPS)
    assert kinds(flushed) == placed
    evaluated = programs.outer_params(flushed)
    assert set(kinds(evaluated).values()) == {"device"}
    ends.append((state, losses, drifts, flushed, evaluated))
  assert np.ptp(ends[0][1]) > 0.1  # It trains.
  runs.assert_same_bits(*ends)


@has_host_memory
@pytest.mark.parametrize("name", ["whole_round", "fragments"])
def test_an_average_lies_on_the_host_and_is_evaluated_on_the_device(name):
  ends = []
  for kind in (host_memory.DEVICE, HOST):
    programs = programs_of(METHODS[name], LAYOUTS["stacked"], kind, power=3)
    state, _, _ = train(programs, first_state(programs))
    state, _ = programs.flush(state, STEPS)
    kept = programs.outer_params(state)
    assert set(kinds(kept).values()) == {"device"}
    newest = jax.tree.leaves(jax.device_get(state.outer.params))
    averages = jax.tree.leaves(jax.device_get(kept))
    assert any(np.any(x != y) for x, y in zip(averages, newest, strict=True))
    ends.append((state, kept))
  averages = {k: v for k, v in kinds(state).items() if ".average" in k}
  assert HOST in averages.values()
  runs.assert_same_bits(*ends)


@has_host_memory
def test_matrices_of_the_outer_state_and_nothing_else_lie_on_the_host():
  programs = programs_of(METHODS["fragments"], LAYOUTS["stacked"], HOST)
  for path, kind in kinds(first_state(programs)).items():
    is_matrix = "kernel" in path or "embedding" in path
    assert (kind == HOST) == (path.startswith(".outer") and is_matrix), path


@has_host_memory
@pytest.mark.parametrize(
  ("saved_in", "layout"),
  slow_after(
    1,
    [
      (host_memory.DEVICE, "stacked"),
      (host_memory.DEVICE, "divided"),
      (HOST, "divided"),
      (HOST, "stacked"),
    ],
  ),
)
def test_a_run_goes_on_in_host_memory_from_either(tmp_path, saved_in, layout):
  method, replicas = METHODS["fragments"], LAYOUTS[layout]
  before = programs_of(method, replicas, saved_in)
  middle, _, _ = train(before, first_state(before), stop=2 * INTERVAL)
  checkpoints = Checkpoints(tmp_path / "checkpoints")
  checkpoints.save(8, middle, {})
  expected = train(before, middle, start=2 * INTERVAL)

  after = programs_of(method, replicas, HOST)
  like = after.abstract(params(), INNER.init(params()))
  restored = checkpoints.restore(lambda record: like)
  checkpoints.close()
  assert restored
  assert kinds(restored[0]) == kinds(first_state(after))
  runs.assert_same_bits(train(after, restored[0], 2 * INTERVAL), expected)


@has_host_memory
def test_an_inherited_outer_optimizer_lies_where_its_forerunner_did():
  programs = programs_of(METHODS["whole_round"], LAYOUTS["mesh"], HOST)
  state = first_state(programs)
  other = jax.tree.map(lambda x: np.asarray(x) + 1, state.outer.optimizer)
  taken = programs.with_outer_optimizer(state, other)
  assert kinds(taken) == kinds(state)
  runs.assert_same_bits(taken.outer.optimizer, other)
  assert HOST in kinds(taken.outer.optimizer).values()


@has_host_memory
@pytest.mark.slow
def test_a_whole_run_writes_the_same_rows_from_host_memory(tmp_path):
  """Evaluation, checks and saves read the outer state too."""
  config = runs.settings()
  mesh = dataclasses.replace(config.mesh, outer_memory=HOST)
  on_host = dataclasses.replace(config, mesh=mesh)
  runs.train(config, tmp_path / "device")
  runs.train(on_host, tmp_path / "host")
  rows = runs.rows(tmp_path / "host")
  assert rows == runs.rows(tmp_path / "device")
  state, _ = runs.saved(tmp_path / "host")
  assert HOST in kinds(state.outer.params).values()
  runs.assert_same_bits(state, runs.saved(tmp_path / "device")[0])


# What may be done with an array in host memory: nothing that computes, and of
# what indexes, only what compilers can do without bringing all of it over.
MOVES = {
  "device_put",
  "dynamic_slice",
  "dynamic_update_slice",
  "reshape",
  "slice",
  "squeeze",
  "broadcast_in_dim",
  "sharding_constraint",
}


def on_host(jaxpr):
  """Names of all primitives that read an array in host memory."""
  found = set()
  for equation in jaxpr.eqns:
    inside = list(jaxprs_in_params(equation.params))
    for each in inside:
      found |= on_host(each)
    spaces = {
      getattr(variable.aval, "memory_space", None)
      for variable in equation.invars
    }
    if not inside and jax.memory.Space.Host in spaces:
      found.add(equation.primitive.name)
  return found


@has_host_memory
@pytest.mark.parametrize("layout", ["stacked", "divided"])
@pytest.mark.parametrize("name", ["whole_round", "two_in_flight", "eager"])
def test_arrays_in_host_memory_are_only_moved(name, layout):
  programs = programs_of(METHODS[name], LAYOUTS[layout], HOST)
  state, schedule = first_state(programs), programs.outer.method.schedule
  shapes, tables = programs.groups(schedule.round_windows(3))
  batches = programs.replicas.place_batches(batches_of(0, INTERVAL))
  of_round = jax.make_jaxpr(programs.compiled(shapes))(state, batches, tables)
  of_flush = jax.make_jaxpr(lambda s: programs.flush(s, STEPS))(state)
  of_check = jax.make_jaxpr(evaluation._all_finite)(state)
  assert {"device_put"} <= on_host(of_round.jaxpr) <= MOVES
  assert {"device_put"} <= on_host(of_flush.jaxpr) <= MOVES
  assert {"device_put"} == on_host(of_check.jaxpr)


def device_with(*names):
  memories = [SimpleNamespace(kind=name) for name in names]
  return SimpleNamespace(
    platform="abacus", addressable_memories=lambda: memories
  )


def test_a_memory_that_devices_lack_is_refused_by_name():
  config = RunConfig()
  mesh = dataclasses.replace(config.mesh, outer_memory=HOST)
  lacking = [device_with("device", "drum")]
  with (
    mock.patch.object(jax, "local_devices", return_value=lacking),
    pytest.raises(ValueError) as refused,
  ):
    build.programs(dataclasses.replace(config, mesh=mesh))
  assert str(refused.value) == (
    "mesh.outer_memory='pinned_host': the devices (abacus) have only device, "
    "drum: take 'device'"
  )


def test_a_memory_that_programs_cannot_use_is_refused_with_their_reason():
  def fail(place):
    raise ValueError("no slices\nand more")

  with mock.patch.object(host_memory, "_try_out", fail):
    assert (
      host_memory.unsupported(host_memory.DEVICE, jax.local_devices()) is None
    )
    reason = host_memory.unsupported(HOST, [*jax.local_devices()])
  assert reason and reason.endswith("fail at it: no slices")
