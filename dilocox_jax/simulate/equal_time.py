"""Finds schedules with which a run takes no longer than a given time.

On a slow link, a step costs more time in short rounds than in long rounds. So a
run that begins with short rounds, or with data-parallel steps, and ends with
long rounds can take as long as a run whose rounds all have one length. Which of
these schedules trains best is not simulated.
"""

import dataclasses
from collections.abc import Callable, Iterator

from dilocox_jax.checks import require
from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.simulate.analytic import Outcome, Work
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.long_runs import simulate_run
from dilocox_jax.simulate.script import Script

# Function (H, first interval, steps per doubling) -> method. The last two are
# None for rounds of H steps.
MethodOf = Callable[[int, int | None, int | None], Method]

# The last rounds may have H, 2 H or 4 H steps.
_FACTORS = (1, 2, 4)


@dataclasses.dataclass(frozen=True)
class TimedSchedule:
  """Lengths of a run's rounds, and the simulated costs of the run.

  Attributes:
    warm_start_steps: Number of data-parallel steps at the beginning.
    first_interval: Number of inner steps of the first rounds, if rounds grow;
      None: all rounds have `sync_interval` steps.
    steps_per_doubling: Inner steps after which the length of a round doubles,
      if rounds grow; None: they do not grow.
    sync_interval: Number of inner steps of the last rounds.
    outcome: Times and bytes of the whole run, with the exchanges that are still
      due after the last inner step.
  """

  warm_start_steps: int
  first_interval: int | None
  steps_per_doubling: int | None
  sync_interval: int
  outcome: Outcome


def constant_rounds(
  link_costs: LinkCosts, work: Work, script: Script, plan: RunPlan
) -> TimedSchedule:
  """Returns the simulated costs of a run whose rounds have one length.

  Args:
    link_costs: Cluster and transport.
    work: Durations of the replicas' work without the network (seconds).
    script: Turns the plan into inner steps, exchanges and waits.
    plan: Plan of the run.

  Raises:
    ValueError: In one of these cases; the message is one line:

      - The method averages gradients.
      - The rounds of its schedule do not all have one length.
      - The plan begins with data-parallel steps.
      - The plan has a membership: replicas may be away or slow.
  """
  schedule = plan.method.schedule
  require(
    plan.method.exchanged != "gradient",
    "a method that averages gradients has no rounds that could grow: take "
    "diloco",
  )
  require(
    schedule.is_regular and not plan.warm_start_steps,
    "growing rounds are compared with rounds of one length: leave out "
    "sync.first_interval, sync.steps_per_doubling and sync.warm_start_steps",
  )
  require(
    plan.membership is None,
    "rounds cannot grow where replicas are away or slow: leave out membership",
  )
  outcome = simulate_run(link_costs, work, script, plan)
  return TimedSchedule(0, None, None, schedule.sync_interval, outcome)


def schedules_within(
  most_s: float,
  link_costs: LinkCosts,
  work: Work,
  script: Script,
  plan: RunPlan,
  method_of: MethodOf,
) -> Iterator[TimedSchedule]:
  """Yields schedules with which a run takes at most a given time.

  The last rounds have H, 2 H or 4 H steps. There are two kinds of schedules:

  - The first rounds have 1, 2, 4, ... steps, fewer than H. The rounds grow
    about as slowly as the time allows.
  - All rounds are equally long. They follow a data-parallel start, which is
    about as long as the time allows.

  Lengths of rounds with which every schedule takes too long are left out.

  Args:
    most_s: Longest time of the whole run (seconds).
    link_costs: Cluster and transport.
    work: Durations of the replicas' work without the network (seconds).
    script: Turns the plan into inner steps, exchanges and waits.
    plan: Plan of the run with rounds of H steps (`constant_rounds`).
    method_of: Function (H, first interval, steps per doubling) -> method. It
      raises ValueError if the method does not allow such rounds. Rounds that
      grow are then left out.

  Raises:
    ValueError: If `method_of` raises it for rounds of one length.
  """
  interval = plan.method.schedule.sync_interval

  def timed(
    last: int, first: int | None, per_doubling: int | None, start_steps: int
  ) -> TimedSchedule | None:
    """Returns a schedule with its costs; None if it takes too long."""
    method = method_of(last, first, per_doubling)
    traffic = dataclasses.replace(script.traffic, method=method)
    outcome = simulate_run(
      link_costs,
      work,
      dataclasses.replace(script, traffic=traffic),
      dataclasses.replace(plan, method=method, warm_start_steps=start_steps),
    )
    # Rounding errors must not exclude a run that takes exactly as long.
    if outcome.total_s > most_s * (1 + 1e-9):
      return None
    return TimedSchedule(start_steps, first, per_doubling, last, outcome)

  for factor in _FACTORS:
    last = factor * interval
    first = 1
    while first < interval:
      found = _longest_growth(timed, last, first, plan.total_steps)
      if found is not None:
        yield found
      first *= 2
    found = _largest(
      lambda steps, last=last: timed(last, None, None, steps),
      plan.total_steps - 1,
    )
    if found is not None:
      yield found


def _longest_growth(
  timed: Callable[..., TimedSchedule | None],
  last: int,
  first: int,
  total_steps: int,
) -> TimedSchedule | None:
  """Returns a schedule whose rounds grow about as slowly as the time allows.

  None if the time or the method does not allow first rounds of `first` steps.
  """
  try:
    return _largest(lambda steps: timed(last, first, steps, 0), total_steps)
  except ValueError:  # For example fewer steps than fragments.
    return None


def _largest(
  timed: Callable[[int], TimedSchedule | None], most: int
) -> TimedSchedule | None:
  """Bisects for the largest number for which `timed` returns a schedule.

  The result is the schedule of the number that is found; None if `timed(1)` is
  None, or if `most` is 0.

  Args:
    timed: Function (number) -> schedule, or None if the number is too large.
    most: Largest number to try.
  """
  # The last round of a run may be shorter than the others. So the time does not
  # grow evenly with the number, and bisection may miss the largest number.
  best = timed(1) if most else None
  if best is None:
    return None
  low = 1
  high = most + 1
  while high - low > 1:
    middle = (low + high) // 2
    found = timed(middle)
    if found is None:
      high = middle
    else:
      low = middle
      best = found
  return best
