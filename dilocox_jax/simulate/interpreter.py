"""Goes through a script and says what costs time, but not how much.

A script knows three verbs: compute, launch, wait. They are read here: the codec
is charged before and after an exchange, a collective is split into message
steps, idle connections pay for slow start, steps and bytes are counted. A
subclass adds up the times: `AnalyticClock` by formula, and in the tests an
event simulation that only knows what waits for what. Their agreement (1e-9 in
tests/simulate/test_times.py) tests the formula, the dependencies and the
sharing of links, but not this file, which has tests of its own.
"""

import abc
import dataclasses
import functools
from collections.abc import Iterable
from typing import Generic, TypeVar

import numpy as np

from dilocox_jax.plan.collective import Collective
from dilocox_jax.simulate.link_costs import LinkCosts, MessageStep
from dilocox_jax.simulate.script import Compute, Join, Key, Launch, Op
from dilocox_jax.simulate.transfer import RETRANSMISSION_TIMEOUT_S


@dataclasses.dataclass(frozen=True)
class Work:
  """Durations of the work that a replica does without the network.

  Attributes:
    step_s: Duration of one inner step of each replica (seconds), [M].
    codec_s: Time that each replica needs to encode and decode one exchange
      (seconds), [M]. It is the sum of both.
  """

  step_s: np.ndarray
  codec_s: np.ndarray


# Idle time before the first launch. JSON checkpoints have no infinity.
_NEVER_SENT_S = 1e9

# A moment in the life of every replica: times [M] for the formula.
Moment = TypeVar("Moment")


class Interpreter(abc.ABC, Generic[Moment]):
  """Reads ops and calls one method for each thing that takes time.

  Attributes:
    link_costs: Cluster and transport.
    work: Seconds of a replica's own work.
    num_steps: Inner steps so far.
    sent_bytes: Bytes that one replica has put on the wire so far.
  """

  def __init__(self, link_costs: LinkCosts, work: Work):
    """Starts before the first op.

    Args:
      link_costs: Cluster and transport.
      work: Seconds of a replica's own work.
    """
    self.link_costs, self.work = link_costs, work
    self.num_replicas = link_costs.cluster.num_replicas
    self.num_steps, self.sent_bytes = 0, 0
    # How long each replica has worked, [M], and how long it had when it last
    # sent to each other one, [M, M] (seconds). A connection was idle in
    # between. A transfer that goes on behind those steps would shorten the idle
    # time, so the cost of slow start is never too low.
    self._worked_s = np.zeros(self.num_replicas)
    self._last_sent_s = np.full([self.num_replicas] * 2, -_NEVER_SENT_S)
    # When each exchange that is under way ends, by the key of the exchange.
    self._back: dict[Key, Moment] = {}

  def interpret(self, ops: Iterable[Op]) -> None:
    """Goes through more of a script.

    Args:
      ops: The ops that come next.
    """
    for op in ops:
      if isinstance(op, Compute):
        self._on_compute(op)
      elif isinstance(op, Launch):
        self._on_launch(op)
      elif isinstance(op, Join):
        self._last_sent_s[list(op.returning)] = -_NEVER_SENT_S
        self._join(op)
      else:
        self._wait(self._back.pop(op.key))
        half_s = self._half_codec_s(op.members)
        self._run_codec(half_s * op.codec_share)

  def _on_compute(self, op: Compute) -> None:
    # A stretch in which only slow replicas have a step has none of the run's.
    count, step_s = max(op.num_steps, *op.taken, 0), self.work.step_s
    if op.taken:
      step_s = step_s * (np.array(op.taken) / count)
    self._take_steps(count * step_s)
    self._worked_s = self._worked_s + count * step_s
    self.num_steps += op.num_steps

  def _on_launch(self, op: Launch) -> None:
    # Half of the codec's time is spent before the exchange, half after it.
    half_s = self._half_codec_s(op.members)
    self._run_codec(half_s * op.codec_share)
    # A replica can send when its own work and its last exchange are done.
    start = end = self._free_from()
    links = self.link_costs.among(op.members)
    for collective in op.operations:
      end = self._collective(collective, end, links)
      self.sent_bytes += collective.sent_bytes(len(links.members))
    self._back[op.key] = end
    self._occupy_channel(start, end)

  def _half_codec_s(self, members: tuple[int, ...] | None) -> np.ndarray:
    """Returns half of the codec's time; none for who is not in the ring."""
    return self.work.codec_s / 2 * self.link_costs.among(members).is_member

  def _collective(
    self, collective: Collective, start: Moment, links: LinkCosts
  ) -> Moment:
    """Returns when every replica has sent and received all its messages.

    Ring all-reduce of M = 4: each replica sends 2 (M - 1) = 6 messages of a
    quarter of the operand to its right neighbour. Replica 2 sends a piece of
    its third message when it has sent the piece before and has received that
    piece of replica 1's second message. The slowest link thus delays its right
    neighbour by one step, the next one by two, until all move at its pace.
    """
    members, pieces = list(links.members), links.transport.pieces
    steps = links.steps(collective)
    slowness = links.transport.slowness(collective.kind, len(members))
    warm_s = np.zeros(len(members))
    sent, arrived, end = start, [start] * pieces, start
    for step in steps:
      slow_s = self._slow_start_s(step, links)
      size_bytes = step.size_bytes / pieces * slowness
      for piece, came in enumerate(arrived):
        ready = self._later(sent, came) if step.is_relayed else sent
        sent, arrived[piece] = self._send(
          step, size_bytes, slow_s, ready, links
        )
        slow_s = warm_s  # The line is in use now.
      if not step.is_relayed:
        end = functools.reduce(self._later, arrived, end)
    return functools.reduce(self._later, [*arrived, sent], end)

  def _slow_start_s(self, step: MessageStep, links: LinkCosts) -> np.ndarray:
    """Returns what slow start adds to each message of a step, [M] (seconds).

    A connection that was idle for long starts with a small window again. There
    is one for every pair of replicas. So in an all-to-all, each of whose steps
    has other receivers, every step starts slowly after a long round, and in a
    ring the first one alone.
    """
    members = links.places
    sending = slice(None) if step.sender is None else [step.sender]
    senders = members[sending]
    receivers = members[links.neighbours(-step.hop)][sending]
    worked_s = self._worked_s[senders]
    idle_s = worked_s - self._last_sent_s[senders, receivers]
    self._last_sent_s[senders, receivers] = worked_s  # It is in use again.
    slow_s, is_slow = np.zeros(len(members)), idle_s > RETRANSMISSION_TIMEOUT_S
    if is_slow.any():
      extra_s = links.slow_start_s(step)[sending]
      slow_s[sending] = np.where(is_slow, extra_s, 0.0)
    return slow_s

  @abc.abstractmethod
  def _take_steps(self, seconds: np.ndarray) -> None:
    """Lets the replicas take inner steps, for so many seconds each, [M]."""

  @abc.abstractmethod
  def _run_codec(self, seconds: np.ndarray) -> None:
    """Lets the replicas encode or decode, for so many seconds each, [M]."""

  @abc.abstractmethod
  def _free_from(self) -> Moment:
    """Returns when the replicas are ready and their channels are free."""

  @abc.abstractmethod
  def _send(
    self,
    step: MessageStep,
    size_bytes: float,
    slow_s: np.ndarray,
    ready: Moment,
    links: LinkCosts,
  ) -> tuple[Moment, Moment]:
    """Lets every replica of a ring send a piece of a message and receive one.

    Args:
      step: The message step, which says which replica sends to which.
      size_bytes: Bytes of each replica's piece.
      slow_s: Seconds that slow start adds to each piece, [M].
      ready: When each replica may start to send.
      links: Costs of the ring. Slow starts are in its order.

    Returns:
      When each replica has sent its piece, and when it has received one. Who
      does not send, or does not receive, is where it was.
    """

  @abc.abstractmethod
  def _later(self, first: Moment, second: Moment) -> Moment:
    """Returns the later of two moments for each replica."""

  @abc.abstractmethod
  def _join(self, op: Join) -> None:
    """Brings replicas that were away to the time of the one they copy."""

  @abc.abstractmethod
  def _occupy_channel(self, start: Moment, end: Moment) -> None:
    """Marks the channels as occupied from `start` to `end`."""

  @abc.abstractmethod
  def _wait(self, exchange_end: Moment) -> None:
    """Lets the replicas wait until an exchange has ended.

    Args:
      exchange_end: When the exchange ends for each replica. A replica that
        reaches this op later does not wait.
    """
