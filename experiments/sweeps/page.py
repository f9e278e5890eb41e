"""From finished runs to the frame of a report, joined with clocks.

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
  found: Sequence[RunRow | None],
  rows: Rows,
  clocks: Mapping[str, SweepClock],
  times: Mapping[str, Mapping[str, Times]],
) -> Frame:
  """Returns the settings of a sweep with what is known of their runs.

  Args:
    sweep: The sweep's config.
    runs: Its runs.
    found: Their lines; None for those that have not ended.
    rows: Where the lines are from, which has the curves too.
    clocks: Clocks by name.
    times: As of `times_of`.
  """
  by_name: dict[str, list[RunRow | None]] = {}
  for run, row in zip(runs, found, strict=True):
    by_name.setdefault(run.name, []).append(row)
  changed = changes(runs)
  configs = {run.name: run.config for run in reversed(runs)}
  others, judged = sweep.get("baselines", {}), bool(sweep.get("judged"))
  settings = []
  for name, lines in by_name.items():
    own = times[name]
    # That an average of the parameters is evaluated.
    is_said = "average" in name or not configs[name].outer.average_power
    baseline = others.get(name, sweep.get("baseline", ""))
    settings.append(
      Setting(
        name,
        [_trace(row, rows, own, judged) for row in lines if row],
        baseline if baseline in by_name else "",
        {clock: time.end_s for clock, time in own.items()},
        {clock: time.utilisation for clock, time in own.items()},
        changed=changed[name],
        note="" if is_said else ", average",
      )
    )
  return Frame(
    settings,
    max(map(len, by_name.values())),
    {k: _words(runs[0].config, clock) for k, clock in clocks.items()},
    float(sweep.get("target_loss", 0.0)),
    tuple(sweep.get("front", ())),
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
  return {
    name: {k: each.times(config) for k, each in clocks.items()}
    for name, config in configs.items()
  }


def _trace(
  row: RunRow, rows: Rows, times: Mapping[str, Times], judged: bool
) -> Trace:
  points = []
  for each in rows.curve(row):
    seconds = {
      # The last point is after the flush, at the step of the one before.
      name: time.end_s if each.flushed else time.after(each.step)
      for name, time in times.items()
    }
    points.append(Point(each.tokens, each.sent_bytes, each.loss, seconds))
  return Trace(
    row.seed,
    row.judge_loss if judged else row.loss,
    row.sent_bytes,
    row.total_steps,
    row.tokens,
    points,
    row.wall_s,
  )


def intro(
  runs: Sequence[SweepRun], lines: Sequence[RunRow | None], rows: Rows
) -> str:
  """Says what was trained, where, and on which text.

  Args:
    runs: The runs of the sweep.
    lines: Their lines; None for those that have not ended.
    rows: Where the lines are from.
  """
  found = [row for row in lines if row]
  configs = [run.config for run in runs]
  replicas = sorted({config.mesh.num_replicas for config in configs})
  sizes = sorted({parameter_count(config.model.shape) for config in configs})
  (method, interval), *others = {
    (c.sync.method, c.sync.named.schedule.sync_interval) for c in configs
  }
  rounds = "" if others else f" by {method}, H = {interval}"
  budget = (
    f"{configs[0].total_steps:,} inner steps{rounds}; replicas:"
    f" {' or '.join(map(str, replicas))}; parameters:"
    f" {' or '.join(f'{size:,}' for size in sizes)}."
  )
  if not found:
    return f"{budget} No run has ended yet."
  places = {
    f"{r.platform}, Python {r.python}, JAX {r.jax}" for r in found if r.platform
  }
  trained_on = markdown("; ".join(sorted(places)))
  texts = ", ".join(sorted({code(r.corpus) for r in found}))
  hours = math.fsum(r.wall_s for r in found if math.isfinite(r.wall_s)) / 3600
  return (
    f"{budget} Trained on {trained_on}. {len(found)} of"
    f" {len(runs)} runs have ended; they took {hours:.3g} hours. Corpus digest"
    f" {texts}.{_others(rows.num_others(runs, lines))}"
  )


def _others(count: int) -> str:
  """Says how many lines are on other texts; nothing if there are none."""
  if not count:
    return ""
  lines = "One line of these runs is" if count == 1 else f"{count} lines are"
  return f" {lines} on another text, whose losses do not compare: not shown."


def _words(config: RunConfig, clock: SweepClock) -> str:
  """Says which model a clock times on which cluster."""
  timed = clock.timed(config)
  step_s = clock.own_step_s(config)
  how = "from operations" if clock.step_s is None else "stated"
  text = (
    f"{timed.model.label} on {clock.cluster} (round trip"
    f" {_round_trips(clock)}), {units.human_time(step_s)} a step ({how})"
  )
  if timed.model.shape != config.model.shape:
    text += f", put on the losses of {config.model.label}"
  return f"{text}; codecs take no time"


def _round_trips(clock: SweepClock) -> str:
  """The round trips of a cluster's sites: "40 ms", or the ends of a range."""
  times_s = {site.link.rtt_s for site in load_cluster(clock.cluster).sites}
  ends = dict.fromkeys((min(times_s), max(times_s)))
  return " to ".join(f"{1000 * each:g} ms" for each in ends)
