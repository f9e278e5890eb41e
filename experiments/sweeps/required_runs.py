"""Which runs a convergence sweep needs, task by task.

Tuning comes first and decides what the results run with: the inner learning
rate from one grid for all methods, then each method's own settings at the best
rate. The learning-rate schedule of a run always ends at the last step of that
run, also where the run is short.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dilocox_jax.config import RunConfig
from experiments.sweeps.run_spec import RequiredRun
from experiments.sweeps.simulated_time import PlannedTime, Times, rounds_from
from experiments.sweeps.sweep_spec import FACTORS, Sweep, SweepMethod

TASKS = ("tune_inner", "tune_outer", "results", "equal_time")
# A shorter run warms up for as many steps, but for no more than this share.
_MOST_WARMUP = 0.25
_WARMUP, _WARM_START = "inner.warmup_steps", "sync.warm_start_steps"
# Shorter runs say nothing: the learning rate hardly leaves the ground.
LEAST_STEPS = 20

# The final loss of a run that has been made; None: not yet; NaN: diverged.
LossOf = Callable[[RequiredRun], float | None]


class NotTunedError(Exception):
  """Tuning of a method is not over, or no setting works."""


@dataclasses.dataclass(frozen=True)
class Tuned:
  """What tuning has found for a method.

  Attributes:
    changed: Fields that the method runs with, over its own.
    at_edge: Whether the best inner learning rate, warm-up or outer step
      (rate over one less momentum) is an end of what was tried.
  """

  changed: Mapping[str, Any]
  at_edge: bool


class RequiredRuns:
  """The runs of a sweep, as far as what they depend on is known.

  Attributes:
    sweep: The sweep.
    loss_of: Gives the final loss of a run. Results depend on losses of tuning.
  """

  def __init__(self, sweep: Sweep, loss_of: LossOf = lambda run: None):
    """Lists no runs yet.

    Args:
      sweep: The sweep.
      loss_of: Gives the final loss of a run; by default no run has ended.
    """
    self.sweep, self.loss_of = sweep, loss_of
    self._fields: dict[str, dict[str, Any]] = {}
    # Tasks ask for the same runs many times, and checking a config is slow.
    self._runs: dict[tuple, RequiredRun] = {}
    self._times: dict[tuple[RunConfig, str], Times] = {}
    self._steps: dict[tuple[RunConfig, str, float], int] = {}

  def check(self) -> None:
    """Puts every method on every clock.

    Raises:
      ValueError: One line that says what does not fit.
    """
    for method in self.sweep.methods:
      config = self.tune_inner(method)[0].config
      for clock in self.sweep.clocks.values():
        PlannedTime(config, clock)

  def fields(self, method: SweepMethod) -> dict[str, Any]:
    """Returns a method's fields; tau and H from a clock if it asks for that."""
    if method.name not in self._fields:
      fields = dict(method.changed)
      if method.tau_from:
        clock = self.sweep.clocks[method.tau_from]
        fields |= rounds_from(clock, self.sweep.config(fields))
      if method.interval_of:
        other = self.fields(self.sweep.method(method.interval_of))
        schedule = self.sweep.config(other).sync.named.schedule
        fields["sync.sync_interval"] = schedule.sync_interval
      self._fields[method.name] = fields
    return self._fields[method.name]

  def run(
    self, task: str, method: SweepMethod, changed: Mapping[str, Any]
  ) -> RequiredRun:
    """Returns a run of a method.

    Args:
      task: One of `TASKS`.
      method: The method.
      changed: Fields over the method's own, `seed` among them.
    """
    fields = {**self.fields(method), **changed}
    asked = (task, method.name, tuple(sorted(fields.items())))
    if asked not in self._runs:
      given = {**self.sweep.base, **fields}
      most = int(_MOST_WARMUP * given["total_steps"])
      fields[_WARMUP] = min(given[_WARMUP], most)
      config = self.sweep.config(fields)
      self._runs[asked] = RequiredRun(task, method.name, fields, config)
    return self._runs[asked]

  def tune_inner(self, method: SweepMethod) -> list[RequiredRun]:
    """Returns the method as it is, with every inner learning rate."""
    return [
      self._tuning("tune_inner", method, {"inner.learning_rate": rate})
      for rate in self.sweep.tuning.inner_learning_rates
    ]

  def tune_outer(self, method: SweepMethod) -> list[RequiredRun]:
    """Returns the method's own settings at its best inner learning rate.

    Raises:
      NotTunedError: That rate is not known yet, or none works.
    """
    inner = self._lowest(self.tune_inner(method)).config.inner
    runs = []
    for setting in method.refine:
      fields = {"inner.learning_rate": inner.learning_rate, **setting}
      for name in FACTORS.keys() & setting.keys():
        # "inner_factor": 1.3 is 1.3 times the best inner learning rate.
        path, factor = FACTORS[name], fields.pop(name)
        before = getattr(inner, path.removeprefix("inner."))
        fields[path] = type(before)(round(factor * before, 8))
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
      # A warm start of 300 of 2000 steps has 150 of the 1000 of a tuning run.
      share = tuning.total_steps / self.sweep.base["total_steps"]
      fields[_WARM_START] = round(share * steps)
    return self.run(task, method, fields)

  def _lowest(self, runs: Sequence[RequiredRun]) -> RequiredRun:
    """The run that ended lowest; raises NotTunedError if there is none."""
    name = runs[0].name
    if missing := sum(self.loss_of(run) is None for run in runs):
      raise NotTunedError(
        f"{missing} of {len(runs)} tuning runs of {name!r} are missing: run"
        " --task=tune_inner, then --task=tune_outer, with it among --methods"
      )
    best = min(runs, key=self._comparable_loss)
    if math.isinf(self._comparable_loss(best)):
      raise NotTunedError(
        f"every tuning run of {name!r} diverged: add lower rates to"
        " tuning.inner_learning_rates"
      )
    return best

  def _comparable_loss(self, run: RequiredRun) -> float:
    """A run that diverged has an infinite loss, so that it never wins."""
    loss = self.loss_of(run)
    return loss if loss is not None and math.isfinite(loss) else math.inf

  def tuning_rounds(self, method: SweepMethod) -> int:
    """Returns how many whole rounds a tuning run of a method has."""
    config = self.tune_inner(method)[0].config
    steps = config.total_steps - config.sync.warm_start_steps
    return steps // config.sync.named.schedule.sync_interval

  def tuned(self, method: SweepMethod) -> Tuned:
    """Returns what the results run with.

    Raises:
      NotTunedError: Tuning is not over, or no setting works.
    """
    inner = self.tune_inner(method)
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
      changed.pop(_WARMUP, None)  # It was not tuned, only cut to the length.
    rates = self.sweep.tuning.inner_learning_rates
    rate = self._lowest(inner).config.inner.learning_rate
    at_edge = _is_end(rate, rates) or any(
      _is_end(value_of(best), [value_of(run) for run in runs])
      for value_of in (_outer_step, _warmup_steps)
    )
    return Tuned(changed, at_edge)

  def results(self, method: SweepMethod) -> list[RequiredRun]:
    """Returns a run for every seed, with what was tuned."""
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
    config = run.config
    if (config, clock_name) not in self._times:
      timed = PlannedTime(config, self.sweep.clocks[clock_name])
      self._times[config, clock_name] = timed.times()
    return self._times[config, clock_name]

  def budget_s(self, clock_name: str) -> float:
    """Returns the seconds of every method on a clock: the reference's own."""
    reference = self.sweep.method(self.sweep.contests[clock_name].reference)
    return self.times(self.results(reference)[0], clock_name).end_s

  def steps_at(self, method: SweepMethod, clock_name: str) -> int:
    """Returns how many inner steps a method takes in the reference's time."""
    config = self.results(method)[0].config
    asked = (config, clock_name, self.budget_s(clock_name))
    if asked not in self._steps:
      timed = PlannedTime(config, self.sweep.clocks[clock_name])
      self._steps[asked] = timed.affordable_steps(asked[2], config.total_steps)
    return self._steps[asked]

  def equal_time(
    self, method: SweepMethod, clock_name: str
  ) -> list[RequiredRun]:
    """Returns a run for every seed, as long as the budget of a clock allows.

    Example: the reference takes 100 s for its 2000 steps. A method that takes
    200 s for 2000 gets about 1000 steps, with a schedule that ends there. One
    that takes 80 s gets no more than 2000: it runs as it does in the results.
    One for which 100 s are fewer than `LEAST_STEPS` steps has no run.
    """
    steps = self.steps_at(method, clock_name)
    whole = self.results(method)
    if steps == whole[0].config.total_steps:
      return [dataclasses.replace(run, task="equal_time") for run in whole]
    if steps < LEAST_STEPS:
      return []
    return self._seeds("equal_time", method, {"total_steps": steps})

  def of_task(self, task: str, method: SweepMethod) -> list[RequiredRun]:
    """Returns a method's runs of a task.

    Raises:
      NotTunedError: An earlier task is not over.
    """
    if task == "tune_inner":
      return self.tune_inner(method)
    if task == "tune_outer":
      return self.tune_outer(method)
    if task == "results":
      return self.results(method)
    return [
      run
      for clock, contest in self.sweep.contests.items()
      if method.name in contest.methods
      for run in self.equal_time(method, clock)
    ]

  def tasks(
    self, names: Iterable[str], methods: Sequence[SweepMethod]
  ) -> Iterator[tuple[str, list[RequiredRun], list[str]]]:
    """Yields tasks with their runs, and why methods have none.

    A method whose tuning is not over stops no other method.

    Args:
      names: Some of `TASKS`, in order.
      methods: Some of the sweep's methods.
    """
    for task in names:
      runs, reasons = [], []
      for method in methods:
        try:
          runs += self.of_task(task, method)
        except NotTunedError as error:
          reasons.append(str(error))
      # Many methods may wait for one reference: its reason is said once.
      yield task, runs, list(dict.fromkeys(reasons))


def _is_end(value: float, tried: Sequence[float]) -> bool:
  """Whether a value is the smallest or largest of several."""
  return min(tried) < max(tried) and value in (min(tried), max(tried))


def _warmup_steps(run: RequiredRun) -> float:
  return run.config.inner.warmup_steps


def _outer_step(run: RequiredRun) -> float:
  """How far many equal outer steps go: momentum 0.9 adds up to ten times."""
  outer = run.config.outer
  return outer.learning_rate / (1 - outer.momentum)
