"""Simulates gloo's ring request by request: the oracle of its formula.

Every process has a thread that asks, sends and adds, and a line on which its
requests and segments leave in the order in which they come. A segment takes
some random time to be added, so that no two processes stay in step.
"""

import dataclasses
import heapq
import random
from typing import Any

_AT_ONCE = 2  # Segments that a process has asked for.


@dataclasses.dataclass
class _Process:
  """What a process has done so far: numbers of segments, and its line.

  Attributes:
    asked: Segments that it has asked for, and has offered to its neighbor.
    added: Segments that it has received and added.
    requests: Requests of its neighbor that have come.
    sent: Segments that it has sent.
    free_s: When its line has sent all that it was given (seconds).
  """

  asked: int = 0
  added: int = 0
  requests: int = 0
  sent: int = 0
  free_s: float = 0.0


class Ring:
  """Processes that each pass segments on to the next one."""

  def __init__(
    self,
    num_processes: int,
    num_segments: int,
    segment_s: float,
    rtt_s: float,
    adding_s: float,
    seed: int,
  ):
    """Starts nothing yet.

    Args:
      num_processes: Number of processes.
      num_segments: Segments that each process sends.
      segment_s: Time of a segment on the line (seconds).
      rtt_s: Round trip (seconds).
      adding_s: Mean of the exponential time until a segment that has come is
        added (seconds).
      seed: Seed of these times.
    """
    self._processes = [_Process() for _ in range(num_processes)]
    self._num_segments = num_segments
    self._segment_s = segment_s
    self._way_s = rtt_s / 2
    self._adding_s = adding_s
    self._random = random.Random(seed)
    self._now_s = 0.0
    self._events: list[tuple[float, int, Any, int]] = []
    self._count = 0

  def run(self) -> float:
    """Returns when the last segment is added (seconds)."""
    for rank in range(len(self._processes)):
      self._at(self._delay_s(), self._ask, rank)
    while self._events:
      self._now_s, _, act, rank = heapq.heappop(self._events)
      act(rank)
    return self._now_s

  def _at(self, time_s: float, act: Any, rank: int) -> None:
    self._count += 1  # Of two events at the same time the older comes first.
    heapq.heappush(self._events, (time_s, self._count, act, rank % self._size))

  @property
  def _size(self) -> int:
    return len(self._processes)

  def _delay_s(self) -> float:
    return self._random.expovariate(1 / self._adding_s)

  def _ask(self, rank: int) -> None:
    one = self._processes[rank]
    while one.asked < min(one.added + _AT_ONCE, self._num_segments):
      one.asked += 1
      leaves_s = max(self._now_s, one.free_s)
      self._at(leaves_s + self._way_s, self._hear, rank - 1)
      self._send(rank)

  def _hear(self, rank: int) -> None:
    self._processes[rank].requests += 1
    self._send(rank)

  def _send(self, rank: int) -> None:
    one = self._processes[rank]
    while one.sent < min(one.asked, one.requests):
      one.sent += 1
      one.free_s = max(self._now_s, one.free_s) + self._segment_s
      self._at(one.free_s + self._way_s, self._receive, rank + 1)

  def _receive(self, rank: int) -> None:
    self._at(self._now_s + self._delay_s(), self._add, rank)

  def _add(self, rank: int) -> None:
    self._processes[rank].added += 1
    self._ask(rank)
