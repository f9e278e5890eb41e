"""Which runs a sweep needs, task by task.

Tuning comes first and decides what the results run with: the inner learning
rate from one grid for all, then the method's own settings at the best of it.
A run's schedule always ends at its own last step, also where it is shorter.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dilocox_jax.config import RunConfig
from experiments.sweeps.required_run import (
  LossOf,
  RequiredRun,
  Tuned,
  lowest,
  value,
)
from experiments.sweeps.simulated_time import PlannedTime, Times, rounds_from
from experiments.sweeps.sweep_spec import FACTORS, Sweep, SweepMethod

TASKS = ("tune_inner", "tune_outer", "results", "equal_time")
# A shorter run warms up for as long, but not for more than this share of it.
_MOST_WARMUP = 0.25
# As much shorter in a tuning run as that is.
_WARM_START = "sync.warm_start_steps"
# Shorter ones say nothing: the learning rate hardly leaves the ground.
LEAST_STEPS = 20


class RequiredRuns:
  """The runs of a sweep, as far as what they depend on is known."""

  def __init__(self, sweep: Sweep):
    """Plans nothing yet.

    Args:
      sweep: What is asked for.
    """
    self.sweep = sweep
    self._own: dict[str, dict[str, Any]] = {}
    # Stages ask again and again, and checking a config takes a while.
    self._planned: dict[tuple, RequiredRun] = {}
    self._times: dict[tuple[RunConfig, str], Times] = {}
    self._steps: dict[tuple[RunConfig, str, float], int] = {}

  def own(self, method: SweepMethod) -> dict[str, Any]:
    """A method's fields, tau and H from elsewhere if it asks."""
    if method.name not in self._own:
      self._own[method.name] = self._with_interval(method)
    return self._own[method.name]

  def check(self) -> None:
    """Puts every method on every clock.

    Raises:
      ValueError: One line that says what does not fit.
    """
    for method in self.sweep.methods:
      config = self.tune_inner(method)[0].config
      for clock in self.sweep.clocks.values():
        PlannedTime(config, clock)

  def _with_interval(self, method: SweepMethod) -> dict[str, Any]:
    fields = dict(method.changed)
    if method.tau_from:
      clock = self.sweep.clocks[method.tau_from]
      fields |= rounds_from(clock, self.sweep.config(fields))
    if method.interval_of:
      other = self.sweep.config(self.own(self.sweep.method(method.interval_of)))
      schedule = other.sync.named.schedule
      fields["sync.sync_interval"] = schedule.sync_interval
    return fields

  def planned(
    self,
    task: str,
    method: SweepMethod,
    changed: Mapping[str, Any],
    **free: Any,
  ) -> RequiredRun:
    """A run of a method.

    Args:
      task: One of `TASKS`.
      method: The method.
      changed: Fields over its own.
      **free: `seed` and `total_steps`.
    """
    fields = {**self.own(method), **changed, **free}
    asked = (task, method.name, tuple(sorted(fields.items())))
    if asked not in self._planned:
      self._planned[asked] = self._checked(task, method, fields)
    return self._planned[asked]

  def _checked(
    self, task: str, method: SweepMethod, fields: dict[str, Any]
  ) -> RequiredRun:
    warmup = fields.get(
      "inner.warmup_steps", self.sweep.base["inner.warmup_steps"]
    )
    total_steps = fields.get("total_steps", self.sweep.base["total_steps"])
    fields["inner.warmup_steps"] = min(warmup, int(_MOST_WARMUP * total_steps))
    return RequiredRun(task, method.name, fields, self.sweep.config(fields))

  def tune_inner(self, method: SweepMethod) -> list[RequiredRun]:
    """The method as it is, with every inner learning rate."""
    return [
      self._tuning("tune_inner", method, {"inner.learning_rate": rate})
      for rate in self.sweep.tuning.inner_learning_rates
    ]

  def tune_outer(
    self, method: SweepMethod, loss_of: LossOf
  ) -> list[RequiredRun]:
    """The method's own settings at its best inner learning rate.

    Raises:
      NotTunedError: That is not known yet, or none works.
    """
    best = lowest(self.tune_inner(method), loss_of)
    found = []
    for setting in method.refine:
      fields = {"inner.learning_rate": best.config.inner.learning_rate}
      fields |= {k: v for k, v in setting.items() if k not in FACTORS}
      for name in FACTORS.keys() & setting.keys():
        fields[FACTORS[name]] = self._scaled(best, FACTORS[name], setting[name])
      found.append(self._tuning("tune_outer", method, fields))
    return found

  def _scaled(self, best: RequiredRun, path: str, factor: float) -> float | int:
    section, _, name = path.partition(".")
    value = getattr(getattr(best.config, section), name)
    return type(value)(round(factor * value, 8))

  def _tuning(
    self, task: str, method: SweepMethod, changed: Mapping[str, Any]
  ) -> RequiredRun:
    tuning = self.sweep.tuning
    fields = {**changed, "evaluation.interval_steps": 0}
    if steps := self.own(method).get(_WARM_START):
      share = tuning.total_steps / self.sweep.base["total_steps"]
      fields[_WARM_START] = round(share * steps)
    free = {"seed": tuning.seed, "total_steps": tuning.total_steps}
    return self.planned(task, method, fields, **free)

  def tuning_rounds(self, method: SweepMethod) -> int:
    """Whole rounds that a tuning run has to show what it is worth."""
    config = self.tune_inner(method)[0].config
    steps = config.total_steps - config.sync.warm_start_steps
    return steps // config.sync.named.schedule.sync_interval

  def tuned(self, method: SweepMethod, loss_of: LossOf) -> Tuned:
    """What the results run with.

    Raises:
      NotTunedError: Tuning is not over, or no setting works.
    """
    inner = self.tune_inner(method)
    runs = [*inner, *self.tune_outer(method, loss_of)]
    best = lowest(runs, loss_of)
    own = self.own(method)
    apart = {"seed", "total_steps", "evaluation.interval_steps", _WARM_START}
    warmup = "inner.warmup_steps"
    fields = {
      path: value
      for path, value in best.changed.items()
      if path not in apart and own.get(path) != value
    }
    if best.changed[warmup] == inner[0].changed[warmup]:
      fields.pop(warmup, None)  # Not tuned, only cut to the run's length.
    rates = self.sweep.tuning.inner_learning_rates
    rate = lowest(inner, loss_of).config.inner.learning_rate
    at_edge = _is_end(rate, rates) or any(
      _is_end(of(best), [of(run) for run in runs])
      for of in (_outer_step, _warmup_steps)
    )
    return Tuned(fields, value(loss_of(best)), len(runs), at_edge)

  def results(self, method: SweepMethod, loss_of: LossOf) -> list[RequiredRun]:
    """A run a seed with what was tuned."""
    changed = self.tuned(method, loss_of).changed
    return [
      self.planned("results", method, changed, seed=seed)
      for seed in self.sweep.seeds
    ]

  def times(
    self, method: SweepMethod, clock_name: str, loss_of: LossOf
  ) -> Times:
    """A method's results on a clock."""
    config = self.results(method, loss_of)[0].config
    if (config, clock_name) not in self._times:
      timed = PlannedTime(config, self.sweep.clocks[clock_name])
      self._times[config, clock_name] = timed.times()
    return self._times[config, clock_name]

  def budget_s(self, clock_name: str, loss_of: LossOf) -> float:
    """Seconds that every method gets on a clock: the reference's own."""
    reference = self.sweep.method(self.sweep.contests[clock_name].reference)
    return self.times(reference, clock_name, loss_of).end_s

  def steps_at(
    self, method: SweepMethod, clock_name: str, loss_of: LossOf
  ) -> int:
    """Inner steps of a method in the reference's time."""
    config = self.results(method, loss_of)[0].config
    budget_s = self.budget_s(clock_name, loss_of)
    asked = (config, clock_name, budget_s)
    if asked not in self._steps:
      timed = PlannedTime(config, self.sweep.clocks[clock_name])
      most = config.total_steps
      self._steps[asked] = timed.affordable_steps(budget_s, most)
    return self._steps[asked]

  def equal_time(
    self, method: SweepMethod, clock_name: str, loss_of: LossOf
  ) -> list[RequiredRun]:
    """A run a seed, as long as fits; none where that is hardly any."""
    steps = self.steps_at(method, clock_name, loss_of)
    whole = self.results(method, loss_of)
    if steps == whole[0].config.total_steps:
      return [dataclasses.replace(each, task="equal_time") for each in whole]
    if steps < LEAST_STEPS:
      return []
    changed = self.tuned(method, loss_of).changed
    return [
      self.planned("equal_time", method, changed, seed=seed, total_steps=steps)
      for seed in self.sweep.seeds
    ]

  def of_task(
    self, task: str, methods: Sequence[SweepMethod], loss_of: LossOf
  ) -> list[RequiredRun]:
    """All runs of a task, seeds of a method beside each other.

    Raises:
      NotTunedError: An earlier task is not over.
    """
    if task == "tune_inner":
      return [run for each in methods for run in self.tune_inner(each)]
    if task == "tune_outer":
      return [run for each in methods for run in self.tune_outer(each, loss_of)]
    if task == "results":
      return [run for each in methods for run in self.results(each, loss_of)]
    return [
      run
      for clock, contest in self.sweep.contests.items()
      for each in methods
      if each.name in contest.methods
      for run in self.equal_time(each, clock, loss_of)
    ]


def _is_end(value: float, tried: Sequence[float]) -> bool:
  """Whether a value is the smallest or largest of several."""
  return min(tried) < max(tried) and value in (min(tried), max(tried))


def _warmup_steps(planned: RequiredRun) -> float:
  return planned.config.inner.warmup_steps


def _outer_step(planned: RequiredRun) -> float:
  """What an outer step comes to after many alike."""
  outer = planned.config.outer
  return outer.learning_rate / (1 - outer.momentum)
