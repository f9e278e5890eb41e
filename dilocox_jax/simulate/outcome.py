"""Defines the result of a simulation: where the time of a run went."""

import dataclasses

import numpy as np


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
