"""The bench `round`: overhead of delay, of stacking, and of a step itself."""

import jax
import numpy as np

from dilocox_jax.config import RunConfig
from dilocox_jax.config.sections import ExchangeConfig, MeshConfig, SyncConfig
from dilocox_jax.training import build
from experiments.tools.benchmarks import inner
from experiments.tools.benchmarks.ratios import Ratio, TimedProgram

SYNC_INTERVAL = 50
_STACKED = 4


def _config(num_replicas: int) -> RunConfig:
  return RunConfig(
    mesh=MeshConfig(num_replicas=num_replicas),
    sync=SyncConfig(method="dilocox", sync_interval=SYNC_INTERVAL),
    exchange=ExchangeConfig("float32"),  # Only the delay is timed.
  )


def _batches(config: RunConfig, *lead: int) -> jax.Array:
  data = config.data
  shape = (*lead, data.batch_size, data.sequence_length + 1)
  drawn = np.random.default_rng(0).integers(0, 256, shape, np.int32)
  return jax.device_put(drawn)


def _delayed_round(config: RunConfig) -> TimedProgram:
  """A round with an exchange pending; each call goes on from the last one."""
  programs = build.programs(config)
  params = jax.jit(programs.model.init)(jax.random.key(0))
  batches = _batches(config, config.mesh.num_replicas, SYNC_INTERVAL)
  optimizer = jax.jit(programs.steps.optimizer.init)(params)
  state = programs.rounds.init(params, optimizer)

  def run() -> None:
    nonlocal state
    # The program reuses the memory of the state that it is given.
    state, metrics, _ = programs.rounds.run(state, batches)
    jax.block_until_ready((state, metrics))

  run()  # Nothing is pending in the first one.
  return run


def _inner_steps(config: RunConfig) -> TimedProgram:
  """The same inner steps of the same stacked model, and nothing else."""
  programs = build.programs(config)
  program = inner.steps_program(programs)
  carry = inner.first_carry(programs)
  batches = _batches(config, config.mesh.num_replicas, SYNC_INTERVAL)

  def run() -> None:
    nonlocal carry
    carry, metrics = program(carry, batches)
    jax.block_until_ready((carry, metrics))

  return run


def _forward(config: RunConfig) -> TimedProgram:
  """The forward passes of the same batches, one replica."""
  programs = build.programs(config)
  params = jax.jit(programs.model.init)(jax.random.key(0))
  batches = _batches(config, SYNC_INTERVAL)
  return lambda: jax.block_until_ready(programs.evaluate(params, batches))


def round_ratios() -> list[Ratio]:
  """Returns what is compared. Bounds are goals, set beforehand."""
  two, one, many = _config(2), _config(1), _config(_STACKED)
  single = _inner_steps(one)
  delayed = "delayed_round_over_inner_steps"
  stacked = "stacked_replicas_over_single_steps"
  return [
    Ratio(delayed, _delayed_round(two), _inner_steps(two), bound=1.03),
    Ratio(stacked, _inner_steps(many), single, bound=1.1, scale=_STACKED),
    Ratio("step_over_forward", single, _forward(one), bound=3.6),
  ]
