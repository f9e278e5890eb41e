"""The bench `round`: overhead of delay, of stacking, and of a step itself."""

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.config import RunConfig
from dilocox_jax.config.sections import MeshConfig, SyncConfig
from dilocox_jax.inner.step import inner_step
from dilocox_jax.training import build
from experiments.benchmarks.ratios import Ratio, TimedProgram

SYNC_INTERVAL = 50
_STACKED = 4


def _config(num_replicas: int) -> RunConfig:
  return RunConfig(
    mesh=MeshConfig(num_replicas=num_replicas),
    sync=SyncConfig(method="dilocox", sync_interval=SYNC_INTERVAL),
  )


def _batches(config: RunConfig, *lead: int) -> jax.Array:
  data = config.data
  shape = (*lead, data.batch_size, data.sequence_length + 1)
  drawn = np.random.default_rng(0).integers(0, 256, shape, np.int32)
  return jax.device_put(drawn)


def _delayed_round(config: RunConfig) -> TimedProgram:
  """A round with an exchange pending, its state going round in circles."""
  programs = build.programs(config)
  params = jax.jit(programs.model.init)(jax.random.key(0))
  windows = config.sync.named.schedule.round_windows(1)
  batches = _batches(config, config.mesh.num_replicas, SYNC_INTERVAL)
  optimizer = jax.jit(programs.steps.optimizer.init)(params)
  kept = [programs.rounds.init(params, optimizer)]

  def run() -> None:
    state, metrics, _ = programs.rounds.round(kept.pop(), batches, windows)
    kept.append(jax.block_until_ready(state))
    jax.block_until_ready(metrics)

  return run


def _inner_steps(config: RunConfig) -> TimedProgram:
  """The same inner steps of the same stacked model, and nothing else."""
  programs = build.programs(config)
  count = config.mesh.num_replicas
  step = inner_step(programs.steps.gradient, programs.steps.optimizer)

  def steps(carry, batches):
    def body(carry, batch):
      params, optimizer, seen = step(*carry, batch)
      return (params, optimizer), seen

    return jax.lax.scan(body, carry, batches)

  program = jax.jit(
    programs.rounds.replicas.map(steps, (0, 0), (0, 0)), donate_argnums=0
  )
  params = jax.jit(programs.model.init)(jax.random.key(0))
  optimizer = jax.jit(programs.steps.optimizer.init)(params)
  kept = [
    jax.tree.map(lambda leaf: jnp.stack([leaf] * count), (params, optimizer))
  ]
  batches = _batches(config, count, SYNC_INTERVAL)

  def run() -> None:
    carry, seen = program(kept.pop(), batches)
    kept.append(jax.block_until_ready(carry))
    jax.block_until_ready(seen)

  return run


def _forward(config: RunConfig) -> TimedProgram:
  """The forward passes of the same batches, one replica."""
  programs = build.programs(config)
  params = jax.jit(programs.model.init)(jax.random.key(0))
  batches = _batches(config, SYNC_INTERVAL)
  return lambda: jax.block_until_ready(programs.evaluate(params, batches))


def ratios() -> list[Ratio]:
  """What is compared; bounds are goals, set beforehand."""
  two, one, many = _config(2), _config(1), _config(_STACKED)
  single = _inner_steps(one)
  return [
    Ratio(
      "delayed_round_over_inner_steps",
      _delayed_round(two),
      _inner_steps(two),
      bound=1.03,
    ),
    Ratio(
      "stacked_replicas_over_single_steps",
      _inner_steps(many),
      single,
      bound=1.1,
      scale=_STACKED,
    ),
    Ratio("step_over_forward", single, _forward(one), bound=3.6),
  ]
