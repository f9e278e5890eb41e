"""Computes the times of a simulated run by formula, without events.

The formula keeps two times for every replica: the time at which the replica has
done its own work (`_now`), and the time at which its last exchange is over
(`_channel`). A collective is a recurrence over its message steps. If replica i
sends to replica i + 1, message step k of replica i ends at

  end[k][i] = start[k][i] + bytes / rate
  start[k + 1][i] = max(end[k][i], end[k][i - 1] + latency)

because a replica sends its next message when it has sent the one before and has
received that of its neighbour. With M = 2 and messages of 0.1 s and 0.3 s both
replicas start step 2 at 0.3 s: replica 0 has to wait for the slow message of
replica 1. Pieces of a message follow the same rule, each after the one before.

The formula is exact if the messages of a step share no link, or if they start
together and share the link evenly, and if no message of one step meets one of
another on a link. In a ring a replica receives from one other only, so none do.
In an all-to-all a replica that is ahead of others sends to one that still
receives from them, and both messages take longer than the formula says. The
event simulation of the tests needs none of these assumptions. The two must
agree wherever the formula is exact.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from dilocox_jax.simulate.interpreter import Interpreter, Work
from dilocox_jax.simulate.link_costs import LinkCosts, MessageStep
from dilocox_jax.simulate.script import Join, Op


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Times, steps and bytes of a simulated run.

  Arrays have shape [M], with one value in seconds for every replica. Points in
  time are counted from the start of the run.

  Attributes:
    busy_until_s: Time at which the replica finished its own work. Its exchanges
      may still be under way then.
    end_s: Time at which the replica finished its own work and its exchanges.
    compute_s: Time that the replica spent in inner steps.
    codec_s: Time that the replica spent encoding and decoding.
    exposed_s: Time that the replica spent waiting for exchanges.
    exchange_s: Time that the replica's exchanges took. An exchange starts when
      it has been launched and the exchange before it has ended.
    num_steps: Number of inner steps of the run.
    sent_bytes: Bytes that one replica put on the wire.
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
  def utilisation(self) -> float:
    """Share of `total_s` spent in inner steps, mean over replicas, 0 to 1."""
    return (
      float(np.mean(self.compute_s)) / self.total_s if self.total_s else 1.0
    )

  @property
  def hidden_s(self) -> np.ndarray:
    """Exchange time during which replicas did not wait (seconds), [M]."""
    return np.maximum(self.exchange_s - self.exposed_s, 0.0)


# Attributes of the clock that are arrays of seconds, [M] or [M, M]. Checkpoints
# save them under these names.
_ARRAYS = (
  "_now",
  "_channel",
  "_compute",
  "_codec",
  "_exposed",
  "_exchange",
  "_worked_s",
  "_last_sent_s",
)


class AnalyticClock(Interpreter[np.ndarray]):
  """Adds up the times of a script, whose ops may come in several calls."""

  def __init__(self, link_costs: LinkCosts, work: Work):
    """Starts the clock at 0 seconds.

    Args:
      link_costs: Cluster and transport.
      work: Seconds of a replica's own work.
    """
    super().__init__(link_costs, work)
    zeros = np.zeros(self.num_replicas)  # Replaced by sums, never written to.
    self._now, self._channel = zeros, zeros
    self._compute, self._codec = zeros, zeros
    self._exposed, self._exchange = zeros, zeros

  def walk(self, ops: Iterable[Op]) -> Outcome:
    """Adds the times of the next ops of the script.

    Args:
      ops: The ops that come next.

    Returns:
      Times, steps and bytes of all ops so far.
    """
    self.interpret(ops)
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
    """Returns the state for `set_state`, as values that JSON can hold."""
    arrays = {name: getattr(self, name).tolist() for name in _ARRAYS}
    exchange_ends = [[*key, end.tolist()] for key, end in self._back.items()]
    return arrays | {
      "_back": exchange_ends,
      "_num_steps": self.num_steps,
      "_sent_bytes": self.sent_bytes,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Sets the clock to a state that `get_state` returned."""
    for name in _ARRAYS:
      setattr(self, name, np.array(state[name]))
    self._back = {tuple(k): np.array(end) for *k, end in state["_back"]}
    self.num_steps = state["_num_steps"]
    self.sent_bytes = state["_sent_bytes"]

  def _take_steps(self, seconds: np.ndarray) -> None:
    self._now = self._now + seconds
    self._compute = self._compute + seconds

  def _run_codec(self, seconds: np.ndarray) -> None:
    self._now = self._now + seconds
    self._codec = self._codec + seconds

  def _free_from(self) -> np.ndarray:
    # A replica can send when its own work and its last exchange are done.
    return np.maximum(self._now, self._channel)

  def _send(
    self,
    step: MessageStep,
    size_bytes: float,
    slow_s: np.ndarray,
    ready: np.ndarray,
    links: LinkCosts,
  ) -> tuple[np.ndarray, np.ndarray]:
    members = links.places
    start = ready[members]
    sending_s = size_bytes / links.rate_bytes_per_s(step.hop, step.is_alone)
    end = start + (sending_s + slow_s)
    came = end + links.latency_s(step.hop)
    if step.sender is not None:
      is_silent = np.arange(len(members)) != step.sender
      end = np.where(is_silent, start, end)
      came = np.where(is_silent, 0.0, came)
    sent, received = ready.copy(), ready.copy()
    sent[members] = end
    received[members] = came[links.neighbours(step.hop)]
    if step.sender is not None:
      received = np.maximum(received, ready)
    return sent, received

  def _later(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.maximum(first, second)

  def _join(self, op: Join) -> None:
    returns = np.isin(np.arange(self.num_replicas), op.returning)
    self._now = np.where(returns, self._now[op.donor], self._now)
    self._channel = np.where(returns, self._channel[op.donor], self._channel)

  def _occupy_channel(self, start: np.ndarray, end: np.ndarray) -> None:
    self._channel = end
    self._exchange = self._exchange + (end - start)

  def _wait(self, exchange_end: np.ndarray) -> None:
    # The wait is 0 for a replica that gets here after the end of the exchange.
    waited_s = np.maximum(exchange_end - self._now, 0.0)
    self._exposed = self._exposed + waited_s
    self._now = self._now + waited_s


def run_time(link_costs: LinkCosts, work: Work, ops: Iterable[Op]) -> Outcome:
  """Computes the times of a whole script by formula.

  Args:
    link_costs: Cluster and transport.
    work: Seconds of a replica's own work.
    ops: The script.
  """
  return AnalyticClock(link_costs, work).walk(ops)
