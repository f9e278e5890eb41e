"""Joins the finished runs of a sweep with simulated times, for its report.

A *setting* is a name with its runs, one for each seed. The *line* of a finished
run is its line of runs.csv, with the losses. A *clock* is a simulated cluster.
Simulated times are computed from configs, so an old sweep can get new clocks.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dilocox_jax.config import RunConfig
from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.report import units
from dilocox_jax.report.escape import code, markdown
from dilocox_jax.report.frame import Frame, Point, SeedRun, Setting
from dilocox_jax.simulate.cluster_file import load_cluster
from experiments.sweeps.clocks import SweepClock, Times
from experiments.sweeps.finished import Rows
from experiments.sweeps.rows import RunRow
from experiments.sweeps.runs import SweepRun, baseline_of, changes


def frame(
  sweep: Mapping[str, Any],
  runs: Sequence[SweepRun],
  lines: Sequence[RunRow | None],
  rows: Rows,
  clocks: Mapping[str, SweepClock],
  times: Mapping[str, Mapping[str, Times]],
) -> Frame:
  """Returns the settings of a sweep with losses, curves and simulated times.

  A setting is a name with its runs, one for each seed. A setting without
  finished runs has times, but no losses.

  Args:
    sweep: The sweep's config.
    runs: The runs of the sweep, at least one.
    lines: Line of each run in runs.csv; None for a run that has not ended.
    rows: Content of runs.csv and evaluations.csv.
    clocks: Simulated clusters by name.
    times: Result of `times_of`.
  """
  lines_by_name: dict[str, list[RunRow | None]] = {}
  for run, line in zip(runs, lines, strict=True):
    lines_by_name.setdefault(run.name, []).append(line)
  changed_by_name = changes(runs)
  configs = _configs_by_name(runs)
  uses_judge = bool(sweep.get("judged"))
  settings = []
  for name, setting_lines in lines_by_name.items():
    setting_times = times[name]
    # A reader must know if an average of the parameters is evaluated.
    note = ""
    if configs[name].outer.average_power and "average" not in name:
      note = ", average"
    baseline = baseline_of(sweep, name)
    if baseline not in lines_by_name:
      baseline = ""
    seed_runs = [
      _seed_run(line, rows, setting_times, uses_judge)
      for line in setting_lines
      if line
    ]
    settings.append(
      Setting(
        name=name,
        seed_runs=seed_runs,
        baseline=baseline,
        seconds={clock: time.end_s for clock, time in setting_times.items()},
        utilization={
          clock: time.utilization for clock, time in setting_times.items()
        },
        changed=changed_by_name[name],
        note=note,
      )
    )
  return Frame(
    settings=settings,
    num_seeds=max(map(len, lines_by_name.values())),
    clocks={
      name: _words(runs[0].config, clock) for name, clock in clocks.items()
    },
    target=float(sweep.get("target_loss", 0.0)),
    front=tuple(sweep.get("front", ())),
  )


def _configs_by_name(runs: Sequence[SweepRun]) -> dict[str, RunConfig]:
  """Returns the config of the first run of each name, by name."""
  configs: dict[str, RunConfig] = {}
  for run in runs:
    configs.setdefault(run.name, run.config)
  return configs


def times_of(
  runs: Sequence[SweepRun], clocks: Mapping[str, SweepClock]
) -> dict[str, dict[str, Times]]:
  """Simulates the first run of each name on each clock (a simulated cluster).

  Returns the times by name of the run, and then by name of the clock. Raises
  ValueError, with one line, if a run does not fit the cluster of a clock.
  """
  times: dict[str, dict[str, Times]] = {}
  for setting, config in _configs_by_name(runs).items():
    times[setting] = {
      name: clock.times(config) for name, clock in clocks.items()
    }
  return times


def _seed_run(
  row: RunRow, rows: Rows, times: Mapping[str, Times], uses_judge: bool
) -> SeedRun:
  """Returns a finished run with its curve of validation losses.

  If `uses_judge`, the final loss is that on the judge text (held-out files by
  which nothing is chosen), and else that on the validation text.
  """
  points = []
  for evaluation in rows.evaluations(row):
    seconds = {}
    for clock, time in times.items():
      # The last inner step may have two evaluations, before and after the
      # flush (the exchanges that are still due).
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
  return SeedRun(
    seed=row.seed,
    loss=row.judge_loss if uses_judge else row.loss,
    sent_bytes=row.sent_bytes,
    steps=row.steps,
    tokens=row.tokens,
    points=points,
    wall_s=row.seconds,
  )


def intro(
  runs: Sequence[SweepRun], lines: Sequence[RunRow | None], rows: Rows
) -> str:
  """Returns a paragraph: what was trained, where, and on which text."""
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
  times_s = [row.seconds for row in ended if math.isfinite(row.seconds)]
  hours = math.fsum(times_s) / 3600
  return (
    f"{budget} Trained on {trained_on}. {len(ended)} of"
    f" {len(runs)} runs have ended; they took {hours:.3g} hours. Corpus digest"
    f" {digests}.{_others(rows.num_others(runs, lines))}"
  )


def _budget(configs: Sequence[RunConfig]) -> str:
  """Returns a sentence with inner steps, numbers of replicas and model sizes.

  Example: "2,000 inner steps by diloco, H = 20; replicas: 2 or 4; parameters:
  857,088." The method and H are left out if the runs differ in them. The inner
  steps are those of the first run.
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
  """Returns a sentence about `count` runs on other texts; "" for 0 runs."""
  if not count:
    return ""
  lines = "One line of these runs is" if count == 1 else f"{count} lines are"
  return f" {lines} on another text, whose losses do not compare: not shown."


def _words(config: RunConfig, clock: SweepClock) -> str:
  """Describes a simulated cluster: which model it times, and how.

  Example: "opt_1_3b on 1gbit (round trip 40 ms), 2.1 s a step (from
  operations), with the losses of tiny, which was trained; codecs take no time".

  `config` is the config of a trained run.
  """
  timed = clock.timed(config)
  step_s = clock.step_s_of(config)
  source = "from operations" if clock.step_s is None else "stated"
  text = (
    f"{timed.model.label} on {clock.cluster} (round trip"
    f" {_round_trips(clock)}), {units.human_time(step_s)} a step ({source})"
  )
  if timed.model.shape != config.model.shape:
    text += f", with the losses of {config.model.label}, which was trained"
  return f"{text}; codecs take no time"


def _round_trips(clock: SweepClock) -> str:
  """Returns the round trips of the sites of a clock's cluster, as text.

  Examples: "40 ms", or "10 ms to 40 ms" if the sites differ.
  """
  times_s = {site.link.rtt_s for site in load_cluster(clock.cluster).sites}
  shortest = f"{1000 * min(times_s):g} ms"
  if len(times_s) == 1:
    return shortest
  return f"{shortest} to {1000 * max(times_s):g} ms"
