"""Simulated time of a planned run, and what follows from it.

The formulas of the simulator walk the very segments that the trainer does, so
a clock can be put on a run long after it, and on another model than the one
that was trained. How long a transfer takes also says how long a replica has
to go on without it, and time says how many steps a method gets.
"""

import bisect
import dataclasses
import math

from dilocox_jax.config import RunConfig
from dilocox_jax.simulate.analytic import AnalyticClock, run_time
from dilocox_jax.simulate.outcome import Outcome
from dilocox_jax.simulate.script import Launch, Wait
from experiments.simulation.setup import Options, Setup, set_up
from experiments.sweeps.sweep_spec import SweepClock

# Of a budget of time: a few messages more or less do not cost a method a step.
SLACK = 1e-3


@dataclasses.dataclass(frozen=True)
class Times:
  """A run on a clock.

  Attributes:
    at_s: Seconds after every segment, by inner step; before the flush.
    end_s: Seconds of all of it, flush included.
    utilisation: Share of them in which replicas took inner steps.
  """

  at_s: dict[int, float]
  end_s: float
  utilisation: float

  def after(self, step: int) -> float:
    """Seconds when the last segment up to a step had ended."""
    return max((s for at, s in self.at_s.items() if at <= step), default=0.0)


class PlannedTime:
  """One config on one clock."""

  def __init__(self, config: RunConfig, clock: SweepClock):
    """Joins the two.

    Args:
      config: The run that is trained.
      clock: Cluster, and what is timed in its place.

    Raises:
      ValueError: One line that says what does not fit.
    """
    timed = clock.timed(config)
    options = Options(step_s=clock.step_s)
    self._setup: Setup = set_up(timed, clock.cluster, options)

  @property
  def step_s(self) -> float:
    """Of the fastest replica."""
    return float(min(self._setup.work.step_s))

  def exchange_s(self) -> float:
    """One exchange of everything, from launch to arrival."""
    made = self._setup
    clock = AnalyticClock(made.link_costs, made.work)
    for index in range(made.plan.method.schedule.num_fragments):
      key = ("whole", index, 0)
      operations = tuple(made.script.traffic.exchange(index))
      clock.walk([Launch(key, operations), Wait(key)])
    return clock.walk([]).now_s

  def times(self) -> Times:
    """Seconds at every end of a segment."""
    made = self._setup
    clock = AnalyticClock(made.link_costs, made.work)
    at_s = {
      each.stop: clock.walk(made.script.segment(each)).now_s
      for each in made.plan.segments()
    }
    outcome = clock.walk(made.script.flush(made.plan))
    return Times(at_s, outcome.now_s, outcome.utilisation)

  def affordable_steps(self, budget_s: float, most: int) -> int:
    """Inner steps of the longest run that ends in time, flush included.

    Its last round is cut short where the time is up: whole rounds alone would
    take a quarter of its steps from a method whose rounds are long.

    Args:
      budget_s: Seconds; `SLACK` more are granted.
      most: Inner steps that are enough.

    Returns:
      Steps, at most `most`; 0 where not even one whole round fits.
    """
    allowed_s = budget_s * (1 + SLACK)
    interval = self._setup.plan.method.schedule.sync_interval
    start = self._setup.plan.warm_start_steps

    def cost_s(steps: int) -> float:
      return self._run(steps).now_s

    # A cut round pays for its exchange too, so steps are ordered by time only
    # within a round.
    whole = range(start + interval, most + 1, interval)
    count = bisect.bisect_right(whole, allowed_s, key=cost_s)
    if not count:
      return most if cost_s(most) <= allowed_s else 0
    last = whole[count - 1]
    within = range(last + 1, min(last + interval, most + 1))
    return last + bisect.bisect_right(within, allowed_s, key=cost_s)

  def _run(self, total_steps: int) -> Outcome:
    made = self._setup
    plan = dataclasses.replace(made.plan, total_steps=total_steps)
    return run_time(made.link_costs, made.work, made.script.ops(plan))


def overlap_steps(exchange_s: float, step_s: float) -> int:
  """tau: the fewest inner steps behind which an exchange hides, at least 1.

  Args:
    exchange_s: Seconds of an exchange.
    step_s: Seconds of an inner step.
  """
  # A hair less, lest rounding make a step of nothing.
  return max(1, math.ceil(exchange_s / step_s - 1e-9))


def sync_interval(tau: int, total_steps: int) -> int:
  """H: about twice tau, such that the run ends with a whole round.

  Args:
    tau: Of the exchange (inner steps).
    total_steps: Of the run.

  Returns:
    The least divisor of `total_steps` that is at least 2 tau; 2 tau itself
    where the next one is more than three times tau.
  """
  return _divisor(2 * tau, total_steps)


def whole_round(tau: int, total_steps: int) -> int:
  """H of a method that waits a whole round: the exchange just hides in it.

  Source: DiLoCoX, arXiv 2506.21263 (recalled), by whose rule H changes such
  that the transfer still just hides behind the local steps.

  Args:
    tau: Of the exchange (inner steps).
    total_steps: Of the run.

  Returns:
    The least divisor of `total_steps` that is at least tau; tau itself where
    the next one is more than half as long again.
  """
  return _divisor(tau, total_steps)


def rounds_from(clock: SweepClock, config: RunConfig) -> dict[str, int]:
  """Fields of a run that waits as long as an exchange takes, and no longer.

  Args:
    clock: The one that says how long that is.
    config: The run; where tau is H by the method's nature, only H is given.
  """
  timed = PlannedTime(config, clock)
  tau = overlap_steps(timed.exchange_s(), timed.step_s)
  schedule = config.sync.named.schedule
  if schedule.overlap_steps == schedule.sync_interval:
    return {"sync.sync_interval": whole_round(tau, config.total_steps)}
  interval = sync_interval(tau, config.total_steps)
  return {"sync.overlap_steps": tau, "sync.sync_interval": interval}


def _divisor(least: int, total_steps: int) -> int:
  """The next divisor, or `least` where that is more than half as much again."""
  near = range(least, least + least // 2 + 1)
  return next((h for h in near if total_steps % h == 0), least)
