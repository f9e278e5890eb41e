"""The bench `round`: overhead of delay, of stacking, and of a step itself."""

import jax
import numpy as np

from dilocox_jax.config import RunConfig
from dilocox_jax.config.sections import (
  DataConfig,
  ExchangeConfig,
  MeshConfig,
  ModelConfig,
  SyncConfig,
)
from dilocox_jax.training import build
from experiments.tools.benchmarks import inner
from experiments.tools.benchmarks.ratios import Ratio, TimedProgram


def _config(
  num_replicas: int, preset: str, sync_interval: int, batch_size: int
) -> RunConfig:
  return RunConfig(
    model=ModelConfig(preset=preset),
    data=DataConfig(batch_size=batch_size),
    mesh=MeshConfig(num_replicas=num_replicas),
    sync=SyncConfig(method="dilocox", sync_interval=sync_interval),
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
  batches = _batches(
    config, config.mesh.num_replicas, config.sync.sync_interval
  )
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
  batches = _batches(
    config, config.mesh.num_replicas, config.sync.sync_interval
  )

  def run() -> None:
    nonlocal carry
    carry, metrics = program(carry, batches)
    jax.block_until_ready((carry, metrics))

  return run


def _forward(config: RunConfig) -> TimedProgram:
  """The forward passes of the same batches, one replica."""
  programs = build.programs(config)
  params = jax.jit(programs.model.init)(jax.random.key(0))
  batches = _batches(config, config.sync.sync_interval)
  return lambda: jax.block_until_ready(programs.evaluate(params, batches))


def round_ratios(
  preset: str = "tiny",
  sync_interval: int = 50,
  batch_size: int = 8,
  stacked: int = 2,
) -> list[Ratio]:
  """Returns what is compared. Bounds are goals, set beforehand.

  Args:
    preset: Sizes of the model.
    sync_interval: H (inner steps).
    batch_size: Sequences of a step of one replica.
    stacked: Replicas that one device steps together.
  """
  sizes = preset, sync_interval, batch_size
  two, one, many = (
    _config(2, *sizes),
    _config(1, *sizes),
    _config(stacked, *sizes),
  )
  single = _inner_steps(one)
  delayed = "delayed round over its inner steps"
  together = f"{stacked} stacked replicas over one, for the same tokens"
  return [
    Ratio(delayed, _delayed_round(two), _inner_steps(two), bound=1.02),
    Ratio(together, _inner_steps(many), single, bound=1.05, scale=stacked),
    Ratio("step over its forward pass", single, _forward(one), bound=3.6),
  ]
