"""Computes the events of rounds that grow longer during a run.

The first rounds have h_1 inner steps (`first_interval`). After every d inner
steps (`steps_per_doubling`) the length doubles, until it is H
(`sync_interval`). A round keeps the length that it has at its first step. So
all rounds have one of at most log2(H / h_1) + 2 lengths, and there are no more
compiled programs than lengths.

Example: with h_1 = 4, d = 20 and H = 16 the rounds end after these steps. The
round that begins after step 36 still has 8 steps, as 36 is below 2 d = 40:

    length   4  4   4   4   4   8   8   8   16  16
    ends at  4  8  12  16  20  28  36  44   60  76  ...

The rounds with one length are a *stage*.

If a result is applied tau inner steps after its send, tau is meant for rounds
of H steps. In a round of h steps the delay is tau h / H, rounded down, but at
least 1. A send at the end of a round counts to the next round. With tau = H a
result is applied at the end of the next round, however long that round is.
"""

import bisect
import dataclasses
import functools
from collections.abc import Iterator

from dilocox_jax.checks import require
from dilocox_jax.plan.schedule.sync_schedule import Event, SyncSchedule


@dataclasses.dataclass(frozen=True)
class Stage:
  """Rounds of one length that follow each other.

  Attributes:
    first_round: Index of the first of these rounds, from 0.
    start: Inner step at which the first of these rounds begins.
    interval: Number of inner steps of each of these rounds.
  """

  first_round: int
  start: int
  interval: int


@dataclasses.dataclass(frozen=True)
class GrowingSchedule(SyncSchedule):
  """Computes when fragments are sent and applied in rounds that grow.

  Attributes:
    first_interval: h_1, the number of inner steps of the first rounds.
    steps_per_doubling: d, the number of inner steps after which the length of
      a round doubles. The last length is H (`sync_interval`), also if H is no
      power of two times h_1.
  """

  first_interval: int = 1
  steps_per_doubling: int = 1

  def __post_init__(self):
    """Raises ValueError if the settings contradict each other."""
    super().__post_init__()
    first = self.first_interval
    fragments = self.num_fragments
    interval = self.sync_interval
    overlap = self.overlap_steps
    require(
      fragments <= first <= interval,
      f"first_interval={first} must lie between num_fragments={fragments} and "
      f"sync_interval={interval}",
    )
    require(
      self.steps_per_doubling >= 1,
      f"steps_per_doubling={self.steps_per_doubling} must be at least 1 inner "
      "step",
    )
    require(
      overlap < interval or (overlap == interval and fragments == 1),
      f"overlap_steps={overlap} must be less than sync_interval={interval} "
      "while rounds grow, or equal to it with one fragment",
    )
    require(
      overlap in (0, interval) or self._delay_in(first) < first,
      f"first_interval={first} must exceed the delay of a result in such a "
      f"round, which is {self._delay_in(first)} inner step: take at least "
      f"first_interval={first + 1}",
    )

  @functools.cached_property
  def stages(self) -> tuple[Stage, ...]:
    """The stages in order. The last one has no end."""
    stages = []
    round_index = 0
    step = 0
    interval = self.first_interval
    boundary = self.steps_per_doubling
    while interval < self.sync_interval:
      # Rounds of this length begin before the boundary.
      num_rounds = max(-(-(boundary - step) // interval), 0)
      if num_rounds:
        stages.append(Stage(round_index, step, interval))
      round_index += num_rounds
      step += num_rounds * interval
      interval *= 2
      boundary += self.steps_per_doubling
    stages.append(Stage(round_index, step, self.sync_interval))
    return tuple(stages)

  def _stage_at(self, step: int) -> Stage:
    """Returns the stage of the round that begins after a step, or contains it.

    Args:
      step: Number of finished inner steps.
    """
    starts = [stage.start for stage in self.stages]
    return self.stages[bisect.bisect_right(starts, step) - 1]

  @property
  def interval_label(self) -> str:
    """Text for people: the first and the last length, such as "4 to 32"."""
    return f"{self.first_interval} to {self.sync_interval}"

  @property
  def depth(self) -> int:
    """Largest number of one fragment's exchanges in flight, 0 or 1.

    A result is applied before the fragment is sent again, or at that step.
    """
    return 1 if self.overlap_steps else 0

  @property
  def steady_round(self) -> int:
    """Index of the round from which on all rounds have the same windows."""
    return self.stages[-1].first_round + self.depth

  @property
  def steady_step(self) -> int:
    """Inner step at which round `steady_round` begins."""
    last_stage = self.stages[-1]
    return last_stage.start + self.depth * last_stage.interval

  def num_alike(self, round_index: int) -> int | None:
    """Returns how many rounds in a row have the same windows.

    Args:
      round_index: Index of the first of these rounds.

    Returns:
      Number of rounds, at least 1; None if all later rounds are alike.
    """
    # The first round of a stage may apply what a shorter round has sent.
    ends = [stage.first_round for stage in self.stages[1:]]
    stage_number = bisect.bisect_right(ends, round_index)
    if round_index < self.stages[stage_number].first_round + self.depth:
      return 1
    if stage_number == len(ends):
      return None
    return ends[stage_number] - round_index

  def round_at(self, step: int) -> tuple[int, int]:
    """Returns the index and the number of inner steps of a round.

    Args:
      step: Number of inner steps of the schedule before the round, or before a
        step of the round.
    """
    stage = self._stage_at(step)
    rounds_before = (step - stage.start) // stage.interval
    return stage.first_round + rounds_before, stage.interval

  def delay(self, send_step: int) -> int:
    """Returns after how many inner steps the result of a send is applied.

    Args:
      send_step: Inner step after which a fragment is sent.
    """
    return self._delay_in(self._stage_at(send_step).interval)

  def _delay_in(self, interval: int) -> int:
    """Returns the delay in rounds of one length (inner steps).

    Args:
      interval: Number of inner steps of a round.
    """
    if not self.overlap_steps:
      return 0
    return max(self.overlap_steps * interval // self.sync_interval, 1)

  def events(self, start: int, stop: int) -> list[Event]:
    """Returns the events of inner steps start < s <= stop, in order.

    Args:
      start: Inner step before the first of these steps.
      stop: Last of these steps.
    """
    events = []
    for fragment, send_step in self._sends(start - self.overlap_steps, stop):
      apply_step = send_step + self.delay(send_step)
      for kind, step in (("apply", apply_step), ("send", send_step)):
        if start < step <= stop:
          event = Event(
            step=step, kind=kind, fragment=fragment, send_step=send_step
          )
          events.append(event)
    return sorted(events)

  def _sends(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yields the sends of whole rounds, which cover a range of inner steps.

    Args:
      start: Inner step before the first step of the range.
      stop: Last step of the range.

    Yields:
      The fragment, and the inner step after which it is sent. Some of these
      steps may lie outside the range.
    """
    step = max(start, 0)
    stage = self._stage_at(step)
    step -= (step - stage.start) % stage.interval
    while step < stop:
      interval = self._stage_at(step).interval
      for fragment in range(1, self.num_fragments):
        yield fragment, step + fragment * interval // self.num_fragments
      step += interval
      # Fragment 0 is sent at the end of a round.
      yield 0, step


def schedule_of(
  sync_interval: int,
  num_fragments: int = 1,
  overlap_steps: int = 0,
  *,
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
) -> SyncSchedule:
  """Returns the schedule of a method: rounds of one length, or that grow.

  Args:
    sync_interval: H (inner steps), the length of the last rounds if they grow.
    num_fragments: Number of fragments, P.
    overlap_steps: tau (inner steps), in rounds of H steps.
    first_interval: Length of the first rounds (inner steps). None: all rounds
      have H steps.
    steps_per_doubling: Inner steps after which the length doubles. None: all
      rounds have H steps.

  Raises:
    ValueError: If only one of the last two is given, or if the settings
      contradict each other.
  """
  if first_interval is None or steps_per_doubling is None:
    require(
      steps_per_doubling is None,
      f"steps_per_doubling={steps_per_doubling} needs first_interval, the "
      "length of the first rounds",
    )
    require(
      first_interval is None,
      f"first_interval={first_interval} needs steps_per_doubling, the inner "
      "steps after which the length of a round doubles",
    )
    return SyncSchedule(sync_interval, num_fragments, overlap_steps)
  return GrowingSchedule(
    sync_interval,
    num_fragments,
    overlap_steps,
    first_interval=first_interval,
    steps_per_doubling=steps_per_doubling,
  )
