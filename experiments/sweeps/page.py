"""From the lines of a sweep to its report: curves joined with clocks.

Losses come from the lines, times from the plan of each run. So the report can
be made on another machine, on other clocks, years later.
"""

import math
import pathlib
from collections.abc import Sequence

from rich.console import Console

from dilocox_jax.config import RunConfig
from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.report import units
from dilocox_jax.report.convergence import comparison as report
from dilocox_jax.report.convergence import page
from dilocox_jax.simulate.presets import load_cluster
from experiments.sweeps.method_list import FRONT
from experiments.sweeps.required_runs import NotTunedError, RequiredRuns
from experiments.sweeps.results import ResultRow
from experiments.sweeps.run_maker import KeptRuns
from experiments.sweeps.run_spec import RequiredRun, short_name
from experiments.sweeps.simulated_time import PlannedTime, Times
from experiments.sweeps.sweep_spec import Sweep, SweepClock, SweepMethod


class Gathered:
  """What a sweep has found so far."""

  def __init__(self, required: RequiredRuns, runs: KeptRuns):
    """Joins the parts of a sweep.

    Args:
      required: Which runs there should be.
      runs: Which runs there are.
    """
    self._required, self._runs = required, runs
    self._sweep = required.sweep
    self._baselines = baselines(required.sweep)

  def comparison(self, name: str, command: str) -> report.Comparison:
    """Returns everything that the report says.

    Args:
      name: Name of the sweep.
      command: The command line.
    """
    sweep = self._sweep
    ready = [method for method in sweep.methods if self._is_tuned(method)]
    rows = [
      row
      for method in ready
      for run in self._required.results(method)
      if (row := self._runs.row(run))
    ]
    corpora = sorted({row.corpus for row in rows})
    on_file = self._runs.results.rows.values()
    effort = _effort(list(on_file))
    return report.Comparison(
      name=name,
      corpus=", ".join(corpora) or "none yet",
      budget=f"{_budget(sweep)} {_machines(rows)} {effort}".strip(),
      seeds=len(sweep.seeds),
      clocks={
        k: _clock_text(sweep, spec) for k, spec in sweep.clusters.items()
      },
      target_loss=sweep.target_loss,
      entries=[self._entry(method) for method in ready],
      equal_time=self._equal_time(ready),
      claims=sweep.claims,
      gaps=sweep.gaps,
      tuning=_tuning_text(sweep),
      command=command,
      notes=sweep.notes,
      untuned=[m.name for m in sweep.methods if m not in ready],
      front=FRONT,
    )

  def _is_tuned(self, method: SweepMethod) -> bool:
    try:
      self._required.tuned(method)
    except NotTunedError:
      return False
    return True

  def _entry(self, method: SweepMethod) -> report.MethodResult:
    runs, tuned = self._required.results(method), self._required.tuned(method)
    sync = runs[0].config.sync
    times = {
      name: self._required.times(runs[0], name) for name in self._sweep.clusters
    }
    rows = [(run, self._runs.row(run)) for run in runs]
    return report.MethodResult(
      name=method.name,
      traces=[self._trace(run, row, times) for run, row in rows if row],
      utilisation={k: time.utilisation for k, time in times.items()},
      seconds={k: time.end_s for k, time in times.items()},
      interval=sync.named.schedule.sync_interval,
      overlap_steps=sync.named.schedule.overlap_steps,
      warm_start_steps=sync.warm_start_steps,
      ends_round=runs[0].ends_round,
      tuned={short_name(path): v for path, v in tuned.changed.items()},
      tuning_runs=self._tuning_runs(method),
      tuning_rounds=self._required.tuning_rounds(method),
      edges=tuned.edges,
      keeps_average=_keeps_average(runs[0].config),
      baseline=self._baselines[method.name],
      clock=self._clock_of(method),
    )

  def _tuning_runs(self, method: SweepMethod) -> int:
    required = self._required
    return len(required.tune_inner(method)) + len(required.tune_outer(method))

  def _clock_of(self, method: SweepMethod) -> str:
    """The clock from which the method's H follows; empty if from none."""
    if method.interval_of:
      method = self._sweep.method(method.interval_of)
    return method.tau_from

  def _trace(
    self, run: RequiredRun, row: ResultRow, times: dict[str, Times]
  ) -> report.Trace:
    points = []
    for point in self._runs.results.curve((row.digest, row.corpus)):
      seconds = {
        # The last point is after the flush, at the step of the one before.
        name: time.end_s if point.flushed else time.after(point.step)
        for name, time in times.items()
      }
      points.append(
        report.Point(point.tokens, point.sent_bytes, point.loss, seconds)
      )
    return report.Trace(run.seed, row.final_loss, row.total_sent_bytes, points)

  def _equal_time(self, ready: list[SweepMethod]) -> list[report.EqualTime]:
    contests = []
    for clock, contest in self._sweep.equal_time.items():
      if all(method.name != contest.reference for method in ready):
        continue  # Without its reference nobody knows the time.
      entered = [m for m in ready if m.name in contest.methods]
      methods = [self._timed(method, clock) for method in entered]
      budget_s = self._required.budget_s(clock)
      contests.append(report.EqualTime(clock, budget_s, methods))
    return contests

  def _timed(self, method: SweepMethod, clock: str) -> report.TimedResult:
    runs = self._required.equal_time(method, clock)
    steps = self._required.steps_at(method, clock)
    losses = [self._runs.loss(run) for run in runs]
    ended = tuple(loss for loss in losses if loss is not None)
    used_s = self._required.times(runs[0], clock).end_s if runs else math.nan
    return report.TimedResult(method.name, steps, used_s, not runs, ended)


def write_page(
  required: RequiredRuns,
  runs: KeptRuns,
  workdir: pathlib.Path,
  name: str,
  command: str,
) -> None:
  """Writes and prints the report on what there is.

  Args:
    required: Which runs there should be.
    runs: Which runs there are.
    workdir: Directory of the report.
    name: Name of the sweep.
    command: The command line.
  """
  comparison = Gathered(required, runs).comparison(name, command)
  path = page.write_convergence(comparison, workdir)
  page.print_convergence(comparison, Console())
  print(f"results: {runs.results.source}")
  print(f"report: {path}")


def baselines(sweep: Sweep) -> dict[str, str]:
  """Returns, by method, the AllReduce with which its loss is compared.

  That is AllReduce with the same inner optimizer where there is one, or else
  the first AllReduce: what an optimizer gains must not pass for what an
  exchange loses. Nor must what an average gains: a method that keeps one is
  compared with an AllReduce that keeps one too, where there is one. AllReduce
  itself is compared with the first one.

  Args:
    sweep: The sweep, with all methods.
  """
  configs = {m.name: sweep.config(m.changed) for m in sweep.methods}
  alike: dict[tuple[str, bool], str] = {}
  for name, config in configs.items():
    if config.sync.method == "allreduce":
      key = (config.inner.optimizer, _keeps_average(config))
      alike.setdefault(key, name)
  first = next(iter(alike.values()), "allreduce")

  def baseline(config: RunConfig) -> str:
    if config.sync.method == "allreduce":
      return first
    plain = alike.get((config.inner.optimizer, False), first)
    return alike.get((config.inner.optimizer, _keeps_average(config)), plain)

  return {name: baseline(config) for name, config in configs.items()}


def _keeps_average(config: RunConfig) -> bool:
  return bool(config.outer.average_power)


def _effort(rows: Sequence[ResultRow]) -> str:
  """Says how long the runs took of which that is known."""
  times_s = [row.wall_s for row in rows if math.isfinite(row.wall_s)]
  unknown = len(rows) - len(times_s)
  some = f" ({unknown} more are without a time)" if unknown else ""
  hours = sum(times_s) / 3600
  return (
    f"All {len(times_s)} runs on file took {hours:.3g} hours{some}, added up."
  )


def _budget(sweep: Sweep) -> str:
  config = sweep.config({})
  replicas = config.mesh.num_replicas
  tokens = config.total_steps * config.tokens_per_replica_step * replicas
  return (
    f"{config.total_steps:,} inner steps of {replicas} replicas,"
    f" {units.human_tokens(tokens)}, {parameter_count(config.model.shape):,}"
    f" parameters, {len(sweep.seeds)} seeds."
  )


def _machines(rows: Sequence[ResultRow]) -> str:
  """Where the results were made, as bits depend on it."""
  places = {
    f"{r.platform}, Python {r.python}, JAX {r.jax}" for r in rows if r.platform
  }
  return f"Trained on {'; '.join(sorted(places))}." if places else ""


def _clock_text(sweep: Sweep, spec: SweepClock) -> str:
  config = sweep.config({})
  timed = spec.timed(config)
  step_s = PlannedTime(config, spec).step_s
  how = "from operations" if spec.step_s is None else "stated"
  text = (
    f"{timed.model.preset} on {spec.cluster} (round trip {_round_trips(spec)}),"
    f" {step_s:.3g} s a step ({how})"
  )
  if timed.model.shape != config.model.shape:
    text += f", put on the losses of {config.model.preset}"
  if rank := spec.changed.get("codec.rank"):
    text += f", low rank at {rank} there"
  return f"{text}; codecs take no time"


def _round_trips(spec: SweepClock) -> str:
  """The round trips of a cluster's sites: "40 ms", or the ends of a range."""
  times_s = {site.link.rtt_s for site in load_cluster(spec.cluster).sites}
  ends = dict.fromkeys((min(times_s), max(times_s)))
  return " to ".join(f"{1000 * each:g} ms" for each in ends)


def _judge(sweep: Sweep) -> str:
  count = sweep.base["evaluation.num_sequences"]
  return (
    f"One validation text ({count} sequences) chose settings and judges results"
    " alike: there is no test text."
  )


def _last_rates(sweep: Sweep) -> str:
  """The shares of the highest rate at which schedules end, commonest first."""
  path = "inner.final_fraction"
  names: dict[float, list[str]] = {sweep.base[path]: []}
  for method in sweep.methods:
    share = method.changed.get(path, sweep.base[path])
    names.setdefault(share, []).append(method.name)
  usual, *others = names.items()
  text = "".join(f", and {k:g} for {', '.join(v)}" for k, v in others)
  return f"As a share of the highest it is {usual[0]:g}{text}."


def _tuning_text(sweep: Sweep) -> list[str]:
  tuning = sweep.tuning
  if not sweep.tuning_runs:
    return [
      "Nothing was tuned in this sweep: the config has the settings of every"
      " method, and says where they come from.",
      _judge(sweep),
    ]
  rates = ", ".join(f"{rate:g}" for rate in tuning.inner_learning_rates)
  return [
    f"{sweep.tuning_runs} tuning runs a method, each of"
    f" {tuning.total_steps:,} steps on seed {tuning.seed}, which is none of the"
    f" results': inner learning rates {rates}, then"
    f" {len(sweep.methods[0].refine)} settings of the method at the best of"
    " them (outer learning rate and momentum; a finer inner rate and the"
    " warm-up where there is no outer optimizer). The lowest loss of all wins.",
    f"The last learning rate was tuned for no method. {_last_rates(sweep)}",
    _judge(sweep),
    "Ranks and H do not adapt here, so that a run's plan, and with it its time,"
    " is known from its config.",
  ]
