"""Plans in which rounds each replica takes part, and with how many steps.

A replica that is away for some rounds takes no inner steps. A mean leaves it
out if it was away in any round from the one in which pseudo-gradients are
measured to the one in which their mean is applied.

A replica comes back at the start of a round. It begins with the outer
parameters. Its residual of error feedback and its pseudo-gradients in flight
become zeros. Its inner optimizer state becomes a copy of the state of the
*source replica*: the first replica that was present in the round before.

A slow replica m takes h_m of the H steps of a round. It takes its step k when
floor(t h_m / H) reaches k for the first time, where t counts the H steps. The
mean of the replicas is weighted by h_m.

Example: M = 3 replicas, H = 4, inner steps 4, 2, 4, means without a delay, and
replica 2 is away in round 1. In round 0 the weights of the mean are 4, 2 and 4
tenths. In round 1 they are 4 and 2 sixths, and replica 1 steps on the second
and the fourth of the four steps, where t * 2 / 4 reaches 1 and 2.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence

import numpy as np

from dilocox_jax.checks import require
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule, Window

# Triples (replica, first round, last round).
Absences = tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True)
class WindowParticipation:
  """What each replica does in a window.

  A window is a part of a round: some inner steps, after which the mean of at
  most one fragment (a part of the parameters) is applied, and at most one
  fragment is sent.

  Attributes:
    num_steps: Number of inner steps of each replica, [M].
    weights: Factor of each replica's pseudo-gradient in the mean that is
      applied in this window, [M]. A factor of 0 leaves the replica out. The
      other factors have the mean 1. Empty if nothing is applied.
  """

  num_steps: tuple[int, ...]
  weights: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class RoundParticipation:
  """What each replica does in a round.

  Attributes:
    members: Indices of the replicas that are present, ascending.
    returning: Indices of the members that were away in the round before.
    source_replica: Index of the replica whose inner optimizer state the
      returning replicas copy.
    windows: What each replica does in each window of the round, in order. A
      window is some inner steps, then at most one apply and one send.
  """

  members: tuple[int, ...]
  returning: tuple[int, ...]
  source_replica: int
  windows: tuple[WindowParticipation, ...]

  @property
  def participants(self) -> list[np.ndarray]:
    """Which replicas are in each mean that the round applies, in order.

    Each entry is a boolean array [M].
    """
    return [
      np.array(window.weights) > 0 for window in self.windows if window.weights
    ]

  @functools.cached_property
  def num_steps(self) -> tuple[int, ...]:
    """Number of inner steps of each replica in the round, [M]."""
    window_steps = [window.num_steps for window in self.windows]
    return tuple(np.sum(window_steps, axis=0).tolist())


@dataclasses.dataclass(frozen=True)
class Membership:
  """The rounds in which replicas take part, and their numbers of steps.

  Attributes:
    schedule: Schedule of the rounds. All its rounds must have H inner steps.
    num_replicas: Number of replicas, M.
    absences: Planned absences as triples (replica, first round, last round).
      Replicas and rounds are counted from 0. The replica is away in the last
      round, too. In each round at least one replica must be present by this
      plan.
    absence_rate: Probability that a replica is away in a round, in addition to
      `absences`. If no replica would be left, one stays.
    seed: Seed of the random absences.
    inner_steps: Number of inner steps of each replica in a round, 1 to H. The
      largest number must be H. Empty: all replicas take H steps.
  """

  schedule: SyncSchedule
  num_replicas: int
  absences: Absences = ()
  absence_rate: float = 0.0
  seed: int = 0
  inner_steps: tuple[int, ...] = ()

  def __post_init__(self):
    """Raises ValueError if absences or steps do not fit the schedule."""
    count = self.num_replicas
    interval = self.schedule.sync_interval
    require(
      self.schedule.is_regular, "absences and uneven steps need rounds of one H"
    )
    for replica, first, last in self.absences:
      require(
        replica < count and first <= last,
        f"absences={replica}:{first}-{last} must name one of {count} replicas "
        "(from 0) and a first round that is not after the last",
      )
    # If a plan ever keeps all replicas away, it does so in a round in which an
    # absence begins.
    for round_index in {first for _, first, _ in self.absences}:
      require(
        not self._planned_away(round_index).all(),
        f"absences leave no replica in round {round_index}: let one stay",
      )
    steps = self.inner_steps
    if steps:
      require(
        len(steps) == count and min(steps) >= 1 and max(steps) == interval,
        f"inner_steps={','.join(map(str, steps))} must be {count} numbers from "
        f"1 to sync_interval={interval}, of which the largest is {interval}",
      )

  def _planned_away(self, round_index: int) -> np.ndarray:
    """Returns whether each replica is away by plan in a round, booleans [M].

    The plan is `absences`, without random absences.
    """
    away = np.zeros(self.num_replicas, bool)
    for replica, first, last in self.absences:
      away[replica] |= first <= round_index <= last
    return away

  @functools.lru_cache(maxsize=1024)  # noqa: B019 - as long as the run.
  def present(self, round_index: int) -> np.ndarray:
    """Returns whether each replica is present in a round, booleans [M].

    If chance would keep all replicas away, the first one that is not away by
    plan is present all the same. The array is cached, so do not change it.
    """
    is_planned_away = self._planned_away(round_index)
    rng = np.random.default_rng([self.seed, round_index])
    is_drawn_away = rng.random(self.num_replicas) < self.absence_rate
    is_away = is_planned_away | is_drawn_away
    if is_away.all():
      is_away[np.argmin(is_planned_away)] = False
    return ~is_away

  def num_present(self, rounds: Iterable[int]) -> dict[int, int]:
    """Counts rounds by the number of replicas that are present.

    Example: {3: 8, 2: 1} means that 3 replicas are present in 8 of the rounds,
    and 2 replicas in one round.

    Args:
      rounds: Indices of the rounds, from 0.
    """
    counts = (int(self.present(round_index).sum()) for round_index in rounds)
    return dict(collections.Counter(counts))

  def num_alike(self, round_index: int) -> int | None:
    """Returns how many rounds, from a given one on, are known to be alike.

    Rounds are alike if the same replicas are present, were present in the round
    before, and are in each mean.

    Example: means are applied without a delay, and replica 1 is away in rounds
    3 to 5. Then rounds 4 and 5 are alike. Round 3 is not like them, because all
    replicas were present in the round before it.

    Args:
      round_index: Index of the given round, from 0.

    Returns:
      Number of rounds, the given one included, so at least 1. None: all later
      rounds are like the given one. With random absences the number is 1.
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
    """Returns how many inner steps each replica has taken in a round, [M].

    Args:
      step: How many of the H steps of the round have passed, 0 to H.
      is_present: Whether each replica is present, booleans [M]. The others have
        taken no steps.
    """
    interval = self.schedule.sync_interval
    inner_steps = np.array(self.inner_steps or (interval,) * self.num_replicas)
    return is_present * (step * inner_steps // interval)

  def _weights(self, send_step: int, round_index: int) -> tuple[float, ...]:
    """Returns the factor of each replica in the mean of a fragment, [M].

    The mean is applied in round `round_index`. The factor is 0 if the replica
    was away in this round, in the round of the send, or in a round between. The
    other factors have the mean 1, and are proportional to the replica's steps
    in a whole round.
    """
    # The round that contains the inner step `send_step`.
    sent_round, _ = self.schedule.round_at(send_step - 1)
    is_counted = np.ones(self.num_replicas, bool)
    for index in range(sent_round, round_index + 1):
      is_counted &= self.present(index)
    num_steps = self._done(self.schedule.sync_interval, is_counted)
    # The mean over the counted replicas becomes 1.
    scale = is_counted.sum() / max(num_steps.sum(), 1)
    return tuple((num_steps * scale).tolist())

  def participation(
    self, round_index: int, windows: Sequence[Window]
  ) -> RoundParticipation:
    """Returns what each replica does in the windows of a round or of the flush.

    The flush sends and applies what is left over after the last round.

    Args:
      round_index: Index of the round, from 0. For the flush it is the index of
        the last round.
      windows: All windows of the round (`SyncSchedule.windows`), or of the
        flush (`SyncSchedule.flush_windows`).
    """
    is_present = self.present(round_index)
    was_present = is_present
    if round_index > 0:
      was_present = self.present(round_index - 1)
    step = 0
    window_participations = []
    for window in windows:
      # A slow replica's steps are rounded down once in a round, not per window.
      done_before = self._done(step, is_present)
      step += window.num_steps
      num_steps = self._done(step, is_present) - done_before
      weights = ()
      if window.applied:
        weights = self._weights(window.applied.send_step, round_index)
      window_participations.append(
        WindowParticipation(tuple(num_steps.tolist()), weights)
      )
    return RoundParticipation(
      members=tuple(np.flatnonzero(is_present).tolist()),
      returning=tuple(np.flatnonzero(is_present & ~was_present).tolist()),
      source_replica=int(np.argmax(was_present)),
      windows=tuple(window_participations),
    )


def named_absences(text: str) -> Absences:
  """Parses the text of the absences of replicas.

  Args:
    text: For example "1:3-5;0:8": replica 1 is away in the rounds 3 to 5, and
      replica 0 in round 8. Replicas and rounds are counted from 0. Empty: there
      are no absences.

  Returns:
    Triples (replica, first round, last round).

  Raises:
    ValueError: If the text cannot be parsed.
  """
  triples = []
  for entry in filter(None, text.split(";")):
    match = re.fullmatch(r"(\d+):(\d+)(?:-(\d+))?", entry)
    if match is None:
      raise ValueError(
        f"absences={text!r} must be of the form '1:3-5;0:8': replica 1 is away "
        "in the rounds 3 to 5, and replica 0 in round 8"
      )
    replica, first, last = match.groups()
    triples.append((int(replica), int(first), int(last or first)))
  return tuple(triples)


def named_inner_steps(text: str) -> tuple[int, ...]:
  """Parses numbers of inner steps of replicas: "32,16" becomes (32, 16).

  An empty text becomes (). Raises ValueError if a text cannot be parsed.
  """
  require(
    re.fullmatch(r"(\d+(,\d+)*)?", text) is not None,
    f"inner_steps={text!r} must be numbers joined by ',', such as '32,16'",
  )
  return tuple(int(number) for number in text.split(",") if number)
