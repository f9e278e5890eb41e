"""Trains short runs over throttled links, and reads the seconds of a step."""

import itertools
import pathlib
import statistics
from collections.abc import Sequence

import numpy as np

from dilocox_jax.config import RunConfig, from_mapping, to_plan
from dilocox_jax.metrics.rows import RoundRow, Timing
from dilocox_jax.report.run import LoadedRun, load_run
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.outcome import Work
from dilocox_jax.simulate.script import Script
from dilocox_jax.simulate.steady_state import steady_state
from dilocox_jax.simulate.transfer import Transport
from experiments.real_links.cases import predicted_s
from experiments.real_links.network import (
  equal_cluster,
  network_of,
  train_together,
)

NUM_REPLICAS = 2
OPEN_RATE = "1 Gbit/s"  # A slice of a small model takes 0.1 ms.
METHOD, BASELINE = "overlap_loco", "allreduce"
SLICES = 16  # P of the method, and its shortest H.
_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_COMPILING = 4  # First segments of a run, which are not counted.
_COMMON = (
  *("--config.data.batch_size=8", "--config.data.sequence_length=64"),
  *("--config.inner.warmup_steps=5", "--config.mesh.layout=mesh"),
  *("--config.evaluation.interval_steps=0", "--config.adaptive.mode=off"),
  *("--config.evaluation.num_sequences=8", "--config.inner.optimizer=adamw"),
  "--config.checkpoint.interval_steps=1000000",
)


def train(
  method: str,
  sync_interval: int,
  rate: str,
  workdir: pathlib.Path,
  *,
  counted: int = 16,
  changes: Sequence[str] = (),
) -> LoadedRun:
  """Trains a small model on two nodes that are joined by a throttled link.

  Args:
    method: Name of the method's config file.
    sync_interval: H of the method; AllReduce, which has no rounds, dispatches
      so many steps at once.
    rate: Rate of the link, as cluster files write it.
    workdir: Directory of the run.
    counted: Rounds after those that compile.
    changes: Further fields of the config, as "section.field=value".
  """
  num_steps = sync_interval * (_COMPILING + counted)
  field = "steps_per_dispatch" if method == BASELINE else "sync_interval"
  flags = (
    *(f"--config={_CONFIGS}/{method}.py", *_COMMON),
    *(f"--config.total_steps={num_steps}", f"--workdir={workdir}"),
    f"--config.sync.{field}={sync_interval}",
    *(f"--config.{change}" for change in changes),
  )
  with network_of(equal_cluster(rate, NUM_REPLICAS)) as network:
    train_together(network, flags)
  return load_run(workdir)


def open_step_s(folder: pathlib.Path) -> float:
  """Returns the seconds of an inner step of `overlap_loco` over an open link.

  Args:
    folder: Directory for the run.
  """
  return seconds_per_step(train(METHOD, SLICES, OPEN_RATE, folder / "open"))


def rate_for(exchange_s: float, transport: Transport) -> float:
  """Returns the rate at which AllReduce's exchange takes so long (bits/s).

  Args:
    exchange_s: Seconds that the exchange should take.
    transport: Transport of the prediction. Links have no delay, so that twice
      the rate takes half of the seconds.
  """
  config = from_mapping({"sync": {"method": BASELINE}})
  collectives = to_plan.traffic(config).gradient()
  pair = equal_cluster("1 Mbit/s", NUM_REPLICAS)
  return 1e6 * predicted_s(pair, transport, *collectives) / exchange_s


def predicted_step_s(
  config: RunConfig, cluster: Cluster, transport: Transport, step_s: float
) -> float:
  """Returns the simulated seconds of a step in the middle of a run.

  Args:
    config: Config of the run.
    cluster: The nodes and their links.
    transport: Transport of the prediction.
    step_s: Seconds of an inner step alone.
  """
  steps_s = np.full(cluster.num_replicas, step_s)
  found = steady_state(
    LinkCosts(cluster, transport),
    Work(steps_s, np.zeros(cluster.num_replicas)),
    Script(to_plan.traffic(config)),
    to_plan.run_plan(config),
  )
  return found.step_s


def seconds_per_step(run: LoadedRun) -> float:
  """Returns the median over segments of the seconds of an inner step.

  Args:
    run: A run, whose first segments, which compile, are not counted.
  """
  return statistics.median(
    timing.wall_s / num_steps for timing, _, num_steps in _counted(run)
  )


def bytes_ratio(run: LoadedRun) -> float:
  """Returns the bytes on the link over those of the plan, over all segments.

  Args:
    run: A run whose first segments, which compile, are not counted.
  """
  counted = _counted(run)
  planned = sum(row.sent_bytes for _, row, _ in counted)
  return sum(timing.link_bytes for timing, _, _ in counted) / planned


def _counted(run: LoadedRun) -> list[tuple[Timing, RoundRow, int]]:
  """Returns time, row and number of steps of every segment that counts."""
  timings = (row for row in run.timings if row.event == "round")
  ends = itertools.pairwise([0, *(row.step for row in run.rounds)])
  segments = [
    (timing, row, end - begin)
    for timing, row, (begin, end) in zip(timings, run.rounds, ends, strict=True)
  ]
  return segments[_COMPILING:]
