"""Says which replicas take part in which round, and with how many steps.

A replica that is away takes no inner steps, and what it sent and was not
exchanged yet is left out of the mean. It comes back at the start of a round as
a copy of the *donor*, the first replica that was present in the round before:
with the outer parameters, the donor's inner optimizer state, no residual and
nothing in flight. So a replica that lost its memory, one that is new, and one
that was only away all begin alike.

A replica m may be slow: it takes h_m of the H steps of a round, step k of them
where floor(t h_m / H) reaches k for the first time (t counts the H steps). The
mean of the replicas is weighted by h_m, that is by the tokens of a whole round,
also where a slice holds fewer steps of a replica that came back within it.

Example: M = 3, H = 4, inner steps 4, 2, 4, and replica 2 is away in round 1.
In round 0 the weights of the mean are 4, 2 and 4 tenths. In round 1 they are
two thirds and one third, and replica 1 steps on the second and the fourth of
the four steps.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence

import numpy as np

from dilocox_jax.checks import require
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule, Window

# Triples (replica, first round, last round).
Absences = tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True)
class WindowParticipation:
  """What each replica does in a window.

  Attributes:
    num_steps: Inner steps of each replica, [M].
    weights: Factor of each replica's part of the exchange that is applied, [M];
      0 leaves it out. The mean of the factors that are not 0 is 1. Empty if
      nothing is applied.
  """

  num_steps: tuple[int, ...]
  weights: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class RoundParticipation:
  """What each replica does in a round.

  Attributes:
    members: Indices of the replicas that are present.
    returning: Indices of those that were away in the round before.
    donor: Index of the replica that they copy.
    windows: Participation of the round's windows, in order.
  """

  members: tuple[int, ...]
  returning: tuple[int, ...]
  donor: int
  windows: tuple[WindowParticipation, ...]

  @property
  def participants(self) -> list[np.ndarray]:
    """Who is in the mean of every exchange, booleans [M], in order."""
    return [np.array(w.weights) > 0 for w in self.windows if w.weights]

  @functools.cached_property
  def num_steps(self) -> tuple[int, ...]:
    """Inner steps of each replica in the round, [M]."""
    parts = [window.num_steps for window in self.windows]
    return tuple(np.sum(parts, axis=0).tolist())


@dataclasses.dataclass(frozen=True)
class Membership:
  """The rounds and the pace of all replicas of a run.

  Attributes:
    schedule: Schedule of the rounds; it must be regular.
    num_replicas: M.
    absences: Triples (replica, first round, last round), rounds from 0.
    absence_rate: Chance of a replica to be away in a round. One replica always
      stays.
    seed: Seed of these chances.
    inner_steps: Inner steps of each replica in a round; empty: H for all.
  """

  schedule: SyncSchedule
  num_replicas: int
  absences: Absences = ()
  absence_rate: float = 0.0
  seed: int = 0
  inner_steps: tuple[int, ...] = ()

  def __post_init__(self):
    count, interval = self.num_replicas, self.schedule.sync_interval
    require(
      self.schedule.is_regular, "absences and uneven steps need rounds of one H"
    )
    for replica, first, last in self.absences:
      require(
        replica < count and first <= last,
        f"absences={replica}:{first}-{last} must name one of {count} replicas "
        "(from 0) and a first round that is not after the last",
      )
    for round_index in {first for _, first, _ in self.absences}:
      require(
        not self._planned_away(round_index).all(),
        f"absences leave no replica in round {round_index}: let one stay",
      )
    pace = self.inner_steps
    require(
      not pace
      or (len(pace) == count and min(pace) >= 1 and max(pace) == interval),
      f"inner_steps={','.join(map(str, pace))} must be {count} numbers from 1 "
      f"to sync_interval={interval}, of which the largest is {interval}",
    )

  def _planned_away(self, round_index: int) -> np.ndarray:
    away = np.zeros(self.num_replicas, bool)
    for replica, first, last in self.absences:
      away[replica] |= first <= round_index <= last
    return away

  @functools.lru_cache(maxsize=1024)  # noqa: B019 - as long as the run.
  def present(self, round_index: int) -> np.ndarray:
    """Returns which replicas are present in a round, booleans [M]."""
    planned = self._planned_away(round_index)
    drawn = np.random.default_rng([self.seed, round_index])
    away = planned | (drawn.random(self.num_replicas) < self.absence_rate)
    if away.all():
      away[np.argmin(planned)] = False
    return ~away

  def num_alike(self, round_index: int) -> int | None:
    """Returns how many rounds in a row have the same participation.

    Example: with tau = 0 and replica 1 away in rounds 3 to 5, rounds 4 and 5
    are alike. Round 3 is not like them, because all replicas were present in
    the round before it.

    Args:
      round_index: Index of the first of these rounds.

    Returns:
      Number of rounds; None if all later rounds are alike.
    """
    if self.absence_rate:
      return 1
    # A round differs from the one before it if other replicas are present, if
    # other replicas were present before it, or if it applies an exchange that
    # was sent while others were present.
    num_affected = 1 + max(self.schedule.depth, 1)
    different: list[int] = []
    for _, first, last in self.absences:
      for change in (first, last + 1):
        different += range(change, change + num_affected)
    later = [index for index in different if index > round_index]
    return min(later) - round_index if later else None

  def _done(self, step: int, is_present: np.ndarray) -> np.ndarray:
    """Returns the steps of each replica in the first `step` of a round."""
    interval = self.schedule.sync_interval
    pace = np.array(self.inner_steps or (interval,) * self.num_replicas)
    return is_present * (step * pace // interval)

  def _weights(self, send_step: int, round_index: int) -> tuple[float, ...]:
    """Returns the factors of an exchange that ends in a round.

    Who was away in any round from the send to the end is left out.
    """
    sent_round, _ = self.schedule.round_at(send_step - 1)
    stays = np.ones(self.num_replicas, bool)
    for index in range(sent_round, round_index + 1):
      stays &= self.present(index)
    shares = self._done(self.schedule.sync_interval, stays)
    return tuple((shares * (stays.sum() / max(shares.sum(), 1))).tolist())

  def participation(
    self, round_index: int, windows: Sequence[Window]
  ) -> RoundParticipation:
    """Returns what each replica does in the windows of a round or a flush.

    Args:
      round_index: Index of the round, from 0; of a flush: that of the last
        round.
      windows: Windows of the round, from its first step on.
    """
    is_present, step, parts = self.present(round_index), 0, []
    for window in windows:
      before = self._done(step, is_present)
      step += window.num_steps
      taken = tuple((self._done(step, is_present) - before).tolist())
      weights = ()
      if window.applied:
        weights = self._weights(window.applied.send_step, round_index)
      parts.append(WindowParticipation(taken, weights))
    was_present = self.present(round_index - 1) if round_index else is_present
    return RoundParticipation(
      tuple(np.flatnonzero(is_present).tolist()),
      tuple(np.flatnonzero(is_present & ~was_present).tolist()),
      int(np.argmax(was_present)),
      tuple(parts),
    )


def named_absences(text: str) -> Absences:
  """Returns the triples of a text such as "1:3-5;0:8".

  Args:
    text: Replica 1 is away in the rounds 3 to 5, replica 0 in round 8. Replicas
      and rounds are counted from 0.

  Raises:
    ValueError: If that is not its form.
  """
  triples = []
  for entry in filter(None, text.split(";")):
    found = re.fullmatch(r"(\d+):(\d+)(?:-(\d+))?", entry)
    if not found:
      raise ValueError(
        f"absences={text!r} must be of the form '1:3-5;0:8': replica 1 is away "
        "in the rounds 3 to 5, and replica 0 in round 8"
      )
    replica, first, last = found.groups()
    triples.append((int(replica), int(first), int(last or first)))
  return tuple(triples)


def named_inner_steps(text: str) -> tuple[int, ...]:
  """Returns the numbers of a text such as "32,16"; one for each replica.

  Raises:
    ValueError: If that is not its form.
  """
  require(
    re.fullmatch(r"(\d+(,\d+)*)?", text) is not None,
    f"inner_steps={text!r} must be numbers joined by ',', such as '32,16'",
  )
  return tuple(int(number) for number in text.split(",") if number)
