"""Computes the times of a long run without going through each of its rounds.

To add the times of all inner steps, exchanges and waits of a round takes 0.2 ms
or more, which is minutes for a million rounds. So the clock of this file walks
through some of the rounds that repeat, and computes the other rounds from them.

Example: replica A takes 10 s for the inner steps of a round, and replica B
takes 11 s. The exchange of a round starts when both have started the round. It
takes 2 s, and both wait for it at the end of the round:

    A's next time = max(A's time + 10, max(A's time, B's time) + 2)
    B's next time = max(B's time + 11, max(A's time, B's time) + 2)

    start of round     0    1    2  ...   8    9   10   11
    A's time           0   10   20  ...  80   90  101  112
    B's time           0   11   22  ...  88   99  110  121

In rounds 0 to 8 A gets ahead of B by 1 s a round. From round 9 on A waits for
the exchange, and both take 11 s a round. So this run has two *stretches*. In a
stretch every round takes as long as the round before, for each replica by
itself.

Where does a stretch end? The clock only adds durations to times, and takes the
later one of two times. So if each replica took equally long in each of n
rounds, every time within the next round is a maximum of straight lines in n,
which is convex. A convex function that lies on a straight line in three places
lies on this line everywhere between the outer two. The clock looks at the first
two rounds of the stretch, which define a line for each time within a round, and
at a later round to which it jumps. If all times of the later round lie on their
lines, then no round in between is different. Otherwise bisection finds the last
round whose times lie on the lines.

In the example a jump from round 0 to round 1000 finds A at 10,000 s and B at
11,000 s. There A waits for the exchange, which A does not do in rounds 0 and 1.
Bisection finds that round 8 is the last round that is like rounds 0 and 1.

Sums follow from the first round and the last one. For example, the exchanges of
A take 2, 3, 4, ... 10 s in rounds 0 to 8, because A waits longer and longer for
the messages of B. The sum is nine times the mean of 2 s and 10 s.

Durations may also repeat only every few rounds. For example, on a ring of three
replicas a delay may move on to the next replica in every round, so that each
round is like the third round before it. Then the *period* is 3 rounds, and the
clock compares and skips whole periods.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.simulate.analytic import (
  LAST_SENT,
  POINTS_IN_TIME,
  SUMS,
  AnalyticClock,
  Outcome,
  Work,
)
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.script import Op, Script

# Attributes of the clock that are integers. Every period adds the same number.
_COUNTS = ("num_steps", "sent_bytes")
# Up to this many repetitions are walked through one by one.
_FEW = 8
# Tolerances for rounding errors, as shares of a period's duration: for one
# period, and in addition for each period of a jump. A jump multiplies the
# distance by which replicas drift apart in a period, and with it the error.
_ROUNDING = 1e-12
_ROUNDING_OF_JUMPS = 1e-14

# Values of the clock's attributes, by name of the attribute.
State = dict[str, Any]


def simulate_run(
  link_costs: LinkCosts, work: Work, script: Script, plan: RunPlan
) -> Outcome:
  """Computes the times, steps and bytes of a whole run.

  The exchanges that are still due after the last inner step count, too.

  Args:
    link_costs: Cluster and transport.
    work: Durations of the replicas' work without the network (seconds).
    script: Turns the plan into inner steps, exchanges and waits.
    plan: Plan of the run.
  """
  clock = LongRunClock(link_costs, work)
  for ops, count in script.repeated_ops(plan):
    clock.repeat(ops, count)
  return clock.outcome()


class LongRunClock(AnalyticClock):
  """A clock that adds up many equal rounds without computing each of them.

  The module's docstring explains how.
  """

  def __init__(self, link_costs: LinkCosts, work: Work):
    """Starts the clock at 0 seconds."""
    super().__init__(link_costs, work)
    # What `_move_origin` has subtracted from points in time and sums (seconds).
    self._origin: State = {}
    # Points in time since the last `_walk_through` began, [M] each.
    self._moments: list[np.ndarray] = []

  def repeat(self, ops: Sequence[Op], count: int) -> None:
    """Adds the times of several equal rounds in a row.

    Args:
      ops: Inner steps, exchanges and waits of one round. They wait for every
        exchange that they launch.
      count: Number of repetitions.
    """
    while count > _FEW:
      self._move_origin()
      walked, period = self._find_period(ops, count)
      count -= walked
      num_periods = count // period if period else 0
      if num_periods > 2:  # `_add_stretch` walks through two of them.
        self._move_origin()
        num_added = self._add_stretch(list(ops) * period, num_periods)
        count -= num_added * period
    self._restore_origin()
    for _ in range(count):
      self.interpret(ops)

  def _move_origin(self) -> None:
    """Shifts times and sums to near 0, to keep rounding errors small.

    `_origin` records what was subtracted: from points in time, the time of the
    latest replica; from sums, their values.
    """
    latest_s = np.max(self._now)
    offsets: State = {name: latest_s for name in POINTS_IN_TIME}
    offsets |= {name: getattr(self, name) for name in SUMS}
    # Like `_worked_s`, which is one of the sums, this counts seconds of work.
    offsets[LAST_SENT] = self._worked_s[:, np.newaxis]
    for name, offset in offsets.items():
      setattr(self, name, getattr(self, name) - offset)
      self._origin[name] = self._origin.get(name, 0.0) + offset

  def _restore_origin(self) -> None:
    """Undoes `_move_origin`: times count from the start of the run again."""
    for name, offset in self._origin.items():
      setattr(self, name, getattr(self, name) + offset)
    self._origin = {}

  def _find_period(self, ops: Sequence[Op], count: int) -> tuple[int, int]:
    """Walks through repetitions of a round until their times repeat.

    Returns:
      Number of repetitions that were walked through, and the period p: each
      repetition takes each replica as long as the p-th one before it. The
      period is 0 if none was found.
    """
    longest_period = 2 * self.num_replicas
    history: list[np.ndarray] = []
    # Two periods, and the round before them, show that the times repeat.
    while len(history) < min(count, 2 * longest_period + 1):
      history.append(self._walk_through(ops))
      period = _period(history)
      if period:
        return len(history), period
    return len(history), 0

  def _add_stretch(self, ops: Sequence[Op], num_periods: int) -> int:
    """Adds two periods, and those after them that take as long as the first.

    A period is all of `ops`. The clock walks only through the first two
    periods, those that bisection looks at, and the last one that is added.

    Returns:
      Number of periods that were added, 2 to `num_periods`.
    """
    start = self._state()
    first_moments_s = self._walk_through(ops)
    first = self._changes_since(start)
    line = _Line(start, first)
    second_moments_s = self._walk_from(line.state_before(1), ops)
    second = self._changes_since(line.state_before(1))
    drifts_s = line.without_rounding(second_moments_s - first_moments_s)
    # The times of a replica that is away are far below 0, so their rounding
    # errors are larger.
    scales_s = np.maximum(line.period_s, np.abs(first_moments_s))

    def is_on_line(index: int) -> bool:
      """Whether a period's times are on the lines of periods 0 and 1."""
      moments_s = self._walk_from(line.state_before(index), ops)
      distances_s = np.abs(moments_s - (first_moments_s + index * drifts_s))
      rounding = _ROUNDING + index * _ROUNDING_OF_JUMPS
      return bool(np.all(distances_s <= rounding * scales_s))

    # If a replica takes another time for the second period than for the first,
    # there are no lines to follow, and the stretch has only these two periods.
    last_index = 1
    if not line.without_rounding(second["_now"] - first["_now"]).any():
      last_index = _last_index(is_on_line, num_periods - 1)
    self._walk_from(line.state_before(last_index), ops)
    last = self._changes_since(line.state_before(last_index))

    # `state_before` leaves out the duration of the periods before the last one.
    for name in POINTS_IN_TIME:
      self._origin[name] += last_index * line.period_s
    num_added = last_index + 1
    for name in (*SUMS, LAST_SENT):
      # What a period adds grows evenly from the first period to the last.
      mean = (first[name] + last[name]) / 2
      setattr(self, name, start[name] + num_added * mean)
    for name in _COUNTS:
      setattr(self, name, start[name] + num_added * first[name])
    return num_added

  def _walk_from(self, state: State, ops: Sequence[Op]) -> np.ndarray:
    """Sets the clock to a state, and walks through the ops of a period.

    Returns the points in time of `_walk_through`.
    """
    for name, value in state.items():
      setattr(self, name, copy.copy(value))
    return self._walk_through(ops)

  def _walk_through(self, ops: Sequence[Op]) -> np.ndarray:
    """Adds the times of ops one by one, and returns all points in time.

    These are the start and the end of every exchange, and the end of every wait
    and of the ops (seconds), [number of points * M].
    """
    self._moments = []
    self.interpret(ops)
    return np.concatenate([*self._moments, self._now])

  def _occupy_channel(self, start: np.ndarray, end: np.ndarray) -> None:
    super()._occupy_channel(start, end)
    self._moments += [start, end]

  def _wait(self, exchange_end: np.ndarray) -> None:
    super()._wait(exchange_end)
    self._moments.append(self._now)

  def _state(self) -> State:
    """Returns copies of all arrays and counts of the clock, by name."""
    names = (*POINTS_IN_TIME, *SUMS, LAST_SENT, *_COUNTS)
    return {name: copy.copy(getattr(self, name)) for name in names}

  def _changes_since(self, state: State) -> State:
    """Returns what was added to each value since an earlier state, by name."""
    return {name: getattr(self, name) - state[name] for name in state}


@dataclasses.dataclass(frozen=True)
class _Line:
  """The states of the clock before each period of a stretch of equal periods.

  The points in time leave out the duration of all earlier periods for the
  slowest replica, so they stay near 0, where rounding errors are smallest. Only
  the differences between replicas change. Sums and counts stay as in `start`.

  Attributes:
    start: State before period 0.
    changes: The differences that period 0 adds to `start`.
  """

  start: State
  changes: State

  @property
  def period_s(self) -> float:
    """Duration of a period for the slowest replica (seconds)."""
    return float(np.max(self.changes["_now"]))

  def state_before(self, index: int) -> State:
    """Returns the state before the period with an index, counted from 0."""
    state = dict(self.start)
    for name in POINTS_IN_TIME:
      drift_s = self.without_rounding(self.changes[name] - self.period_s)
      state[name] = self.start[name] + index * drift_s
    return state

  def without_rounding(self, seconds: np.ndarray) -> np.ndarray:
    """Sets differences (seconds) to 0 if rounding errors can explain them."""
    return _without_rounding(seconds, self.period_s)


def _without_rounding(seconds: np.ndarray, period_s: float) -> np.ndarray:
  """Sets differences (seconds) to 0 if rounding errors can explain them.

  They can if a difference is at most 1e-12 of the period in which it arose.
  """
  is_rounding = np.abs(seconds) <= _ROUNDING * period_s
  return np.where(is_rounding, 0.0, seconds)


def _period(history: Sequence[np.ndarray]) -> int:
  """Returns the smallest period of the last repetitions; 0 if they have none.

  With the period p, all points in time have moved on in the last p repetitions
  by as much as in the p repetitions before.

  Args:
    history: Points in time of every repetition so far (seconds), as arrays of
      one shape.
  """
  last_s = history[-1]
  # To compare two periods takes the repetition before them, too: 2 p + 1.
  for period in range(1, (len(history) - 1) // 2 + 1):
    middle_s = history[-1 - period]
    first_s = history[-1 - 2 * period]
    change_s = last_s - middle_s
    growth_s = change_s - (middle_s - first_s)
    if not _without_rounding(growth_s, float(np.max(change_s))).any():
      return period
  return 0


def _last_index(is_on_line: Callable[[int], bool], most: int) -> int:
  """Returns the last index on a line, by bisection.

  Args:
    is_on_line: Function (index) -> whether the index is on the line. It must be
      true for 0 and 1. Once it is false, it must be false for all larger
      indices.
    most: Largest index that counts, at least 1.
  """
  if is_on_line(most):
    return most
  on_line = 1
  off_line = most
  while off_line - on_line > 1:
    middle = (on_line + off_line) // 2
    if is_on_line(middle):
      on_line = middle
    else:
      off_line = middle
  return on_line
