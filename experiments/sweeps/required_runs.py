"""Lists the runs that a convergence sweep needs, task by task.

Two tasks tune a method before its results are made. `tune_inner` tries the
inner learning rates of one grid, which all methods share. `tune_outer` then
tries the method's other settings at the best of these rates. The learning rate
schedule of every run ends at the last step of that run, even of a short one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dilocox_jax.config import RunConfig
from experiments.sweeps.run_spec import RequiredRun
from experiments.sweeps.simulated_time import PlannedTime, Times, rounds_from
from experiments.sweeps.sweep_spec import FACTORS, Sweep, SweepMethod

TASKS = ("tune_inner", "tune_outer", "results", "equal_time")
# Largest share of a run's steps that may be warm-up. With 50 steps of warm-up,
# a run of 2000 steps keeps all 50, and a run of 100 steps has 25.
_MOST_WARMUP = 0.25
# What reports show of a method that was not tuned.
_TUNED = ("inner.learning_rate", "outer.learning_rate", "outer.momentum")
_WARMUP, _WARM_START = "inner.warmup_steps", "sync.warm_start_steps"
# A run with fewer steps is not made: its loss would say nothing about a method,
# because most of its steps would have a very low learning rate.
LEAST_STEPS = 20

# Function that returns the final loss of a run (nats a token): None if the run
# has not ended, NaN if it diverged.
LossOf = Callable[[RequiredRun], float | None]


class NotTunedError(Exception):
  """Means that a method's tuning has not ended, or all its runs diverged."""


@dataclasses.dataclass(frozen=True)
class Tuned:
  """Holds the result of tuning a method.

  Attributes:
    changed: Values of the tuned config fields, by dotted name. The results run
      with them instead of the method's own values.
    edges: Settings whose best value is the lowest or the highest that was
      tried, in words. The outer step is rate / (1 - momentum).
  """

  changed: Mapping[str, Any]
  edges: tuple[str, ...] = ()


class RequiredRuns:
  """Lists the runs of a sweep.

  The runs of later tasks depend on the losses of tuning runs, so they can be
  listed only after the tuning runs have ended.

  Attributes:
    sweep: The sweep.
    loss_of: Function that returns the final loss of a run.
  """

  def __init__(self, sweep: Sweep, loss_of: LossOf = lambda run: None):
    """Lists no runs yet.

    Args:
      sweep: The sweep.
      loss_of: Function that returns the final loss of a run. By default no
        run has ended.
    """
    self.sweep, self.loss_of = sweep, loss_of
    # Tasks ask for the same runs many times, and checking a config is slow.
    self._runs: dict[tuple, RequiredRun] = {}

  def check(self) -> None:
    """Checks that the time of every method can be computed on every clock.

    Raises:
      ValueError: If a method does not fit a clock. The message is one line.
    """
    for method in self.sweep.methods:
      config = self.first_run(method).config
      for clock in self.sweep.clusters.values():
        PlannedTime(config, clock)

  @functools.cache  # noqa: B019 - it lives as long as the sweep.
  def fields(self, method: SweepMethod) -> dict[str, Any]:
    """Returns the config fields that a method changes, by dotted name.

    If the method takes tau and H from a clock (`tau_from`) or H from another
    method (`interval_of`), the fields contain the computed values.
    """
    fields = dict(method.changed)
    if method.tau_from:
      clock = self.sweep.clusters[method.tau_from]
      fields |= rounds_from(clock, self.sweep.config(fields))
    if method.interval_of:
      other = self.fields(self.sweep.method(method.interval_of))
      schedule = self.sweep.config(other).sync.named.schedule
      fields["sync.sync_interval"] = schedule.sync_interval
    return fields

  def run(
    self, task: str, method: SweepMethod, changed: Mapping[str, Any]
  ) -> RequiredRun:
    """Returns a run of a method.

    Args:
      task: Task of the run, one of `TASKS`.
      method: Method of the run.
      changed: Values of config fields by dotted name, `seed` included. They
        replace the method's own values.
    """
    fields = {**self.fields(method), **changed}
    key = (task, method.name, tuple(sorted(fields.items())))
    if key not in self._runs:
      values = {**self.sweep.base, **fields}
      max_warmup = int(_MOST_WARMUP * values["total_steps"])
      fields[_WARMUP] = min(values[_WARMUP], max_warmup)
      config = self.sweep.config(fields)
      self._runs[key] = RequiredRun(task, method.name, fields, config)
    return self._runs[key]

  def first_run(self, method: SweepMethod) -> RequiredRun:
    """Returns the first run of a method, whose config needs no other run."""
    tuning = self.tune_inner(method)
    return tuning[0] if tuning else self.results(method)[0]

  def tune_inner(self, method: SweepMethod) -> list[RequiredRun]:
    """Returns one tuning run of a method for each inner learning rate.

    The runs have the method's own settings and differ only in that rate. There
    are none if `tuning` has no rates: then no method is tuned.
    """
    return [
      self._tuning("tune_inner", method, {"inner.learning_rate": rate})
      for rate in self.sweep.tuning.inner_learning_rates
    ]

  def tune_outer(self, method: SweepMethod) -> list[RequiredRun]:
    """Returns one tuning run of a method for each setting in `method.refine`.

    The runs have the inner learning rate that was best in `tune_inner`, unless
    the setting changes it.

    Raises:
      NotTunedError: If a run of `tune_inner` has not ended, or all diverged.
    """
    tried = self.tune_inner(method)
    if not tried or method.given:
      return []
    inner = self._lowest(tried).config.inner
    runs = []
    for setting in method.refine:
      fields = {"inner.learning_rate": inner.learning_rate, **setting}
      for name in FACTORS.keys() & setting.keys():
        # "inner_factor": 1.3 is 1.3 times the best inner learning rate.
        path, factor = FACTORS[name], fields.pop(name)
        best = getattr(inner, path.removeprefix("inner."))
        fields[path] = type(best)(round(factor * best, 8))
      runs.append(self._tuning("tune_outer", method, fields))
    return runs

  def _tuning(
    self, task: str, method: SweepMethod, changed: Mapping[str, Any]
  ) -> RequiredRun:
    tuning = self.sweep.tuning
    fields = {
      **changed,
      "evaluation.interval_steps": 0,
      "seed": tuning.seed,
      "total_steps": tuning.total_steps,
    }
    if steps := self.fields(method).get(_WARM_START):
      # The warm start keeps its share of the run: if it takes 300 of 2000
      # steps, it takes 150 of the 1000 steps of a tuning run.
      share = tuning.total_steps / self.sweep.base["total_steps"]
      fields[_WARM_START] = round(share * steps)
    return self.run(task, method, fields)

  def _lowest(self, runs: Sequence[RequiredRun]) -> RequiredRun:
    """Returns the run with the lowest final loss.

    Raises:
      NotTunedError: If a run has not ended, or all runs diverged.
    """
    name = runs[0].name
    losses = [self.loss_of(run) for run in runs]
    if missing := losses.count(None):
      raise NotTunedError(
        f"{missing} of {len(runs)} tuning runs of {name!r} are missing: run"
        f" --task=tune_inner, then --task=tune_outer, and include {name!r} in"
        " --methods"
      )
    finite = [
      loss for loss in losses if loss is not None and math.isfinite(loss)
    ]
    if not finite:
      raise NotTunedError(
        f"every tuning run of {name!r} diverged: add lower rates to"
        " tuning.inner_learning_rates"
      )
    return runs[losses.index(min(finite))]

  def tuning_rounds(self, method: SweepMethod) -> int:
    """Returns how many whole rounds the first run of a method has."""
    config = self.first_run(method).config
    steps = config.total_steps - config.sync.warm_start_steps
    return steps // config.sync.named.schedule.sync_interval

  def tuned(self, method: SweepMethod) -> Tuned:
    """Returns the tuned values that the results of a method run with.

    Raises:
      NotTunedError: If a tuning run has not ended, or all runs diverged.
    """
    if method.given:
      return Tuned(method.given)
    inner = self.tune_inner(method)
    if not inner:
      own = self.fields(method)
      return Tuned({p: own[p] for p in _TUNED if p in own})
    runs = [*inner, *self.tune_outer(method)]
    best = self._lowest(runs)
    fields = self.fields(method)
    only_in_tuning = {"seed", "total_steps", "evaluation.interval_steps"}
    changed = {
      path: value
      for path, value in best.changed.items()
      if path not in {*only_in_tuning, _WARM_START}
      and fields.get(path) != value
    }
    if best.changed[_WARMUP] == inner[0].changed[_WARMUP]:
      # The warm-up was not tuned. It is shorter only because a tuning run is.
      changed.pop(_WARMUP, None)
    return Tuned(changed, self._edges(inner, runs[len(inner) :], best))

  def _edges(
    self,
    inner: Sequence[RequiredRun],
    outer: Sequence[RequiredRun],
    best: RequiredRun,
  ) -> tuple[str, ...]:
    """Names what is best at an end of what was tried.

    The factors on the best inner learning rate are a grid of their own.
    """
    best_inner = self._lowest(inner)
    every = [*inner, *outer]
    found = [
      _end("inner rate", _inner_rate, best_inner, inner),
      _end("finer inner rate", _inner_rate, best, [best_inner, *outer]),
      _end("warm-up", _warmup_steps, best, every),
      _end("outer step", _outer_step, best, every),
    ]
    return tuple(filter(None, found))

  def results(self, method: SweepMethod) -> list[RequiredRun]:
    """Returns one run of a method for each seed, with the tuned values."""
    return self._seeds("results", method, {})

  def _seeds(
    self, task: str, method: SweepMethod, length: Mapping[str, int]
  ) -> list[RequiredRun]:
    fields = {**self.tuned(method).changed, **length}
    return [
      self.run(task, method, {**fields, "seed": seed})
      for seed in self.sweep.seeds
    ]

  def times(self, run: RequiredRun, clock_name: str) -> Times:
    """Returns the simulated times of a run on a clock."""
    return self._planned(run.config, clock_name).times()

  @functools.cache  # noqa: B019 - as above.
  def _planned(self, config: RunConfig, clock_name: str) -> PlannedTime:
    return PlannedTime(config, self.sweep.clusters[clock_name])

  def budget_s(self, clock_name: str) -> float:
    """Returns the time budget of every method on a clock (seconds).

    The budget is the time that the clock's reference method takes for its run.
    """
    reference = self.sweep.method(self.sweep.equal_time[clock_name].reference)
    return self.times(self.results(reference)[0], clock_name).end_s

  def steps_at(self, method: SweepMethod, clock_name: str) -> int:
    """Returns how many inner steps a method takes in the budget of a clock."""
    config = self.results(method)[0].config
    planned = self._planned(config, clock_name)
    budget_s = self.budget_s(clock_name)
    return planned.affordable_steps(budget_s, config.total_steps)

  def equal_time(
    self, method: SweepMethod, clock_name: str
  ) -> list[RequiredRun]:
    """Returns one run for each seed, as long as the budget of a clock allows.

    Example: the reference method takes 100 s for its 2000 steps. A method that
    takes 200 s for 2000 steps gets about 1000 steps, and its learning rate
    schedule ends at step 1000. A method that takes 80 s gets no more than 2000
    steps, so its runs are those of the results. A method that cannot take
    `LEAST_STEPS` steps in 100 s has no run.
    """
    steps = self.steps_at(method, clock_name)
    results = self.results(method)
    if steps == results[0].config.total_steps:
      return [dataclasses.replace(run, task="equal_time") for run in results]
    if steps < LEAST_STEPS:
      return []
    return self._seeds("equal_time", method, {"total_steps": steps})

  def of_task(self, task: str, method: SweepMethod) -> list[RequiredRun]:
    """Returns a method's runs of a task.

    Raises:
      NotTunedError: If a run of an earlier task has not ended, or all its
        runs diverged.
    """
    if task == "tune_inner":
      return self.tune_inner(method)
    if task == "tune_outer":
      return self.tune_outer(method)
    if task == "results":
      return self.results(method)
    return [
      run
      for clock, contest in self.sweep.equal_time.items()
      if method.name in contest.methods
      for run in self.equal_time(method, clock)
    ]

  def tasks(
    self, names: Iterable[str], methods: Sequence[SweepMethod]
  ) -> Iterator[tuple[str, list[RequiredRun], list[str]]]:
    """Lists the runs of several tasks.

    A method whose tuning has not ended does not stop the other methods.

    Args:
      names: Names of tasks (`TASKS`), in order.
      methods: Methods of the sweep whose runs are listed.

    Yields:
      For each task its name, its runs, and the reasons why some methods have
      no runs yet.
    """
    for task in names:
      runs, reasons = [], []
      for method in methods:
        try:
          runs += self.of_task(task, method)
        except NotTunedError as error:
          reasons.append(str(error))
      # Several methods may wait for the same reference method and give the same
      # reason, so equal reasons are listed once.
      yield task, runs, list(dict.fromkeys(reasons))


def _end(
  name: str,
  value_of: Callable[[RequiredRun], float],
  best: RequiredRun,
  tried: Iterable[RequiredRun],
) -> str:
  """Names a value that is the lowest or highest of those tried, else ""."""
  value, values = value_of(best), [value_of(run) for run in tried]
  low, high = min(values), max(values)
  if low == high or value not in (low, high):
    return ""
  return f"{name} {value:g}, the {'lowest' if value == low else 'highest'}"


def _inner_rate(run: RequiredRun) -> float:
  return run.config.inner.learning_rate


def _warmup_steps(run: RequiredRun) -> float:
  return run.config.inner.warmup_steps


def _outer_step(run: RequiredRun) -> float:
  """Returns the effective size of an outer step, rate / (1 - momentum).

  With momentum 0.9, many equal updates add up to steps of 10 times the rate.
  """
  outer = run.config.outer
  return outer.learning_rate / (1 - outer.momentum)
