"""Computes the times of a run of any length in about the same time.

A run has a few kinds of rounds, and most of its rounds are of one kind. Walking
through a round takes 0.2 ms or more, which is minutes for a million of them. So
this clock walks through some of the rounds that repeat, and computes the others
from them.

Example: replica A takes 10 s for the inner steps of a round, and replica B
takes 11 s. The exchange of a round starts when both have started the round. It
takes 2 s, and both wait for it at the end of the round:

    A's next time = max(A's time + 10, max(A's time, B's time) + 2)
    B's next time = max(B's time + 11, max(A's time, B's time) + 2)

    round     0    1    2  ...   8    9   10   11
    A         0   10   20  ...  80   90  101  112
    B         0   11   22  ...  88   99  110  121

In rounds 0 to 8 A gets ahead of B by 1 s a round. From round 9 on A waits for
the exchange, and both take 11 s a round. So this run has two *stretches*: in a
stretch, each time moves on by the same amount in every round.

Where does a stretch end? The clock does only two things with times: it adds a
duration to a time, and it takes the later one of two times. Let each replica
move on n times by its own amount. Then every time within the next round is a
maximum of straight lines in n, and such a function is convex. If a convex
function lies on a straight line in three places, then it lies on this line
everywhere between the outer two. The clock looks at three rounds: the first
round of the stretch, the second one, and a later one to which it jumps. If all
times within the later round are on the lines through those of the first two,
then no round in between is different. Otherwise bisection finds the last round
that is on the lines.

In the example a jump from round 0 to round 1000 finds A at 10,000 s and B at
11,000 s. There A waits for the exchange, which A does not do in rounds 0 and 1.
Bisection finds that round 8 is the last one that is like them.

Sums follow from the first round and the last one. For example, the exchanges of
A take 2, 3, 4, ... 10 s in rounds 0 to 8, because A waits longer and longer for
the messages of B. That is nine times the mean of 2 s and 10 s.

The amounts may also repeat only every few rounds: on a ring of three replicas
the delay of one may move on to the next one in every round, so that each round
is like the third one after it. The number of rounds, here 3, is the *period*.
Then the clock compares and jumps over whole periods.

Within a stretch times are counted from its start, so that the rounding of large
numbers does not look like a change. Amounts that differ by less than 1e-12 of a
period count as equal. The result agrees with that of walking through all rounds
to 1e-9 of the run's time (tests/simulate/test_long_runs.py).

In two kinds of runs no two rounds need be alike, so the clock walks through all
rounds: if replicas are away by chance, and if a schedule from outside does not
say when its rounds repeat (`SyncSchedule.steady_round`).
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

_COUNTS = ("num_steps", "sent_bytes")
# So few repetitions are walked through one by one.
_FEW = 8
# What rounding may change, as shares of a period's duration: in one period, and
# for each period of a jump, which multiplies how far replicas drift apart.
_ROUNDING = 1e-12
_ROUNDING_OF_JUMPS = 1e-14

# Values of the clock's attributes, by name.
State = dict[str, Any]


def simulate_run(
  link_costs: LinkCosts, work: Work, script: Script, plan: RunPlan
) -> Outcome:
  """Computes the times of a whole run, flush included.

  Args:
    link_costs: Cluster and transport.
    work: Seconds of a replica's own work.
    script: Turns segments into ops.
    plan: Segments of the run.
  """
  clock = LongRunClock(link_costs, work)
  for ops, count in script.repeated_ops(plan):
    clock.repeat(ops, count)
  return clock.outcome()


class LongRunClock(AnalyticClock):
  """Adds up the times of ops that come many times in a row."""

  def __init__(self, link_costs: LinkCosts, work: Work):
    """Starts the clock at 0 seconds.

    Args:
      link_costs: Cluster and transport.
      work: Seconds of a replica's own work.
    """
    super().__init__(link_costs, work)
    # What was taken off points in time and sums, by name.
    self._origin: State = {}
    # Points in time within the ops that are walked through, [M] each.
    self._moments: list[np.ndarray] = []

  def repeat(self, ops: Sequence[Op], count: int) -> None:
    """Adds the times of ops that come several times in a row.

    Args:
      ops: Ops of one repetition. They wait for every exchange that they launch.
      count: Number of repetitions.
    """
    while count > _FEW:
      self._move_origin()
      walked, period = self._find_period(ops, count)
      count -= walked
      num_periods = count // period if period else 0
      if num_periods > 2:
        self._move_origin()
        added = self._add_stretch(list(ops) * period, num_periods)
        count -= added * period
    self._restore_origin()
    for _ in range(count):
      self.interpret(ops)

  def _move_origin(self) -> None:
    """Counts times and sums from the present ones on."""
    start_s = np.max(self._now)
    amounts: State = {name: start_s for name in POINTS_IN_TIME}
    amounts |= {name: getattr(self, name) for name in SUMS}
    amounts[LAST_SENT] = self._worked_s[:, np.newaxis]
    for name, amount in amounts.items():
      setattr(self, name, getattr(self, name) - amount)
      self._origin[name] = self._origin.get(name, 0.0) + amount

  def _restore_origin(self) -> None:
    """Counts times and sums from the start of the run again."""
    for name, amount in self._origin.items():
      setattr(self, name, getattr(self, name) + amount)
    self._origin = {}

  def _find_period(self, ops: Sequence[Op], count: int) -> tuple[int, int]:
    """Walks through repetitions until their times move on by equal amounts.

    Args:
      ops: Ops of one repetition.
      count: Number of repetitions that are left.

    Returns:
      Number of repetitions that were walked through, and their period; 0 if
      there is none so far.
    """
    longest_period = 2 * self.num_replicas
    history: list[np.ndarray] = []
    while len(history) < min(count, 2 * longest_period + 1):
      history.append(self._walk_through(ops))
      period = _period(history)
      if period:
        return len(history), period
    return len(history), 0

  def _add_stretch(self, ops: Sequence[Op], num_periods: int) -> int:
    """Adds the periods of a stretch: walks through the first two and the last.

    Args:
      ops: Ops of one period.
      num_periods: Number of periods that are left, at least 2.

    Returns:
      Number of periods that the stretch has, at least 2.
    """
    start = self._state()
    first_moments_s = self._walk_through(ops)
    first = self._changes_since(start)
    line = _Line(start, first)
    second_moments_s = self._walk_from(line.state_before(1), ops)
    second = self._changes_since(line.state_before(1))
    drifts_s = line.without_rounding(second_moments_s - first_moments_s)
    # A replica that is away stays behind, where numbers are large.
    scales_s = np.maximum(line.period_s, np.abs(first_moments_s))

    def is_on_line(index: int) -> bool:
      """Whether all times within a period are on the line of the first two."""
      moments_s = self._walk_from(line.state_before(index), ops)
      distances_s = np.abs(moments_s - (first_moments_s + index * drifts_s))
      rounding = _ROUNDING + index * _ROUNDING_OF_JUMPS
      return bool(np.all(distances_s <= rounding * scales_s))

    # A second period that adds other amounts is the last one of the stretch.
    last_index = 1
    if not line.without_rounding(second["_now"] - first["_now"]).any():
      last_index = _last_index(is_on_line, num_periods - 1)
    self._walk_from(line.state_before(last_index), ops)
    last = self._changes_since(line.state_before(last_index))

    for name in POINTS_IN_TIME:
      self._origin[name] += last_index * line.period_s
    added = last_index + 1
    for name in (*SUMS, LAST_SENT):
      # What a period adds grows evenly from the first period to the last.
      mean = (first[name] + last[name]) / 2
      setattr(self, name, start[name] + added * mean)
    for name in _COUNTS:
      setattr(self, name, start[name] + added * first[name])
    return added

  def _walk_from(self, state: State, ops: Sequence[Op]) -> np.ndarray:
    """Sets the clock to a state, and then does as `_walk_through`."""
    for name, value in state.items():
      setattr(self, name, copy.copy(value))
    return self._walk_through(ops)

  def _walk_through(self, ops: Sequence[Op]) -> np.ndarray:
    """Walks through ops; returns all points in time, [number of points * M]."""
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
    """Returns by how much the clock differs from a state, by name."""
    return {name: getattr(self, name) - state[name] for name in state}


@dataclasses.dataclass(frozen=True)
class _Line:
  """The states before the periods of a stretch.

  The only change from one period to the next is that replicas drift apart. So
  the states leave out the duration of the periods before, which all replicas
  have in common. Their times stay near 0, where rounding is smallest.

  Attributes:
    start: State before period 0.
    changes: What period 0 adds to it.
  """

  start: State
  changes: State

  @property
  def period_s(self) -> float:
    """Duration of a period for the slowest replica (seconds)."""
    return float(np.max(self.changes["_now"]))

  def state_before(self, index: int) -> State:
    """Returns the state before a period.

    Args:
      index: Index of the period, from 0.
    """
    state = dict(self.start)
    for name in POINTS_IN_TIME:
      drift_s = self.without_rounding(self.changes[name] - self.period_s)
      state[name] = self.start[name] + index * drift_s
    return state

  def without_rounding(self, seconds: np.ndarray) -> np.ndarray:
    """Returns differences in time, with 0 for those that rounding explains."""
    return _without_rounding(seconds, self.period_s)


def _without_rounding(seconds: np.ndarray, period_s: float) -> np.ndarray:
  """Returns differences in time, with 0 for those that rounding explains.

  Args:
    seconds: Differences (seconds).
    period_s: Duration of the period in which they arose (seconds).
  """
  is_rounding = np.abs(seconds) <= _ROUNDING * period_s
  return np.where(is_rounding, 0.0, seconds)


def _period(history: Sequence[np.ndarray]) -> int:
  """Returns after how many repetitions times move on by equal amounts.

  Args:
    history: Points in time of every repetition so far.

  Returns:
    The least period of the last repetitions; 0 if they have none.
  """
  last_s = history[-1]
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
    is_on_line: Whether an index is on the line. Indices 0 and 1 are. If an
      index is not, then no later one is.
    most: Largest index, at least 1.
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
