"""Times a finished run on a cluster, from its recorded rounds and bytes."""

import dataclasses
import math
import pathlib

from rich.console import Console

from dilocox_jax import report
from dilocox_jax.api.simulation_setup import Options, Setup, set_up
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.config.membership import MembershipConfig
from dilocox_jax.metrics import Timing, write_json
from dilocox_jax.report import figures
from dilocox_jax.report.page import picture, write_page
from dilocox_jax.report.run import LoadedRun
from dilocox_jax.report.tables import markdown_table
from dilocox_jax.simulate.analytic import AnalyticClock
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.script import RecordedRound, recorded_ops
from experiments.runtime.command_line import own_command


def time_run(
  workdir: str, cluster_name: str, options: Options
) -> tuple[LoadedRun, Cluster]:
  """Computes the simulated time of every evaluation of a finished run.

  Args:
    workdir: The run directory.
    cluster_name: Name of a preset, or path of a file.
    options: What config and cluster leave open.

  Returns:
    The run, whose timings hold simulated seconds only, and the cluster.

  Raises:
    ValueError: One line that says what is wrong.
  """
  run = report.load_run(workdir)
  config = from_mapping(run.config)
  if not run.rounds:
    raise ValueError(f"--run={workdir} has no finished round yet")
  if reason := _untimed(run, config):
    raise ValueError(f"--run={workdir} {reason}: train it with --cluster")
  setup = set_up(config, cluster_name, options)
  at_s = {0: 0.0} | _times(run, config, setup)
  timings = []
  for row in run.evaluations:
    now_s = at_s[max(step for step in at_s if step <= row.step)]
    timings.append(Timing(row.step, "evaluation", 0.0, math.nan, now_s))
  cluster = setup.link_costs.cluster
  name = f"cluster {cluster.name}"
  record = {**run.record, "clock": name, "clock_digest": ""}
  return dataclasses.replace(run, timings=timings, record=record), cluster


def _times(run: LoadedRun, config: RunConfig, setup: Setup) -> dict[int, float]:
  """Returns simulated seconds by inner step, at the end of each round."""
  clock = AnalyticClock(setup.link_costs, setup.work)
  if config.adaptive.mode == "off":  # Then the plan says it all.
    return {
      segment.stop: clock.walk(setup.script.segment(segment)).now_s
      for segment in setup.plan.segments()
    }
  steps = [0, *(row.step for row in run.rounds)]
  rows = [
    RecordedRound(row.step - before, row.sent_bytes, row.phase == "rounds")
    for row, before in zip(run.rounds, steps, strict=False)
  ]
  ops = recorded_ops(rows, setup.script.traffic)
  return {
    row.step: clock.walk(round_ops).now_s
    for row, round_ops in zip(run.rounds, ops, strict=True)
  }


def _untimed(run: LoadedRun, config: RunConfig) -> str:
  """Returns what keeps a run from being timed afterwards; "" is nothing."""
  if config.adaptive.mode != "off":
    if config.sync.named.schedule.num_fragments > 1:
      return (
        "has fragments whose ranks adapt, and rows do not say which message had"
        " which"
      )
    if config.membership != MembershipConfig():
      return (
        "has ranks that adapt and replicas that do not all train alike, and"
        " rows do not say who did what"
      )
  if "model" in run.record.get("handed_in", ()):
    return "has a model that was handed in, whose sizes are not recorded"
  return ""


def report_recorded(
  run: LoadedRun, cluster: Cluster, workdir: pathlib.Path
) -> None:
  """Writes loss against simulated time as page, figure and JSON.

  Args:
    run: A run whose timings hold simulated seconds only (see `time_run`).
    cluster: Cluster on which it was timed.
    workdir: Directory to write into.
  """
  rows = [
    {"step": e.step, "simulated_s": t.simulated_s, "outer_loss": e.outer_loss}
    for e, t in zip(run.evaluations, run.timings, strict=True)
  ]
  table = markdown_table(
    ("inner step", "simulated time (s)", "loss"),
    [
      (row["step"], f"{row['simulated_s']:.6g}", f"{row['outer_loss']:.4f}")
      for row in rows
    ],
  )
  lines = [
    "Losses were measured; times are simulated from the run's rounds and bytes."
    " The flush at the end is not on the clock.",
    *("", *table),
  ]
  figure = figures.time_figure(run)
  if figure is not None:
    caption = "Loss against simulated time"
    lines += ["", *picture(figure, workdir, "hours", caption)]
  write_json(workdir / "recorded.json", rows)
  title = f"{run.record['method']}, as recorded, on {cluster.name}"
  page = write_page(workdir, title, lines, own_command())
  Console().print(*table, sep="\n")
  print(f"report: {page}")
