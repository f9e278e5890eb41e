"""The seats of a run: who takes part, and since which event."""

from typing import Any

from dilocox_jax.meeting.paths import seat_path
from dilocox_jax.meeting.roster import Roster
from dilocox_jax.meeting.seal import JSON_BYTES, Seal


class Seats:
  """Reads all seats, and writes that of one replica.

  Attributes:
    index: Number of this replica's seat; None before it has announced itself.
  """

  def __init__(self, store: Any, seal: Seal, name: str):
    """Opens the seats of a run.

    Args:
      store: A `Patient` store.
      seal: The seal of the run.
      name: Name of this replica.
    """
    self._store, self._seal, self._name = store, seal, name
    self._since: int | None = None
    self.index: int | None = None

  def read(self, index: int) -> dict[str, Any] | None:
    """Returns what the holder of a seat wrote, or None."""
    path = seat_path(index)
    return self._seal.opened_json(path, self._store.get(path, JSON_BYTES))

  def announce(self, event: int, roster: Roster) -> None:
    """Says that this replica is there from an event on.

    Args:
      event: The event.
      roster: The roster after the event before.
    """
    if self._since != event:
      self._write(event, roster)
      self._since = event

  def _write(self, event: int, roster: Roster) -> None:
    seat = {"name": self._name, "since": event}
    if self._name in roster.seats:
      self.index = roster.seats.index(self._name)
      self._put(self.index, seat)
      return
    index = len(roster.seats)
    while not self._is_seated(index, seat):
      index += 1
    self.index = index

  def _put(self, index: int, seat: dict[str, Any]) -> None:
    path = seat_path(index)
    self._store.put(path, self._seal.closed_json(path, seat))

  def _is_seated(self, index: int, seat: dict[str, Any]) -> bool:
    """Takes a seat that is free, or was of an earlier life of this replica."""
    path = seat_path(index)
    if self._store.create(path, self._seal.closed_json(path, seat)):
      return True
    found = self.read(index)
    if found is None:  # Only a stranger writes what does not open.
      self._store.delete([path])
      return self._is_seated(index, seat)
    if found["name"] != self._name:
      return False
    self._put(index, seat)
    return True
