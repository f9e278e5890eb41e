"""Trains short runs over throttled links, and reads the seconds of a step."""

import itertools
import pathlib
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.metrics.recorder import TIMING
from dilocox_jax.metrics.rows import RoundRow, Timing
from dilocox_jax.plan.schedule.methods import named_method
from dilocox_jax.report.run import LoadedRun, load_run
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.interpreter import Work
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.script import Script
from dilocox_jax.simulate.steps import steady_state
from dilocox_jax.simulate.transfer import Transport
from experiments.runtime.command_line import CONFIGS
from experiments.tools.real_links.changing_link import ChangingLink
from experiments.tools.real_links.network import (
  equal_cluster,
  network_of,
  train_together,
)

NUM_REPLICAS = 2
# A model whose messages are so large that gloo's own, about 1 kB an exchange,
# are a few percent of them, though a step takes as long as one of `tiny`.
LARGER_CHANGES = (
  *("model.model_dim=256", "model.ff_dim=768", "data.batch_size=2"),
  *("data.sequence_length=32", "inner.optimizer=adamw"),
)
Segment = tuple[Timing, RoundRow, int]  # Its time, its row, its inner steps.
_COMMON = (
  *("--config.data.batch_size=8", "--config.data.sequence_length=64"),
  *("--config.inner.warmup_steps=1", "--config.mesh.layout=mesh"),
  *("--config.evaluation.interval_steps=0", "--config.adaptive.mode=off"),
  *("--config.evaluation.num_sequences=8", "--config.inner.optimizer=adamw"),
  "--config.checkpoint.interval_steps=1000000",
)


def flags_of(
  method: str,
  sync_interval: int,
  num_segments: int,
  workdir: pathlib.Path,
  changes: Sequence[str] = (),
) -> list[str]:
  """Returns the flags of `experiments.train` for a short run.

  Args:
    method: Name of the method's config file.
    sync_interval: H of the method, or the steps that are dispatched at once if
      it has no rounds. Both are a segment.
    num_segments: Length of the run.
    workdir: Directory of the run.
    changes: Further fields of the config, as "section.field=value".
  """
  has_rounds = named_method(method).exchanged != "gradient"
  field = "sync_interval" if has_rounds else "steps_per_dispatch"
  return [
    *(f"--config={CONFIGS}/{method}.py", *_COMMON),
    *(f"--config.total_steps={sync_interval * num_segments}",),
    *(f"--workdir={workdir}", f"--config.sync.{field}={sync_interval}"),
    *(f"--config.{change}" for change in changes),
  ]


def train_while_link_changes(
  flags: Sequence[str],
  workdir: pathlib.Path,
  rate_of: Callable[[Sequence[float]], float],
) -> LoadedRun:
  """Trains on two nodes whose link changes as rounds end.

  Args:
    flags: Flags of `experiments.train`, with the work directory.
    workdir: The same directory.
    rate_of: Returns the rate (bits per second) after rounds that took so many
      seconds each.
  """
  with (
    network_of(equal_cluster("100 Mbit/s", NUM_REPLICAS)) as network,
    ChangingLink(network, workdir / TIMING, rate_of),
  ):
    train_together(network, flags)
  return load_run(workdir)


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


def ratio_of_bytes(segments: Sequence[Segment]) -> float:
  """Returns the bytes on the link over those of the plan."""
  planned = sum(row.sent_bytes for _, row, _ in segments)
  return sum(timing.link_bytes for timing, _, _ in segments) / planned


def median_step_s(segments: Sequence[Segment]) -> float:
  """Returns the median over segments of the seconds of an inner step."""
  return statistics.median(
    timing.wall_s / num_steps for timing, _, num_steps in segments
  )


def segments(run: LoadedRun) -> list[Segment]:
  """Returns time, row and number of steps of every segment of a run."""
  timings = (row for row in run.timings if row.event == "round")
  ends = itertools.pairwise([0, *(row.step for row in run.rounds)])
  return [
    (timing, row, end - begin)
    for timing, row, (begin, end) in zip(timings, run.rounds, ends, strict=True)
  ]
