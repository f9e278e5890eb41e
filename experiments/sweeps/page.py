"""Joins the finished runs of a sweep with clocks, for the page of the sweep.

Losses come from the lines of the runs, times from the plan of each run. So a
page can be made on another machine, on other clocks, years later.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dilocox_jax.config import RunConfig
from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.report import units
from dilocox_jax.report.escape import code, markdown
from dilocox_jax.report.frame import Frame, Point, Setting, Trace
from dilocox_jax.simulate.cluster_file import load_cluster
from experiments.sweeps.clocks import SweepClock, Times
from experiments.sweeps.rows import Rows, RunRow
from experiments.sweeps.runs import SweepRun, changes


def frame(
  sweep: Mapping[str, Any],
  runs: Sequence[SweepRun],
  lines: Sequence[RunRow | None],
  rows: Rows,
  clocks: Mapping[str, SweepClock],
  times: Mapping[str, Mapping[str, Times]],
) -> Frame:
  """Returns the settings of a sweep with losses, curves and simulated times.

  Args:
    sweep: The sweep's config.
    runs: Its runs.
    lines: The line of each run; None for a run that has not ended.
    rows: The files of the lines, which have the curves too.
    clocks: Clocks by name.
    times: Times by setting and clock, as `times_of` returns them.
  """
  lines_by_name: dict[str, list[RunRow | None]] = {}
  for run, row in zip(runs, lines, strict=True):
    lines_by_name.setdefault(run.name, []).append(row)
  changed_by_name = changes(runs)
  configs = {run.name: run.config for run in reversed(runs)}
  baselines = sweep.get("baselines", {})
  uses_judge = bool(sweep.get("judged"))
  settings = []
  for name, setting_lines in lines_by_name.items():
    # A reader must know that an average of the parameters is evaluated.
    note = ""
    if configs[name].outer.average_power and "average" not in name:
      note = ", average"
    baseline = baselines.get(name, sweep.get("baseline", ""))
    settings.append(
      Setting(
        name=name,
        traces=[
          _trace(row, rows, times[name], uses_judge)
          for row in setting_lines
          if row
        ],
        baseline=baseline if baseline in lines_by_name else "",
        seconds={clock: time.end_s for clock, time in times[name].items()},
        utilization={
          clock: time.utilization for clock, time in times[name].items()
        },
        changed=changed_by_name[name],
        note=note,
      )
    )
  return Frame(
    settings=settings,
    num_seeds=max(len(each) for each in lines_by_name.values()),
    clocks={
      name: _words(runs[0].config, clock) for name, clock in clocks.items()
    },
    target=float(sweep.get("target_loss", 0.0)),
    front=tuple(sweep.get("front", ())),
  )


def times_of(
  runs: Sequence[SweepRun], clocks: Mapping[str, SweepClock]
) -> dict[str, dict[str, Times]]:
  """Returns the simulated times of each setting on each clock.

  Args:
    runs: Runs of a sweep.
    clocks: Clocks by name.

  Raises:
    ValueError: If a run does not fit a clock. The message is one line.
  """
  configs = {run.name: run.config for run in reversed(runs)}
  times: dict[str, dict[str, Times]] = {}
  for setting, config in configs.items():
    times[setting] = {
      name: clock.times(config) for name, clock in clocks.items()
    }
  return times


def _trace(
  row: RunRow, rows: Rows, times: Mapping[str, Times], uses_judge: bool
) -> Trace:
  """Returns a finished run with its curve.

  Args:
    row: The line of the run.
    rows: The files with the curves.
    times: Times of the run by clock.
    uses_judge: Whether its loss is the one on the text that judges.
  """
  points = []
  for evaluation in rows.curve(row):
    seconds = {}
    for clock, time in times.items():
      # The last evaluation is after the flush, at the step of the one before.
      seconds[clock] = time.after(evaluation.step)
      if evaluation.flushed:
        seconds[clock] = time.end_s
    points.append(
      Point(
        tokens=evaluation.tokens,
        sent_bytes=evaluation.sent_bytes,
        loss=evaluation.loss,
        seconds=seconds,
      )
    )
  return Trace(
    seed=row.seed,
    loss=row.judge_loss if uses_judge else row.loss,
    sent_bytes=row.sent_bytes,
    steps=row.total_steps,
    tokens=row.tokens,
    points=points,
    wall_s=row.wall_s,
  )


def intro(
  runs: Sequence[SweepRun], lines: Sequence[RunRow | None], rows: Rows
) -> str:
  """Returns a paragraph: what was trained, where, and on which text.

  Args:
    runs: The runs of the sweep.
    lines: The line of each run; None for a run that has not ended.
    rows: The files of the lines.
  """
  budget = _budget([run.config for run in runs])
  ended = [row for row in lines if row]
  if not ended:
    return f"{budget} No run has ended yet."
  platforms = {
    f"{row.platform}, Python {row.python}, JAX {row.jax}"
    for row in ended
    if row.platform
  }
  trained_on = markdown("; ".join(sorted(platforms)))
  digests = ", ".join(sorted({code(row.corpus) for row in ended}))
  times_s = [row.wall_s for row in ended if math.isfinite(row.wall_s)]
  hours = math.fsum(times_s) / 3600
  return (
    f"{budget} Trained on {trained_on}. {len(ended)} of"
    f" {len(runs)} runs have ended; they took {hours:.3g} hours. Corpus digest"
    f" {digests}.{_others(rows.num_others(runs, lines))}"
  )


def _budget(configs: Sequence[RunConfig]) -> str:
  """Returns a sentence with steps, replicas and sizes of the runs.

  The method and H are named if all runs have the same.
  """
  replicas = sorted({config.mesh.num_replicas for config in configs})
  sizes = sorted({parameter_count(config.model.shape) for config in configs})
  methods = {
    (config.sync.method, config.sync.named.schedule.sync_interval)
    for config in configs
  }
  rounds = ""
  if len(methods) == 1:
    ((method, interval),) = methods
    rounds = f" by {method}, H = {interval}"
  return (
    f"{configs[0].total_steps:,} inner steps{rounds}; replicas:"
    f" {' or '.join(str(count) for count in replicas)}; parameters:"
    f" {' or '.join(f'{size:,}' for size in sizes)}."
  )


def _others(count: int) -> str:
  """Returns a sentence on lines of other texts; "" if there are none."""
  if not count:
    return ""
  lines = "One line of these runs is" if count == 1 else f"{count} lines are"
  return f" {lines} on another text, whose losses do not compare: not shown."


def _words(config: RunConfig, clock: SweepClock) -> str:
  """Returns which model a clock times on which cluster, in words."""
  timed = clock.timed(config)
  step_s = clock.step_s_of(config)
  source = "from operations" if clock.step_s is None else "stated"
  text = (
    f"{timed.model.label} on {clock.cluster} (round trip"
    f" {_round_trips(clock)}), {units.human_time(step_s)} a step ({source})"
  )
  if timed.model.shape != config.model.shape:
    text += f", put on the losses of {config.model.label}"
  return f"{text}; codecs take no time"


def _round_trips(clock: SweepClock) -> str:
  """Returns the round trips of a cluster's sites: "40 ms", or a range."""
  times_s = {site.link.rtt_s for site in load_cluster(clock.cluster).sites}
  shortest = f"{1000 * min(times_s):g} ms"
  if len(times_s) == 1:
    return shortest
  return f"{shortest} to {1000 * max(times_s):g} ms"
