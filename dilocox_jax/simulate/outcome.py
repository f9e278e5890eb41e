"""What a simulated run cost; both paths of the simulator report it so."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Work:
  """How long a replica's own work takes, [M] seconds each.

  Attributes:
    step_s: Duration of an inner step.
    codec_s: Duration of encoding and decoding one exchange, together.
  """

  step_s: np.ndarray
  codec_s: np.ndarray


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Where the time of a run went; seconds of every replica, [M].

  Attributes:
    busy_until_s: When the replica had done its own work. Exchanges may still
      be under way.
    end_s: When its exchanges had ended, too.
    compute_s: Time in inner steps.
    codec_s: Time of encoding and decoding.
    exposed_s: Time of waiting for exchanges.
    exchange_s: Time that exchanges took. An exchange starts when it is
      launched and the one before it has ended.
    num_steps: Inner steps of the run.
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
    """When the last replica had done its own work (seconds)."""
    return float(np.max(self.busy_until_s))

  @property
  def total_s(self) -> float:
    """When the last replica and the last exchange had ended (seconds)."""
    return float(np.max(self.end_s))

  @property
  def utilisation(self) -> float:
    """Share of the run in which replicas took inner steps, 0 to 1."""
    return (
      float(np.mean(self.compute_s)) / self.total_s if self.total_s else 1.0
    )

  @property
  def hidden_s(self) -> np.ndarray:
    """Exchange time in which replicas did something else, [M] seconds."""
    return np.maximum(self.exchange_s - self.exposed_s, 0.0)
