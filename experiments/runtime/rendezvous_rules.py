"""Decides which processes train together, and when the group is made anew.

The group of a run cannot change while its processes run, because a compiled
exchange names all of them. So replicas come and go between two groups. An agent
starts a process when it is told to, reports how the process ended, and then
waits for the next group. Here stands what the agents are told, without any
input or output:

- A group starts when all replicas wait, or when at least `min_replicas` do and
  nobody has come or gone for `settle_s` seconds.
- When an agent comes while a group with a free place runs, the group is asked
  to save at its next boundary and to stop. The next group has one more.
- When a process is lost, the other ones end by themselves, since each exchange
  needs it. The next group has one less, and goes on from the last save.
- A group that fell apart although no agent left it, as when its processes find
  another run in their directory, starts again after `settle_s` seconds.
- A process that has not ended 90 s after another one of its group is killed.
- When a process ends with success, or with an error of its own, the run ends.

Example: three replicas wait and start. The agent of one is killed; the other
two processes end within seconds and wait. Ten seconds later they start as a
group of two. The third one comes back: both save and stop, and all three start.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from dilocox_jax.checks import require
from experiments.runtime.command_line import STOP_CODES, TRY_AGAIN

# A process that loses another one notices it within 30 s, by its heartbeats.
DRAIN_S = 90.0


@dataclasses.dataclass(frozen=True)
class Order:
  """What an agent is told.

  Attributes:
    kind: "start" a process, "stop" it after a save, "kill" it, since it does
      not answer, or "end" with the whole run.
    rank: Number of the process in its group, from 0.
    count: Number of processes of the group.
    coordinator: Address of process 0, host:port.
    code: Exit code of the run, for "end".
  """

  kind: str
  rank: int = 0
  count: int = 0
  coordinator: str = ""
  code: int = 0


class Rendezvous:
  """The agents of one run. Members have any hashable names.

  Attributes:
    code: Exit code of the run; None until it has ended.
  """

  def __init__(self, num_replicas: int, min_replicas: int, settle_s: float):
    """Starts without members.

    Args:
      num_replicas: Largest size of a group. Further agents wait as spares.
      min_replicas: Smallest size of a group.
      settle_s: Seconds without a change before a smaller group starts.

    Raises:
      ValueError: If the sizes do not go together.
    """
    require(
      1 <= min_replicas <= num_replicas,
      f"min_replicas={min_replicas} must lie between 1 and num_replicas="
      f"{num_replicas}",
    )
    self._most, self._least = num_replicas, min_replicas
    self._settle_s = settle_s
    self._waiting: dict[Any, str] = {}  # Their addresses, by member.
    self._running: list[Any] = []
    self._is_stopping = self._fell_apart = False
    self._changed_s = self._first_end_s = 0.0
    self.code: int | None = None

  def wait(
    self, member: Any, address: str, code: int | None, now_s: float
  ) -> None:
    """An agent waits: it is new, or its process has ended.

    Args:
      member: The agent.
      address: Where its process would listen as process 0.
      code: Exit code of its process; negative: the signal that ended it. None
        if it had no process.
      now_s: Time in seconds.
    """
    self._gone(member, now_s)
    self._waiting[member] = address
    is_own_end = code is not None and 0 <= code not in (TRY_AGAIN, *STOP_CODES)
    if is_own_end and self.code is None:
      self.code = code

  def lost(self, member: Any, now_s: float) -> None:
    """An agent has gone, perhaps with its process."""
    self._fell_apart &= member not in self._running
    if self._waiting.pop(member, None) or member in self._running:
      self._gone(member, now_s)

  def stop(self, signal_number: int) -> None:
    """Ends the run after a save, as a signal to it would."""
    self.code = 128 + signal_number if self.code is None else self.code

  def orders(self, now_s: float) -> Iterator[tuple[Any, Order]]:
    """Yields who is told what at a time; each order comes once.

    Args:
      now_s: Time in seconds.
    """
    if self.code is not None:
      for member in (*self._waiting, *self._running):
        yield member, Order("end", code=self.code)
      self._waiting, self._running = {}, []
    elif self._running:
      yield from self._change(now_s)
    elif self._is_ready(now_s):
      yield from self._start()

  def _gone(self, member: Any, now_s: float) -> None:
    """Takes a member out of the group that runs."""
    self._changed_s = now_s
    if member in self._running:
      self._running.remove(member)
      self._first_end_s = self._first_end_s or now_s

  def _change(self, now_s: float) -> Iterator[tuple[Any, Order]]:
    """Yields the orders to a group that runs."""
    if self._first_end_s and now_s - self._first_end_s > DRAIN_S:
      for member in self._running:
        yield member, Order("kill")
      self._running = []
      self._changed_s = now_s
    elif (
      self._waiting
      and len(self._running) < self._most
      and not (self._is_stopping or self._first_end_s)
    ):
      self._is_stopping, self._fell_apart = True, False
      for member in self._running:
        yield member, Order("stop")

  def _is_ready(self, now_s: float) -> bool:
    """Whether a group may start."""
    count = len(self._waiting)
    has_settled = now_s - self._changed_s >= self._settle_s
    is_full = count >= self._most and not self._fell_apart
    return is_full or (count >= self._least and has_settled)

  def _start(self) -> Iterator[tuple[Any, Order]]:
    """Yields the orders with which a group starts."""
    self._running = list(self._waiting)[: self._most]
    addresses = [self._waiting.pop(member) for member in self._running]
    self._is_stopping, self._first_end_s = False, 0.0
    self._fell_apart = True  # Unless a reason for its end is known.
    count = len(self._running)
    for rank, member in enumerate(self._running):
      yield member, Order("start", rank, count, addresses[0])
