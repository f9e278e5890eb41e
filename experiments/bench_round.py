"""The bench `round`: overhead of delay, of stacking, and of a step itself."""

import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dilocox_jax import assembly
from dilocox_jax.config import MeshConfig, RunConfig, SyncConfig
from dilocox_jax.inner.step import inner_step
from experiments import running

SYNC_INTERVAL = 50
_STACKED = 4

# What a ratio must not exceed (published with the project's issue list).
BOUNDS = {
  "delayed_round_over_inner_steps": 1.03,
  "stacked_replicas_over_single_steps": 1.1,
  "step_over_forward": 3.6,
}

Timed = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Ratio:
  """One comparison: how often slower `measured` is than `baseline`."""

  name: str
  measured: Timed
  baseline: Timed
  scale: float = 1.0  # The ratio is divided by it.


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


def _delayed_round(config: RunConfig) -> Timed:
  """A round with an exchange pending, its state going round in circles."""
  programs = assembly.programs(config)
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


def _inner_steps(config: RunConfig) -> Timed:
  """The same inner steps of the same stacked model, and nothing else."""
  programs = assembly.programs(config)
  count = config.mesh.num_replicas
  step = inner_step(programs.steps.gradient, programs.steps.optimizer)

  def steps(carry, batches):
    def body(carry, batch):
      params, optimizer, seen = step(*carry, batch)
      return (params, optimizer), seen

    return jax.lax.scan(body, carry, batches)

  program = jax.jit(
    programs.rounds.replicas.over(steps, (0, 0), (0, 0)), donate_argnums=0
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


def _forward(config: RunConfig) -> Timed:
  """The forward passes of the same batches, one replica."""
  programs = assembly.programs(config)
  params = jax.jit(programs.model.init)(jax.random.key(0))
  batches = _batches(config, SYNC_INTERVAL)
  return lambda: jax.block_until_ready(programs.evaluate(params, batches))


def _ratios() -> list[Ratio]:
  two, one, many = _config(2), _config(1), _config(_STACKED)
  single = _inner_steps(one)
  names = list(BOUNDS)
  return [
    Ratio(names[0], _delayed_round(two), _inner_steps(two)),
    Ratio(names[1], _inner_steps(many), single, scale=_STACKED),
    Ratio(names[2], single, _forward(one)),
  ]


def _seconds(function: Timed) -> float:
  started = time.perf_counter()
  function()
  return time.perf_counter() - started


def _measure(ratio: Ratio, repeats: int) -> dict[str, float | bool]:
  ratio.measured()  # Compiles.
  ratio.baseline()
  pairs = [
    (_seconds(ratio.measured), _seconds(ratio.baseline))
    for _ in track(range(repeats), description=ratio.name)
  ]
  values = [a / b / ratio.scale for a, b in pairs]
  median = statistics.median(values)
  return {
    "median": median,
    "min": min(values),
    "max": max(values),
    "measured_s": statistics.median(a for a, _ in pairs),
    "baseline_s": statistics.median(b for _, b in pairs),
    "bound": BOUNDS[ratio.name],
    "is_within_bound": median <= BOUNDS[ratio.name],
  }


def run(workdir: pathlib.Path, repeats: int) -> dict:
  """Measures all ratios, writes bench_round.json and prints a table."""
  running.set_up_jax()
  results = {ratio.name: _measure(ratio, repeats) for ratio in _ratios()}
  record = {
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "repeats": repeats,
    "label": "measured: medians of paired ratios in one process",
    "ratios": results,
  }
  path = workdir / "bench_round.json"
  path.write_text(json.dumps(record, indent=2) + "\n")
  table = Table(title="Ratios of wall time, measured")
  for name in ("ratio", "median", "min", "max", "bound"):
    table.add_column(name)
  for name, row in results.items():
    cells = [f"{row[key]:.3f}" for key in ("median", "min", "max", "bound")]
    table.add_row(name, *cells)
  Console().print(table)
  print(f"results: {path}")
  return record
