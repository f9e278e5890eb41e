"""Plans when pseudo-gradients are sent and means applied, in growing rounds.

The first rounds have h_1 inner steps (`first_interval`). After every d inner
steps (`steps_per_doubling`) the length doubles, until it is H
(`sync_interval`). A round keeps the length that it has at its first step.

Example: with h_1 = 4, d = 20 and H = 16 the rounds end after these steps. The
round that begins after step 36 still has 8 steps, as 36 is below 2 d = 40:

    length   4  4   4   4   4   8   8   8   16  16
    ends at  4  8  12  16  20  28  36  44   60  76  ...
"""

import bisect
import dataclasses
import functools
from collections.abc import Iterator

from dilocox_jax.checks import of_type, require
from dilocox_jax.plan.schedule.sync_schedule import Event, SyncSchedule


@dataclasses.dataclass(frozen=True)
class Stage:
  """Rounds of one length that follow each other.

  Attributes:
    first_round: Index of the first of these rounds, from 0.
    start: Number of inner steps before the first of these rounds.
    interval: Number of inner steps of each of these rounds.
  """

  first_round: int
  start: int
  interval: int


@dataclasses.dataclass(frozen=True)
class GrowingSchedule(SyncSchedule):
  """Computes when fragments are sent and applied in rounds that grow.

  A fragment is a part of the parameters. It is sent when its pseudo-gradient is
  measured, and applied when the mean changes the parameters.

  The delay tau (`overlap_steps`) from sending to applying is that of a round of
  H steps (`sync_interval`). In a round of h steps the delay is tau h / H,
  rounded down, but at least 1 if tau is not 0. A fragment that is sent at the
  end of a round has the delay of the next round. So with tau = H its mean is
  applied at the end of the next round, however long that round is.

  tau must be less than H. With a single fragment it may also be H. If the first
  rounds have a single step, tau must be 0 or H.

  Attributes:
    first_interval: h_1, the number of inner steps of the first rounds. It must
      lie between the number of fragments and H.
    steps_per_doubling: d, the number of inner steps after which the length of a
      round doubles. The last length is H, also if H is no power of two times
      h_1.
  """

  first_interval: int = 1
  steps_per_doubling: int = 1

  def __post_init__(self):
    """Raises ValueError if the settings contradict each other.

    It also does so if one is no whole number.
    """
    super().__post_init__()
    for name in ("first_interval", "steps_per_doubling"):
      of_type(name, getattr(self, name), int)
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
    # With tau = H a mean is due at the end of the next round, however short.
    require(
      overlap in (0, interval) or self._delay_in(first) < first,
      f"first_interval={first} must exceed the delay of a result in such a "
      f"round, which is {self._delay_in(first)} inner step: take at least "
      f"first_interval={first + 1}",
    )

  @functools.cached_property
  def stages(self) -> tuple[Stage, ...]:
    """The stages in order. A stage is all rounds of one length.

    The last stage has rounds of H steps, and no end.
    """
    stages = []
    round_index = 0
    step = 0
    interval = self.first_interval
    boundary = self.steps_per_doubling
    while interval < self.sync_interval:
      # All rounds that begin before the boundary have this length. With
      # boundary - step = 12 and interval = 8, two rounds begin before it. If
      # the last round has ended behind the boundary, no round has this length.
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
    """Returns the stage (rounds of one length) of the inner step `step` + 1."""
    starts = [stage.start for stage in self.stages]
    return self.stages[bisect.bisect_right(starts, step) - 1]

  @property
  def interval_label(self) -> str:
    """The first and the last length of rounds as text for people: "4 to 32"."""
    return f"{self.first_interval} to {self.sync_interval}"

  @property
  def depth(self) -> int:
    """Largest number of sends of one fragment that are pending at once.

    A send is pending until its mean is applied. Here this happens at the latest
    when the fragment is sent again. So the number is 1, or 0 if the delay (tau)
    is 0.
    """
    return 1 if self.overlap_steps else 0

  @property
  def steady_round(self) -> int:
    """Index of the round from which on all rounds are alike.

    These rounds have H steps, and send and apply the same fragments at the same
    steps within the round. If the delay (tau) is not 0, the first round of H
    steps is not among them, because it may still apply sends of a shorter
    round.
    """
    return self.stages[-1].first_round + self.depth

  @property
  def steady_step(self) -> int:
    """Number of inner steps before round `steady_round`."""
    last_stage = self.stages[-1]
    return last_stage.start + self.depth * last_stage.interval

  def num_alike(self, round_index: int) -> int | None:
    """Returns how many rounds, from a given one on, are known to be alike.

    Rounds are alike if they have equally many inner steps, and send and apply
    the same fragments at the same steps within the round.

    Args:
      round_index: Index of the given round, from 0.

    Returns:
      Number of rounds, the given one included, so at least 1. None: all later
      rounds are like the given one.
    """
    # The first round of a stage may apply what a shorter round has sent, so it
    # is like no other round.
    ends = [stage.first_round for stage in self.stages[1:]]
    stage_number = bisect.bisect_right(ends, round_index)
    if round_index < self.stages[stage_number].first_round + self.depth:
      return 1
    if stage_number == len(ends):
      return None
    return ends[stage_number] - round_index

  def round_at(self, step: int) -> tuple[int, int]:
    """Returns the round of the next inner step, after `step` finished ones.

    The result is the index of the round, from 0, and its number of inner steps.
    """
    stage = self._stage_at(step)
    rounds_before = (step - stage.start) // stage.interval
    return stage.first_round + rounds_before, stage.interval

  def delay(self, send_step: int) -> int:
    """Returns how many inner steps after a send its mean is applied.

    Args:
      send_step: Inner step after which a fragment is sent. If a round ends
        there, the length of the next round counts.
    """
    return self._delay_in(self._stage_at(send_step).interval)

  def _delay_in(self, interval: int) -> int:
    """Returns the delay from send to apply in rounds of `interval` steps."""
    if not self.overlap_steps:
      return 0
    return max(self.overlap_steps * interval // self.sync_interval, 1)

  def events(self, start: int, stop: int) -> list[Event]:
    """Returns the sends and applies after inner steps `start` + 1 to `stop`.

    The events have ascending steps. The applies of a step come before its
    sends.
    """
    events = []
    # No delay is longer than tau: older sends are applied by step `start`.
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
    """Yields all sends of the rounds that overlap steps `start` + 1 to `stop`.

    A send is a pair: a fragment, and the inner step after which it is sent. The
    first and the last round may have sends at steps outside this range.
    """
    step = max(start, 0)
    stage = self._stage_at(step)
    step -= (step - stage.start) % stage.interval  # Start of the round.
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
  """Returns a schedule with rounds of H steps, or with rounds that grow to H.

  Args:
    sync_interval: H, the length of all rounds, or of the last ones if rounds
      grow (inner steps).
    num_fragments: Number of fragments (parts of the parameters), P.
    overlap_steps: tau, the delay between sending a fragment and applying its
      mean (inner steps). In a round of h < H steps the delay is tau h / H,
      rounded down, but at least 1 if tau is not 0.
    first_interval: Length of the first rounds (inner steps), if rounds grow.
      None: all rounds have H steps.
    steps_per_doubling: Inner steps after which the length of rounds doubles, if
      rounds grow. None: all rounds have H steps.

  Raises:
    ValueError: If only one of `first_interval` and `steps_per_doubling` is
      given, or if the settings contradict each other.
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
