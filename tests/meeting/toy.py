"""A replica that trains by hand through a mailbox, as a carrier would.

Its inner steps end at a place that depends on the shared parameters and on its
name alone. So a twin can compute what all replicas must have, from the lists of
messages (tests/oracles/mailbox.py).
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dilocox_jax.meeting.agreement import LostError
from dilocox_jax.meeting.mailbox import Exchanged, Mailbox
from tests.oracles import mailbox as twin

MARKS = 16  # 64-bit words with one bit for every piece of progress.


class Toy:
  """One replica.

  Attributes:
    history: Digest of what was averaged, by event, as this replica saw it.
    credited: Marks of the progress that was averaged, by replica.
    kept: Marks of the progress that this replica has not got rid of.
    made: Marks of all progress that it has made.
  """

  def __init__(
    self,
    name: str,
    events: int,
    *,
    turns: int = 1,
    delay: int = 0,
    marks: Iterator[int] | None = None,
    work: Callable[[int], None] = lambda event: None,
  ):
    self.name, self.events, self.turns, self.delay = name, events, turns, delay
    self.marks, self.work = marks or iter(()), work
    self.history: dict[int, str] = {}
    self.credited: list[tuple[int, str, bytes]] = []
    self.kept = np.zeros(MARKS, np.uint64)
    self.made = np.zeros(MARKS, np.uint64)
    self.theta, self.momentum = twin.start()
    self.losses = self.event = 0

  def run(self, box: Mailbox) -> None:
    """Goes through all events."""
    self._begin(box)
    while self.event < self.events:
      try:
        self._one_event(box)
      except LostError:
        self.losses += 1
        self.kept = np.zeros(MARKS, np.uint64)
        self._begin(box)

  def _begin(self, box: Mailbox) -> None:
    self.pending: list[np.ndarray] = []
    snapshot = box.newest()
    if snapshot is None:
      self.theta, self.momentum = twin.start()
      self.event = 0
    else:
      self.theta, self.momentum = snapshot.arrays
      self.event = snapshot.first

  def saved(self, theta, momentum) -> list[np.ndarray]:
    """Returns what a snapshot holds."""
    return [theta, momentum]

  def _one_event(self, box: Mailbox) -> None:
    event = self.event
    while len(self.pending) > self.delay:
      mean = self.pending.pop(0)
      self.theta, self.momentum = twin.outer(self.theta, self.momentum, mean)
    theta, momentum = self.theta, self.momentum
    is_there = box.attends(event)
    delta = np.zeros_like(theta)
    if is_there:
      self.work(event)
      mark = next(self.marks, None)
      if mark is not None:
        self.kept[mark // 64] |= np.uint64(1 << mark % 64)
        self.made[mark // 64] |= np.uint64(1 << mark % 64)
      delta = twin.delta(self.name, theta)
    first = event - len(self.pending)
    exchanged = Exchanged([], False, {})
    for turn in range(self.turns):
      exchanged = box.exchange(
        event,
        turn,
        [delta, self.kept.copy()],
        weight=twin.weight(self.name),
        send=is_there,
        state=hashlib.sha256(theta.tobytes() + momentum.tobytes()).digest(),
        snapshot=lambda: (first, self.saved(theta, momentum)),
      )
    self._take(event, exchanged)
    self.event += 1

  def _take(self, event: int, exchanged: Exchanged) -> None:
    if exchanged.is_own_listed:
      self.kept = np.zeros(MARKS, np.uint64)
    told: Any = hashlib.sha256()
    for name, weight, arrays in exchanged.messages:
      told.update(f"{name} {weight}".encode() + arrays[0].tobytes())
      self.credited.append((event, name, arrays[1].tobytes()))
    self.history[event] = told.hexdigest()
    self.pending.append(
      twin.mean([(w, arrays[0]) for _, w, arrays in exchanged.messages])
    )


def slow_work(seconds: float) -> Callable[[int], None]:
  """Returns inner steps that take a time."""
  return lambda event: time.sleep(seconds)
