"""Times by formula: replicas in step, no events.

Every replica has a clock and a channel; a collective is a recurrence over its
rounds, in which a message leaves when the one before it has left and arrived.
That is exact where the messages of a round share no link, or share it evenly
and in step. The engine needs no such assumption and must agree wherever both
apply.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from dilocox_jax.plan.wire.collectives import Collective
from dilocox_jax.simulate.idle_time import IdleTime
from dilocox_jax.simulate.link_costs import LinkCosts, message_steps
from dilocox_jax.simulate.noise import Noise
from dilocox_jax.simulate.outcome import Outcome, Work
from dilocox_jax.simulate.script import Compute, Key, Launch, Op, Wait

_ARRAYS = (
  "_now",
  "_channel",
  "_compute",
  "_codec",
  "_exposed",
  "_exchange",
)


class AnalyticClock:
  """Walks a script; ask it at any time where the run stands."""

  def __init__(self, link_costs: LinkCosts, work: Work):
    """Starts at zero.

    Args:
      link_costs: Cluster and transport.
      work: Seconds of a replica's own work.
    """
    self._link_costs, self._work = link_costs, work
    self._num_replicas = link_costs.cluster.num_replicas
    self._noise = Noise(link_costs.cluster.jitter, self._num_replicas)
    self._now, self._channel = self._zeros(), self._zeros()
    self._idle_time = IdleTime(self._num_replicas)
    self._back: dict[Key, np.ndarray] = {}
    self._compute, self._codec = self._zeros(), self._zeros()
    self._exposed, self._exchange = self._zeros(), self._zeros()
    self._num_steps, self._sent_bytes = 0, 0

  def walk(self, ops: Iterable[Op]) -> Outcome:
    """Goes through more of the script.

    Args:
      ops: What follows.

    Returns:
      Where the run stands afterwards.
    """
    for op in ops:
      if isinstance(op, Compute):
        self._take_steps(op)
      elif isinstance(op, Launch):
        self._launch(op)
      else:
        self._wait(op)
    return Outcome(
      busy_until_s=self._now.copy(),
      end_s=np.maximum(self._now, self._channel),
      compute_s=self._compute.copy(),
      codec_s=self._codec.copy(),
      exposed_s=self._exposed.copy(),
      exchange_s=self._exchange.copy(),
      num_steps=self._num_steps,
      sent_bytes=self._sent_bytes,
    )

  def get_state(self) -> dict[str, Any]:
    """Everything it knows, as plain values."""
    arrays = {name: getattr(self, name).tolist() for name in _ARRAYS}
    back = [[*key, end.tolist()] for key, end in self._back.items()]
    return arrays | {
      "_back": back,
      "_num_steps": self._num_steps,
      "_sent_bytes": self._sent_bytes,
      "silence": self._idle_time.seconds.tolist(),
      "noise": self._noise.get_state(),
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from `get_state`."""
    for name in _ARRAYS:
      setattr(self, name, np.array(state[name]))
    self._back = {tuple(k): np.array(end) for *k, end in state["_back"]}
    self._num_steps = state["_num_steps"]
    self._sent_bytes = state["_sent_bytes"]
    self._idle_time.seconds = np.array(state["silence"])
    self._noise.set_state(state["noise"])

  def _zeros(self) -> np.ndarray:
    return np.zeros(self._num_replicas)

  def _take_steps(self, op: Compute) -> None:
    taken_s = self._noise.steps(op.num_steps) * self._work.step_s
    if op.is_alone:
      taken_s[1:] = 0.0
    self._now = self._now + taken_s
    self._compute = self._compute + taken_s
    self._idle_time.last(op.num_steps * self._work.step_s)
    self._num_steps += op.num_steps

  def _launch(self, op: Launch) -> None:
    self._spend_on_codec()
    start = np.maximum(self._now, self._channel)
    end, starts_anew = start, self._idle_time.end()
    for operation in op.operations:
      end = self._collective(operation, end, starts_anew)
      starts_anew = np.zeros_like(starts_anew)
      self._sent_bytes += operation.sent_bytes(self._num_replicas)
    self._channel = end
    self._back[op.key] = end
    self._exchange = self._exchange + (end - start)

  def _wait(self, op: Wait) -> None:
    waited_s = np.maximum(self._back.pop(op.key) - self._now, 0.0)
    self._exposed = self._exposed + waited_s
    self._now = self._now + waited_s
    self._spend_on_codec()

  def _spend_on_codec(self) -> None:
    # Half before the exchange, half after it.
    self._now = self._now + self._work.codec_s / 2
    self._codec = self._codec + self._work.codec_s / 2

  def _collective(
    self, operation: Collective, start: np.ndarray, starts_anew: np.ndarray
  ) -> np.ndarray:
    """When each replica has sent and received all of a collective."""
    todo = message_steps(operation, self._num_replicas)
    factors = self._noise.transfers(len(todo))
    for number, (each, factor) in enumerate(zip(todo, factors, strict=True)):
      hop = self._link_costs.hop(each.hop)
      took_s = each.size_bytes * factor / hop.rate_bytes_per_s + hop.latency_s
      if number == 0 and starts_anew.any():
        slow_s = self._link_costs.slow_start_s(each)
        took_s = took_s + np.where(starts_anew, slow_s, 0.0)
      end = start + took_s
      if each.sender is not None:
        silent = np.arange(self._num_replicas) != each.sender
        end = np.where(silent, start, end)
      start = np.maximum(end, np.roll(end, each.hop))
    return start


def run_time(link_costs: LinkCosts, work: Work, ops: Iterable[Op]) -> Outcome:
  """The cost of a script.

  Args:
    link_costs: Cluster and transport.
    work: Seconds of a replica's own work.
    ops: The script.
  """
  return AnalyticClock(link_costs, work).walk(ops)
