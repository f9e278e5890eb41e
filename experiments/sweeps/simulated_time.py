"""Simulated time of a run that is described by its config, and what follows.

The simulator's formulas go through the segments that the trainer runs, so a
clock can be put on a run long after it was made, and on another model than the
one that was trained. The time of a transfer also says how many inner steps a
replica should take without waiting (tau), and time says how many steps a
method gets.
"""

import bisect
import dataclasses
import math

from dilocox_jax.config import RunConfig
from dilocox_jax.simulate.analytic import AnalyticClock, run_time
from dilocox_jax.simulate.script import Launch, Wait
from experiments.simulation.setup import Options, Setup, set_up
from experiments.sweeps.sweep_spec import SweepClock

# Share of a budget of time that is granted on top, so that a few messages more
# or less do not cost a method a step.
SLACK = 1e-3


@dataclasses.dataclass(frozen=True)
class Times:
  """Simulated times of a run on a clock.

  Attributes:
    at_s: Seconds at the end of every segment, before the flush, by inner step.
    end_s: Seconds of the whole run, flush included.
    utilisation: Share of `end_s` in which replicas took inner steps.
  """

  at_s: dict[int, float]
  end_s: float
  utilisation: float

  def after(self, step: int) -> float:
    """Returns the seconds at the end of the last segment up to a step."""
    return max((s for at, s in self.at_s.items() if at <= step), default=0.0)


class PlannedTime:
  """One config on one clock."""

  def __init__(self, config: RunConfig, clock: SweepClock):
    """Sets the run up on the clock's cluster.

    Args:
      config: Config of the run that is trained.
      clock: The cluster, and which run is timed in place of the trained one.

    Raises:
      ValueError: One line that says what does not fit.
    """
    options = Options(step_s=clock.step_s)
    self._setup: Setup = set_up(clock.timed(config), clock.cluster, options)

  @property
  def step_s(self) -> float:
    """Seconds of an inner step of the fastest replica."""
    return float(min(self._setup.work.step_s))

  def exchange_s(self) -> float:
    """Returns the seconds from the launch of an exchange of all fragments.

    They are sent one after the other, each when the one before has arrived.
    """
    setup = self._setup
    clock = AnalyticClock(setup.link_costs, setup.work)
    for index in range(setup.plan.method.schedule.num_fragments):
      key = ("whole", index, 0)
      operations = tuple(setup.script.traffic.exchange(index))
      clock.walk([Launch(key, operations), Wait(key)])
    return clock.walk([]).now_s

  def times(self) -> Times:
    """Returns the seconds at the end of every segment."""
    setup = self._setup
    clock = AnalyticClock(setup.link_costs, setup.work)
    at_s = {
      segment.stop: clock.walk(setup.script.segment(segment)).now_s
      for segment in setup.plan.segments()
    }
    outcome = clock.walk(setup.script.flush(setup.plan))
    return Times(at_s, outcome.now_s, outcome.utilisation)

  def affordable_steps(self, budget_s: float, most: int) -> int:
    """Returns the inner steps of the longest run that ends in time.

    The last round is cut short where the time is up: whole rounds alone would
    take a quarter of its steps from a method whose rounds are long.

    Example: rounds of H = 25 steps of 1 s, each followed by an exchange of
    10 s that is waited for, and a budget of 100 s. Two rounds take 70 s, three
    105 s, so 50 steps are affordable for sure. A third round that is cut after
    n steps takes 70 + n + 10 s: n = 20 fit, which makes 70 steps.

    Args:
      budget_s: Seconds of the run, flush included. A run may take `SLACK`
        (share) more.
      most: Inner steps that are enough.

    Returns:
      Steps, at most `most`; 0 where not even one whole round fits.
    """
    setup = self._setup
    allowed_s = budget_s * (1 + SLACK)
    interval = setup.plan.method.schedule.sync_interval
    start = setup.plan.warm_start_steps

    def cost_s(steps: int) -> float:
      plan = dataclasses.replace(setup.plan, total_steps=steps)
      return run_time(
        setup.link_costs, setup.work, setup.script.ops(plan)
      ).now_s

    # A cut round pays for its exchange and its flush too, so it is sure that
    # more steps take longer only among whole rounds, and within one round.
    # Each of the two is searched by halves.
    whole = range(start + interval, most + 1, interval)
    count = bisect.bisect_right(whole, allowed_s, key=cost_s)
    if not count:
      return most if cost_s(most) <= allowed_s else 0
    last = whole[count - 1]
    within = range(last + 1, min(last + interval, most + 1))
    return last + bisect.bisect_right(within, allowed_s, key=cost_s)


def rounds_from(clock: SweepClock, config: RunConfig) -> dict[str, int]:
  """Returns tau and H of a run that waits as long as an exchange takes.

  Source: DiLoCoX, arXiv 2506.21263 (recalled), by whose rule H changes such
  that the transfer still just hides behind the local steps.

  Example: an exchange takes 0.5 s and an inner step 0.03 s, so tau = 17 steps
  hide it (0.51 s). In a run of 2000 steps a method with a tau of its own gets
  tau = 17 and H = 40, the next divisor of 2000 from 2 tau = 34 on. A method
  that always waits a whole round (tau = H) gets H = 20.

  Args:
    clock: The clock that says how long an exchange takes.
    config: Config of the run.

  Returns:
    Fields of the config; H alone where the method has tau = H.
  """
  timed = PlannedTime(config, clock)
  tau = overlap_steps(timed.exchange_s(), timed.step_s)
  schedule = config.sync.named.schedule
  if schedule.overlap_steps == schedule.sync_interval:
    return {"sync.sync_interval": fitting_interval(tau, config.total_steps)}
  interval = fitting_interval(2 * tau, config.total_steps)
  return {"sync.overlap_steps": tau, "sync.sync_interval": interval}


def overlap_steps(exchange_s: float, step_s: float) -> int:
  """Returns tau: the fewest inner steps (at least 1) that hide an exchange.

  Args:
    exchange_s: Seconds of an exchange.
    step_s: Seconds of an inner step.
  """
  # Rounding must not add a step: 0.3 / 0.1 is a hair more than 3.
  return max(1, math.ceil(exchange_s / step_s - 1e-9))


def fitting_interval(least: int, total_steps: int) -> int:
  """Returns an H such that the run ends with a whole round, if one is near.

  Args:
    least: Fewest inner steps of a round.
    total_steps: Inner steps of the run.

  Returns:
    The smallest divisor of `total_steps` from `least` to 1.5 `least`; `least`
    itself if there is none. For 2000 steps, 34 becomes 40; for 1999, a prime
    number, it stays 34.
  """
  near = range(least, least + least // 2 + 1)
  return next((h for h in near if total_steps % h == 0), least)
