"""Times a finished run on a cluster, from its recorded rounds and bytes."""

import dataclasses
import math
import pathlib

from rich.console import Console

from dilocox_jax import report
from dilocox_jax.api.simulation_setup import Options, Setup, set_up
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.metrics import Timing
from dilocox_jax.metrics.lines import write_atomically, write_json
from dilocox_jax.report import figures
from dilocox_jax.report.page import PAGE, save_figure
from dilocox_jax.report.run import LoadedRun
from dilocox_jax.report.text_tables import markdown_table
from dilocox_jax.simulate.analytic import AnalyticClock
from dilocox_jax.simulate.recorded import RecordedRound, recorded_ops
from experiments.runtime.command_line import own_command


@dataclasses.dataclass(frozen=True)
class TimedRun:
  """A run whose evaluations have a simulated time.

  Attributes:
    run: The run; its timings hold simulated seconds only.
    setup: Cluster and work.
  """

  run: LoadedRun
  setup: Setup


def time_run(workdir: str, cluster_name: str, options: Options) -> TimedRun:
  """Computes the simulated time of every evaluation of a finished run.

  Args:
    workdir: The run directory.
    cluster_name: Name of a preset, or path of a file.
    options: What config and cluster leave open.

  Raises:
    ValueError: One line that says what is wrong.
  """
  run = report.load_run(workdir)
  config = from_mapping(run.config)
  if not run.rounds:
    raise ValueError(f"--run={workdir} has no finished round yet")
  if _has_fragments(config) and config.adaptive.mode != "off":
    raise ValueError(
      f"--run={workdir} has fragments whose ranks adapt, and rows do not say"
      " which message had which: train it with --cluster instead"
    )
  setup = set_up(config, cluster_name, options)
  at_s = {0: 0.0} | _times(run, config, setup)
  timings = []
  for row in run.evaluations:
    now_s = at_s[max(step for step in at_s if step <= row.step)]
    timings.append(Timing(row.step, "evaluation", 0.0, math.nan, now_s))
  return TimedRun(dataclasses.replace(run, timings=timings), setup)


def _times(run: LoadedRun, config: RunConfig, setup: Setup) -> dict[int, float]:
  """Returns simulated seconds by inner step, at the end of each round."""
  clock = AnalyticClock(setup.link_costs, setup.work)
  if _has_fragments(config):
    return {
      segment.stop: clock.walk(setup.script.segment(segment)).now_s
      for segment in setup.plan.segments()
    }
  steps = [0, *(row.step for row in run.rounds)]
  rows = [
    RecordedRound(row.step - before, row.sent_bytes, row.phase == "local")
    for row, before in zip(run.rounds, steps, strict=False)
  ]
  ops = recorded_ops(rows, setup.script.traffic)
  return {
    row.step: clock.walk(round_ops).now_s
    for row, round_ops in zip(run.rounds, ops, strict=True)
  }


def _has_fragments(config: RunConfig) -> bool:
  return config.sync.named.schedule.num_fragments > 1


def report_recorded(timed: TimedRun, workdir: pathlib.Path) -> None:
  """Writes loss against simulated time as page, figure and JSON.

  Raises:
    RecordError: The disk refused.
  """
  run, cluster = timed.run, timed.setup.link_costs.cluster
  at = {timing.step: timing.simulated_s for timing in run.timings}
  times = [(row, at[row.step]) for row in run.evaluations]
  table = markdown_table(
    ("inner step", "simulated time (s)", "loss"),
    [(e.step, f"{at_s:.6g}", f"{e.outer_loss:.4f}") for e, at_s in times],
  )
  command = own_command()
  lines = [
    f"# {run.record['method']}, as recorded, on {cluster.name}",
    "",
    f"    {command}",
    "",
    "Losses were measured; times are simulated from the run's rounds and bytes."
    " The flush at the end is not on the clock.",
    "",
    *table,
  ]
  figure = figures.time_figure(run)
  if figure is not None:
    save_figure(figure, workdir / "figures" / "hours.png")
    lines += ["", "![Loss against simulated time](figures/hours.png)"]
  values = [
    {"step": e.step, "simulated_s": at_s, "outer_loss": e.outer_loss}
    for e, at_s in times
  ]
  write_json(workdir / "recorded.json", values)
  page = workdir / PAGE
  write_atomically(page, "\n".join(lines) + "\n")
  Console().print(*table, sep="\n")
  print(f"report: {page}")
