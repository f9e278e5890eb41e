"""Computes the times of a simulated run by formula, not by simulating events.

The formula keeps two times for every replica: the time at which the replica has
done its own work, and the time at which its last exchange is over. In a ring,
replica i sends to replica i + 1. Its message number k ends at

  end[k][i] = start[k][i] + bytes / rate
  start[k + 1][i] = max(end[k][i], end[k][i - 1] + latency)

because a replica sends its next message when it has sent the one before and has
received the last message of its neighbor. For example, with M = 2, no latency,
and first messages of 0.1 s and 0.3 s, both replicas start their second message
at 0.3 s: replica 0 has to wait for the slow message of replica 1.

The formula is exact under two conditions. First, messages with the same number
share no link, or start together and share it evenly. Second, messages with
different numbers never meet on a link. In a ring the second condition holds. In
an all-to-all they meet if a replica is ahead of others, and then take longer
than the formula says.

The tests compare the formula with a simulation of events, which needs no such
condition (tests/simulate/test_times.py).
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from dilocox_jax.plan.operations import Operation, StoreObject, StoreShares
from dilocox_jax.simulate.link_costs import LinkCosts, MessageStep
from dilocox_jax.simulate.script import Compute, Join, Key, Launch, Op
from dilocox_jax.simulate.transfer import RETRANSMISSION_TIMEOUT_S

# Numbers of requests to a store that follow each other, besides those for
# messages and shares. To decide on the list of messages takes two: for the
# proposal and for the manifest. To agree also takes one for the marks of a
# deletion, unless it is made together with another request.
_DECIDING_REQUESTS = 2
_AGREEING_REQUESTS = 3
# Idle time before the first launch. JSON checkpoints have no infinity.
_NEVER_SENT_S = 1e9
# A connection that was idle for exactly the timeout does not start slowly. The
# small addition keeps it so if rounding makes the idle time a little longer.
_SLOW_AFTER_S = RETRANSMISSION_TIMEOUT_S + 1e-6
# A point in time for every replica: seconds [M]. The event simulation of the
# tests has lists of nodes in their place.
Moment = Any


@dataclasses.dataclass(frozen=True)
class Work:
  """Durations of the work that each replica does without the network.

  Attributes:
    step_s: Duration of one inner step of each replica (seconds), [M].
    codec_s: Time to encode and decode one exchange, together (seconds), [M].
  """

  step_s: np.ndarray
  codec_s: np.ndarray


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Times, steps and bytes of a simulated run.

  Arrays have shape [M], with one value in seconds for every replica. Points in
  time are counted from the start of the run.

  Attributes:
    busy_until_s: Time at which the replica finished its own work. Some of its
      exchanges may end later.
    end_s: Time at which the replica finished its own work and its exchanges.
    compute_s: Time that the replica spent in inner steps.
    codec_s: Time that the replica spent encoding and decoding.
    exposed_s: Time that the replica spent waiting for exchanges.
    exchange_s: Time that the replica's exchanges took together. An exchange
      starts when it has been launched and the exchange before it has ended.
    num_steps: Number of inner steps of the run.
    sent_bytes: Bytes that a replica sends if it is in all exchanges.
  """

  busy_until_s: np.ndarray
  end_s: np.ndarray
  compute_s: np.ndarray
  codec_s: np.ndarray
  exposed_s: np.ndarray
  exchange_s: np.ndarray
  num_steps: int
  sent_bytes: int

  @property
  def now_s(self) -> float:
    """Time at which the last replica finished its own work (seconds)."""
    return float(np.max(self.busy_until_s))

  @property
  def total_s(self) -> float:
    """Time at which all work and all exchanges were finished (seconds)."""
    return float(np.max(self.end_s))

  @property
  def utilization(self) -> float:
    """Share of `total_s` that a replica spends in inner steps, 0 to 1.

    It is the mean over replicas, or 1 if the run takes no time.
    """
    return (
      float(np.mean(self.compute_s)) / self.total_s if self.total_s else 1.0
    )

  @property
  def hidden_s(self) -> np.ndarray:
    """Time of exchanges for which replicas did not wait (seconds), [M]."""
    return np.maximum(self.exchange_s - self.exposed_s, 0.0)


# Attributes of the clock that are arrays of seconds. Checkpoints save them by
# these names.
POINTS_IN_TIME = ("_now", "_channel")  # [M]
SUMS = ("_compute", "_codec", "_exposed", "_exchange", "_worked_s")  # [M]
LAST_SENT = "_last_sent_s"  # [M, M]
_ARRAYS = (*POINTS_IN_TIME, *SUMS, LAST_SENT)


class AnalyticClock:
  """A clock that computes the times of a run by formula.

  `walk` takes the next ops of the run. An op is inner steps, a launch of an
  exchange, a wait for its end, or the return of absent replicas
  (`simulate.script`).

  Attributes:
    link_costs: Cluster and transport.
    work: Durations of the work that each replica does without the network.
    num_steps: Inner steps so far.
    sent_bytes: Bytes so far that a replica sends if it is in all exchanges.
  """

  def __init__(self, link_costs: LinkCosts, work: Work):
    """Starts the clock at 0 seconds."""
    self.link_costs = link_costs
    self.work = work
    self.num_replicas = link_costs.cluster.num_replicas
    self.num_steps = 0
    self.sent_bytes = 0
    # Seconds that each replica has worked so far, [M], and seconds that it had
    # worked when it last sent to each other replica, [M, M]. The difference is
    # taken as the time for which the connection was idle. In fact a transfer
    # may have gone on during a part of this work. So the idle time, and with it
    # slow start, is never too short.
    self._worked_s = np.zeros(self.num_replicas)
    self._last_sent_s = np.full([self.num_replicas] * 2, -_NEVER_SENT_S)
    # When each exchange under way ends, by its key.
    self._exchange_ends: dict[Key, Moment] = {}
    zeros = np.zeros(self.num_replicas)  # Replaced by sums, never written to.
    self._now = zeros
    self._channel = zeros
    self._compute = zeros
    self._codec = zeros
    self._exposed = zeros
    self._exchange = zeros

  def walk(self, ops: Iterable[Op]) -> Outcome:
    """Adds the times of the next ops, and returns the totals so far.

    An op is inner steps, a launch of an exchange, a wait for its end, or the
    return of absent replicas.
    """
    self.interpret(ops)
    return self.outcome()

  def outcome(self) -> Outcome:
    """Returns times, steps and bytes of the run so far."""
    return Outcome(
      busy_until_s=self._now,
      end_s=np.maximum(self._now, self._channel),
      compute_s=self._compute,
      codec_s=self._codec,
      exposed_s=self._exposed,
      exchange_s=self._exchange,
      num_steps=self.num_steps,
      sent_bytes=self.sent_bytes,
    )

  def get_state(self) -> dict[str, Any]:
    """Returns the state of the clock, as JSON values."""
    arrays = {name: getattr(self, name).tolist() for name in _ARRAYS}
    exchange_ends = [
      [*key, end.tolist()] for key, end in self._exchange_ends.items()
    ]
    return arrays | {
      "_exchange_ends": exchange_ends,
      "_num_steps": self.num_steps,
      "_sent_bytes": self.sent_bytes,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Sets the clock to a state that `get_state` returned."""
    for name in _ARRAYS:
      setattr(self, name, np.array(state[name]))
    self._exchange_ends = {
      tuple(key): np.array(end) for *key, end in state["_exchange_ends"]
    }
    self.num_steps = state["_num_steps"]
    self.sent_bytes = state["_sent_bytes"]

  def interpret(self, ops: Iterable[Op]) -> None:
    """Adds the times of ops.

    An op is inner steps, a launch of an exchange, a wait for its end, or the
    return of absent replicas.
    """
    for op in ops:
      if isinstance(op, Compute):
        self._on_compute(op)
      elif isinstance(op, Launch):
        self._on_launch(op)
      elif isinstance(op, Join):
        # Their connections were idle, so the next messages start slowly.
        self._last_sent_s[list(op.returning)] = -_NEVER_SENT_S
        self._join(op)
      else:  # A `Wait`: the other half of the codec's time comes after it.
        self._wait(self._exchange_ends.pop(op.key))
        half_s = self._half_codec_s(op.members)
        self._run_codec(half_s * op.codec_share)

  def _on_compute(self, op: Compute) -> None:
    """Adds the times of inner steps."""
    # `op.num_steps` counts the steps of the run. If a round is cut into several
    # ops, a slow replica may take a step in an op whose `num_steps` is 0.
    count = max(op.num_steps, *op.taken, 0)
    step_s = self.work.step_s
    if op.taken:
      # Times `count` below, this is the time of the replica's own steps.
      step_s = step_s * (np.array(op.taken) / count)
    self._take_steps(count * step_s)
    self._worked_s = self._worked_s + count * step_s
    self.num_steps += op.num_steps

  def _on_launch(self, op: Launch) -> None:
    """Adds the time to encode an exchange, and computes when the exchange ends.

    The replicas go on at once. A later `Wait` makes them wait for the end.
    """
    # Half of the codec's time is spent before the exchange, half after it.
    half_s = self._half_codec_s(op.members)
    self._run_codec(half_s * op.codec_share)
    start = end = self._channel_free_at()
    links = self.link_costs.among(op.members)
    for operation in op.operations:
      end = self._operation(operation, end, links)
      self.sent_bytes += operation.sent_bytes(len(links.members))
    self._exchange_ends[op.key] = end
    self._occupy_channel(start, end)

  def _half_codec_s(self, members: tuple[int, ...] | None) -> np.ndarray:
    """Returns half of each replica's codec time (seconds), [M].

    It is 0 for replicas that do not take part in the exchange.
    """
    ring = self.link_costs.among(members).members
    return self.work.codec_s / 2 * np.isin(range(self.num_replicas), ring)

  def _operation(
    self, operation: Operation, start: Moment, links: LinkCosts
  ) -> Moment:
    """Returns when each replica has sent and received all its messages, [M].

    `start` is the time from which each replica can send (seconds), [M].

    In a ring, a replica passes on a piece of a message when the piece has
    arrived. So a slow link delays the replica that it leads to. One message
    later this replica delays the next one, and so on. In the end all replicas
    are as slow as the slow link. Replicas that do not take part have the time
    in `start`.
    """
    if isinstance(operation, StoreObject):
      return self._through_store(operation.operand_bytes, start, links)
    if isinstance(operation, StoreShares):
      return self._in_shares(operation, start, links)
    members = list(links.members)
    steps = links.steps(operation)
    pieces = steps[0].pieces if steps else 1
    slowness = links.transport.slowness(operation.kind, len(members))
    sent = start
    # When each replica has received each piece of the step before.
    arrived = [start] * pieces
    end = start
    for step in steps:
      slow_s = self._slow_start_s(step, links)
      size_bytes = step.size_bytes / pieces * slowness
      for piece, arrival in enumerate(arrived):
        ready = self._later(sent, arrival) if step.is_relayed else sent
        sent, arrived[piece] = self._send(
          step, size_bytes, slow_s, ready, links
        )
        slow_s = np.zeros(len(members))  # The line is in use now.
      # Later steps do not wait for these messages, so these may arrive last.
      if not step.is_relayed:
        end = functools.reduce(self._later, arrived, end)
    return functools.reduce(self._later, [*arrived, sent], end)

  def _slow_start_s(self, step: MessageStep, links: LinkCosts) -> np.ndarray:
    """Returns the seconds that slow start adds to a step's messages, [N].

    N replicas take part in the exchange. Slow start follows more than 0.2 s of
    idle time on the connection of two replicas. After a long round every step
    of an all-to-all starts slowly, because in each step a replica sends to a
    new receiver; in a ring only the first step does. The step's connections
    count as used afterwards.
    """
    members = links.member_array
    sending = slice(None) if step.sender is None else [step.sender]
    senders = members[sending]
    # `neighbors` gives senders; with the opposite hop these are receivers.
    receivers = members[links.neighbors(-step.hop)][sending]
    worked_s = self._worked_s[senders]
    idle_s = worked_s - self._last_sent_s[senders, receivers]
    self._last_sent_s[senders, receivers] = worked_s  # It is in use again.
    slow_s = np.zeros(len(members))
    is_slow = idle_s > _SLOW_AFTER_S
    if is_slow.any():
      extra_s = links.slow_start_s(step)[sending]
      slow_s[sending] = np.where(is_slow, extra_s, 0.0)
    return slow_s

  def _through_store(
    self, size_bytes: int, start: np.ndarray, links: LinkCosts
  ) -> np.ndarray:
    """Returns when each replica has read all messages from a store.

    A replica writes its message, reads the others as they come, and agrees with
    the other replicas. Pauses between requests for a message that is not there
    yet are not counted.
    """
    request_s = links.store_s(size_bytes).request_s
    done = self._write_and_read(
      size_bytes, size_bytes, start[links.member_array], links
    )
    end = start.copy()
    end[links.member_array] = done + _AGREEING_REQUESTS * request_s
    return end

  def _in_shares(
    self, operation: StoreShares, start: np.ndarray, links: LinkCosts
  ) -> np.ndarray:
    """Returns when each replica has read all shares of a mean (seconds), [M].

    Each of N messages in a store is cut into N slices. Replica i writes its
    message, reads slice i of each other message, and agrees with the others on
    the messages that count. Then it writes the mean of its slices, its *share*,
    and what the share's encoding has lost (the residual), and reads the other
    shares.
    """
    num_members = len(links.members)
    slice_bytes = -(-operation.operand_bytes // num_members)
    residual_bytes = -(-operation.residual_bytes // num_members)
    request_s = links.store_s(slice_bytes).request_s
    agreed = self._write_and_read(
      operation.operand_bytes, slice_bytes, start[links.member_array], links
    )
    # The marks of a deletion are read while the share is written.
    agreed += _DECIDING_REQUESTS * request_s
    end = start.copy()
    end[links.member_array] = self._write_and_read(
      slice_bytes + residual_bytes, slice_bytes, agreed, links
    )
    return end

  def _write_and_read(
    self,
    written_bytes: int,
    read_bytes: int,
    start: np.ndarray,
    links: LinkCosts,
  ) -> np.ndarray:
    """Returns when every member has read an object of each other member.

    Members are the replicas that take part in the exchange. A member makes its
    reading requests all at once, so they take one round trip together. The
    contents follow each other on its link.

    Args:
      written_bytes: Size of the object that a member writes (bytes).
      read_bytes: Bytes that a member reads of each other object.
      start: When each member begins to write (seconds), [number of members].
      links: The links of the members.
    """
    written = start + links.store_s(written_bytes).write_s
    reading = links.store_s(read_bytes)
    # When each member is done so far, [number of members]. First its requests
    # are answered.
    done = written + reading.slow_read_s + reading.request_s
    places = np.arange(len(written))
    # All members read the objects in the order in which these were written.
    for place in np.argsort(written, kind="stable"):
      available = written[place] + reading.request_s
      # The time of a read without that of its request is left for the content.
      has_read = (
        np.maximum(done, available) + reading.read_s - reading.request_s
      )
      # The member that wrote the object does not read it.
      done = np.where(places == place, done, has_read)
    return done

  def _take_steps(self, seconds: np.ndarray) -> None:
    """Adds the seconds of inner steps to each replica's time, [M]."""
    self._now = self._now + seconds
    self._compute = self._compute + seconds

  def _run_codec(self, seconds: np.ndarray) -> None:
    """Adds the time of encoding or decoding to each replica's time."""
    self._now = self._now + seconds
    self._codec = self._codec + seconds

  def _channel_free_at(self) -> np.ndarray:
    """Returns when each replica has ended its work and last exchange, [M]."""
    return np.maximum(self._now, self._channel)

  def _send(
    self,
    step: MessageStep,
    size_bytes: float,
    slow_s: np.ndarray,
    ready: np.ndarray,
    links: LinkCosts,
  ) -> tuple[np.ndarray, np.ndarray]:
    """Computes when a piece of each member's message is sent and received.

    Of the [M] replicas of the cluster, the [N] members send to each other.

    Args:
      step: The message step, with hop and sender of its messages.
      size_bytes: Size of each piece (bytes).
      slow_s: Time that slow start adds to each member's piece (seconds), [N].
      ready: Time from which each replica can send its piece (seconds), [M].
      links: Costs of messages among the members.

    Returns:
      When each replica has sent its piece, and when it has received one
      (seconds), [M] each. Without a piece, it is the time in `ready`.
    """
    members = links.member_array
    start = ready[members]
    is_alone = step.sender is not None
    sending_s = size_bytes / links.rate_bytes_per_s(step.hop, is_alone)
    wait_s, way_s = links.waits_s(step, size_bytes)
    end = start + (sending_s + slow_s + wait_s)
    came = end + way_s
    if step.sender is not None:
      is_silent = np.arange(len(members)) != step.sender
      # Nothing comes from a silent replica: its receiver keeps `ready` below.
      end = np.where(is_silent, start, end)
      came = np.where(is_silent, -np.inf, came)
    sent = ready.copy()
    received = ready.copy()
    sent[members] = end
    received[members] = came[links.neighbors(step.hop)]
    if step.sender is not None:
      received = np.maximum(received, ready)
    return sent, received

  def _later(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the later of two times, for each replica (seconds), [M]."""
    return np.maximum(first, second)

  def _join(self, op: Join) -> None:
    """Sets the times of returning replicas to those of their source replica."""
    returns = np.isin(np.arange(self.num_replicas), op.returning)
    self._now = np.where(returns, self._now[op.source_replica], self._now)
    self._channel = np.where(
      returns, self._channel[op.source_replica], self._channel
    )

  def _occupy_channel(self, start: np.ndarray, end: np.ndarray) -> None:
    """Makes each replica's network busy until `end`, and counts the time."""
    self._channel = end
    self._exchange = self._exchange + (end - start)

  def _wait(self, exchange_end: np.ndarray) -> None:
    """Makes each replica wait until the time `exchange_end` (seconds), [M]."""
    # The wait is 0 for a replica that gets here after the end of the exchange.
    waited_s = np.maximum(exchange_end - self._now, 0.0)
    self._exposed = self._exposed + waited_s
    self._now = self._now + waited_s


def run_time(link_costs: LinkCosts, work: Work, ops: Iterable[Op]) -> Outcome:
  """Computes the times, steps and bytes of a whole run by formula.

  Args:
    link_costs: Cluster and transport.
    work: Durations of the work that each replica does without the network.
    ops: The run as a sequence of inner steps, exchanges and waits
      (`simulate.script`).
  """
  return AnalyticClock(link_costs, work).walk(ops)
