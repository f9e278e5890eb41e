"""Where the outer state lies changes no bit of what is computed.

`tests/outer/test_methods.py` holds all methods to it.

The problem is small and its arrays are named and shaped like a model's, so
that the table of divisions knows them.
"""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.aggregators.exchange import exchange
from dilocox_jax.config import RunConfig
from dilocox_jax.distributed import host_memory
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.inner.step import accumulated_gradient, inner_step
from dilocox_jax.outer.average import averaged
from dilocox_jax.outer.cuts import Cuts
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.outer.rounds import Rounds
from dilocox_jax.plan.model.division import Division
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.training import build
from dilocox_jax.training.checkpoint import Checkpoints
from tests import runs

DEVICE, HOST = host_memory.DEVICE, host_memory.HOST
INTERVAL, NUM_LAYERS = 4, 3
STEPS = 5 * INTERVAL
# Three layers in two fragments: one of them is short.
METHOD = methods.streaming_diloco(INTERVAL, 3, 1)
INNER = optax.sgd(0.05, momentum=0.9)
DIVIDED = Replicas(2, "mesh", Division(2, 2, layers_on_stages=False))
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


def programs_of(method, replicas, kind, power=None) -> Rounds:
  fragments = Fragments(
    method.schedule.num_fragments, NUM_LAYERS, method.fragment_order
  )
  optimizer = optax.sgd(0.7, momentum=0.6, nesterov=True)
  outer = OuterStep(
    method,
    averaged(optimizer, power) if power is not None else optimizer,
    exchange("int(bits=8)", feedback=1.0),
  )
  step = inner_step(accumulated_gradient(loss), INNER)
  return Rounds(
    outer,
    Cuts(fragments.num_fragments, fragments),
    replicas,
    kind,
    inner_step=step,
  )


def first_state(programs):
  return programs.init(params(), INNER.init(params()))


def batches_of(start, stop):
  drawn = np.random.default_rng(0).normal(size=(2, STEPS, 4))
  return drawn[:, start:stop].astype(np.float32)


def train(programs, state, start=0, stop=STEPS):
  """Runs whole rounds; returns (state, losses [M, steps], drifts)."""
  losses, drifts = [], []
  for step in range(start, stop, INTERVAL):
    batches = batches_of(step, step + INTERVAL)
    state, seen, drift = programs.run(state, batches)
    losses.append(np.asarray(seen.loss))
    drifts.append(jax.device_get(drift))
  return state, np.concatenate(losses, axis=1), drifts


def kinds(tree):
  """Where the leaves of a state lie."""
  return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


@has_host_memory
def test_a_run_with_an_average_goes_on_in_host_memory(tmp_path):
  """It was saved by a run whose outer state lay on the device."""
  method, replicas = METHOD, DIVIDED
  before = programs_of(method, replicas, DEVICE, power=3)
  middle, _, _ = train(before, first_state(before), stop=2 * INTERVAL)
  checkpoints = Checkpoints(tmp_path / "checkpoints")
  checkpoints.save(8, middle, {})
  expected = train(before, middle, start=2 * INTERVAL)
  after = programs_of(method, replicas, HOST, power=3)
  in_flight = method.schedule.num_in_flight(2 * INTERVAL)
  like = after.abstract(params(), INNER.init(params()), in_flight)
  restored = checkpoints.restore(lambda record: like)
  checkpoints.close()
  assert restored and kinds(restored[0].fragments) == {HOST}
  found = train(after, restored[0], 2 * INTERVAL)
  runs.assert_same_bits(found, expected)
  kept = after.outer_params(found[0])
  assert kinds(kept) == {DEVICE}
  newest = jax.tree.leaves(jax.device_get(found[0].replica.params))
  averages = jax.tree.leaves(jax.device_get(kept))
  assert any(np.any(x != y) for x, y in zip(averages, newest, strict=True))
  others = [
    jax.tree.map(lambda x: np.asarray(x) + 1, fragment.optimizer)
    for fragment in found[0].fragments
  ]
  state = after.with_outer_optimizers(found[0], others)
  assert kinds(state.fragments) == {HOST}
  taken = [fragment.optimizer for fragment in state.fragments]
  runs.assert_same_bits(taken, others)


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
  assert kinds(state.fragments) == {HOST}
  runs.assert_same_bits(state, runs.saved(tmp_path / "device")[0])


def test_a_memory_that_devices_lack_is_refused_by_name():
  drum = SimpleNamespace(kind="drum")
  lacking = SimpleNamespace(
    platform="abacus", addressable_memories=lambda: [drum]
  )
  mesh = dataclasses.replace(RunConfig().mesh, outer_memory=HOST)
  with (
    mock.patch.object(jax, "local_devices", return_value=[lacking]),
    pytest.raises(ValueError, match="outer_memory.*abacus.* only drum"),
  ):
    build.programs(dataclasses.replace(RunConfig(), mesh=mesh))
