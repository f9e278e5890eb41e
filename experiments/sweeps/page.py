"""From the lines of a sweep to its report: curves joined with clocks.

Losses come from the lines, times from the plan of each run, so the report can
be made on another machine, on other clocks, years later.
"""

import math
import pathlib
from collections.abc import Sequence

from rich.console import Console

from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.report import units
from dilocox_jax.report.convergence import comparison as report
from dilocox_jax.report.convergence import page
from experiments.sweeps import grid
from experiments.sweeps.required_run import NotTunedError, RequiredRun
from experiments.sweeps.required_runs import RequiredRuns
from experiments.sweeps.results import ResultRow, Results
from experiments.sweeps.runs import RunMaker
from experiments.sweeps.simulated_time import PlannedTime, Times
from experiments.sweeps.sweep_spec import Sweep, SweepClock, SweepMethod


class Gathered:
  """What a sweep has found so far."""

  def __init__(self, plan: RequiredRuns, runs: RunMaker, results: Results):
    """Takes the plan and what has been made of it.

    Args:
      plan: Which runs there should be.
      runs: Which there are.
      results: Their curves.
    """
    self._plan, self._runs, self._results = plan, runs, results
    self._baselines = baselines(plan.sweep)

  def comparison(self, name: str, command: str) -> report.Comparison:
    """Everything that the report says.

    Args:
      name: Of the sweep.
      command: The command line.
    """
    sweep = self._plan.sweep
    ready = [m for m in sweep.methods if self._is_tuned(m)]
    entries = [self._entry(method) for method in ready]
    rows = [
      row
      for method in ready
      for each in self._plan.results(method, self._runs.loss)
      if (row := self._runs.row(each))
    ]
    corpora = sorted({row.corpus for row in rows})
    return report.Comparison(
      name=name,
      corpus=", ".join(corpora) or "none yet",
      budget=f"{_budget(sweep)} {_machines(rows)} {self._effort()}".strip(),
      seeds=len(sweep.seeds),
      clocks={k: _clock_text(sweep, spec) for k, spec in sweep.clocks.items()},
      target_loss=sweep.target_loss,
      entries=entries,
      equal_time=self._equal_time(ready),
      claims=sweep.claims,
      gaps=sweep.gaps,
      tuning=_tuning_text(sweep),
      command=command,
      notes=sweep.notes,
      untuned=[m.name for m in sweep.methods if m not in ready],
    )

  def _effort(self) -> str:
    rows = self._results.rows.values()
    hours = sum(row.wall_s for row in rows) / 3600
    return f"All {len(rows)} runs on file took {hours:.3g} hours, added up."

  def _is_tuned(self, method: SweepMethod) -> bool:
    try:
      self._plan.tuned(method, self._runs.loss)
    except NotTunedError:
      return False
    return True

  def _entry(self, method: SweepMethod) -> report.MethodResult:
    planned = self._plan.results(method, self._runs.loss)
    tuned = self._plan.tuned(method, self._runs.loss)
    config = planned[0].config
    times = {
      name: self._plan.times(method, name, self._runs.loss)
      for name in self._plan.sweep.clocks
    }
    schedule = config.sync.named.schedule
    found = [(each, self._runs.row(each)) for each in planned]
    return report.MethodResult(
      name=method.name,
      traces=[self._trace(p, row, times) for p, row in found if row],
      utilisation={k: each.utilisation for k, each in times.items()},
      seconds={k: each.end_s for k, each in times.items()},
      interval=schedule.sync_interval,
      overlap_steps=schedule.overlap_steps,
      warm_start_steps=config.sync.warm_start_steps,
      ends_round=planned[0].ends_round,
      tuned={grid.short(k): v for k, v in tuned.changed.items()},
      tuning_runs=tuned.num_runs,
      tuning_rounds=self._plan.tuning_rounds(method),
      at_edge=tuned.at_edge,
      baseline=self._baselines[method.name],
      clock=self._clock_of(method),
    )

  def _clock_of(self, method: SweepMethod) -> str:
    """The clock from which its H follows; empty if from none."""
    if method.interval_of:
      method = self._plan.sweep.method(method.interval_of)
    return method.tau_from

  def _trace(
    self, planned: RequiredRun, row: ResultRow, times: dict[str, Times]
  ) -> report.Trace:
    points = [
      report.Point(
        each.step,
        each.tokens,
        each.sent_bytes,
        each.loss,
        {
          k: t.end_s if each.flushed else t.after(each.step)
          for k, t in times.items()
        },
      )
      for each in self._results.curve((row.digest, row.corpus))
    ]
    return report.Trace(
      planned.seed, row.final_loss, row.total_sent_bytes, points
    )

  def _equal_time(self, ready: list[SweepMethod]) -> list[report.EqualTime]:
    sweep, loss_of = self._plan.sweep, self._runs.loss
    made = []
    for clock, contest in sweep.contests.items():
      if all(method.name != contest.reference for method in ready):
        continue
      entered = [m for m in ready if m.name in contest.methods]
      methods = [self._timed(method, clock) for method in entered]
      budget_s = self._plan.budget_s(clock, loss_of)
      made.append(report.EqualTime(clock, budget_s, methods))
    return made

  def _timed(self, method: SweepMethod, clock: str) -> report.Timed:
    loss_of = self._runs.loss
    planned = self._plan.equal_time(method, clock, loss_of)
    steps = self._plan.steps_at(method, clock, loss_of)
    losses = [loss_of(each) for each in planned]
    ended = tuple(loss for loss in losses if loss is not None)
    used_s = math.nan
    if planned:
      timed = PlannedTime(planned[0].config, self._plan.sweep.clocks[clock])
      used_s = timed.times().end_s
    return report.Timed(method.name, steps, used_s, not planned, ended)


def write(
  plan: RequiredRuns,
  runs: RunMaker,
  results: Results,
  workdir: pathlib.Path,
  name: str,
  command: str,
) -> None:
  """Writes and prints what there is.

  Args:
    plan: Which runs there should be.
    runs: Which there are.
    results: Their curves.
    workdir: Where the report goes.
    name: Of the sweep.
    command: The command line.
  """
  found = Gathered(plan, runs, results).comparison(name, command)
  path = page.write(found, workdir)
  page.show(found, Console())
  print(f"results: {results.path}")
  print(f"report: {path}")


def baselines(sweep: Sweep) -> dict[str, str]:
  """By method, AllReduce with its inner optimizer, or else the first one.

  What an optimizer gains must not pass for what an exchange loses. AllReduce
  itself is held against the first one.

  Args:
    sweep: All methods.
  """
  configs = {each.name: sweep.config(each.changed) for each in sweep.methods}
  synchronous = [
    name for name, each in configs.items() if each.sync.method == "allreduce"
  ]
  first = next(iter(synchronous), "allreduce")
  of_optimizer: dict[str, str] = {}
  for name in synchronous:
    of_optimizer.setdefault(configs[name].inner.optimizer, name)
  return {
    name: first
    if name in synchronous
    else of_optimizer.get(config.inner.optimizer, first)
    for name, config in configs.items()
  }


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
  found = {f"{r.platform}, Python {r.python}, JAX {r.jax}" for r in rows}
  return f"Trained on {'; '.join(sorted(found))}." if found else ""


def _clock_text(sweep: Sweep, spec: SweepClock) -> str:
  config = sweep.config({})
  timed = spec.timed(config)
  step_s = PlannedTime(config, spec).step_s
  how = "from operations" if spec.step_s is None else "stated"
  text = (
    f"{timed.model.preset} on {spec.cluster}, {step_s:.3g} s a step ({how})"
  )
  if timed.model.shape != config.model.shape:
    text += f", put on the losses of {config.model.preset}"
  if rank := spec.changed.get("codec.rank"):
    text += f", low rank at {rank} there"
  return f"{text}; codecs take no time"


def _tuning_text(sweep: Sweep) -> list[str]:
  tuning = sweep.tuning
  rates = ", ".join(f"{rate:g}" for rate in tuning.inner_learning_rates)
  return [
    f"{sweep.tuning_runs} tuning runs a method, each of"
    f" {tuning.total_steps:,} steps on seed {tuning.seed}, which is none of the"
    f" results': inner learning rates {rates}, then"
    f" {len(sweep.methods[0].refine)} settings of the method at the best of"
    " them (outer learning rate and momentum; a finer inner rate and the"
    " warm-up where there is no outer optimizer). The lowest loss of all wins.",
    "Ranks and H do not adapt here, so that a run's plan, and with it its time,"
    " is known from its config.",
  ]
