"""Who takes part, who is away, and who is waited for.

A newcomer takes the next free seat (create once), and writes the event from
which it takes part. One that did not send in time is away since that event,
and nobody waits for it until its seat names a later event. Seats have numbers,
so to look for a newcomer is to ask for one object.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

_NEVER = -1  # Before the first event.


@dataclasses.dataclass(frozen=True)
class Roster:
  """Who takes part after an event; a part of its manifest.

  Attributes:
    seats: All replicas that ever took part, in the order of their seats.
    away: Those that are not waited for, each with the event that it missed.
  """

  seats: tuple[str, ...] = ()
  away: dict[str, int] = dataclasses.field(default_factory=dict)

  def expected(self) -> list[str]:
    """Returns the replicas that are waited for, in the order of seats."""
    return [name for name in self.seats if name not in self.away]

  def renewed(
    self, event: int, read_seat: Callable[[int], dict[str, Any] | None]
  ) -> "Roster":
    """Returns the roster with those who came, or came back, by an event.

    Args:
      event: The event that is about to be agreed on.
      read_seat: Returns what the holder of a seat wrote, or None.
    """
    seats, away = list(self.seats), dict(self.away)
    back = {n: read_seat(i) for i, n in enumerate(seats) if n in away}
    while seat := read_seat(len(seats)):
      seats.append(str(seat["name"]))
      back[seats[-1]], away[seats[-1]] = seat, _NEVER
    for name, seat in back.items():
      if seat and away[name] < int(seat["since"]) <= event:
        del away[name]
    return Roster(tuple(seats), away)

  def after(self, event: int, present: Iterable[str]) -> "Roster":
    """Returns the roster after an event at which some were present."""
    present = set(present)
    away = {n: e for n, e in self.away.items() if n not in present}
    missed = [n for n in self.expected() if n not in present]
    return Roster(self.seats, away | dict.fromkeys(missed, event))
