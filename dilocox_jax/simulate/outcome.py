"""What a simulated run cost, in the terms in which both paths report it."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Work:
  """How long a replica's own work takes; [M] seconds each.

  Attributes:
    step_s: An inner step.
    codec_s: Encoding and decoding around an exchange, on the devices.
  """

  step_s: np.ndarray
  codec_s: np.ndarray


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Where the time of a run went; seconds of every replica, [M].

  Attributes:
    busy_until_s: When it had done its own part; exchanges may be under way.
    end_s: When it had finished everything.
    compute_s: Inner steps.
    codec_s: Encoding and decoding.
    exposed_s: Waiting for exchanges.
    exchange_s: Length of the exchanges, from launch or channel free to end.
    num_steps: Inner steps of the run.
    sent_bytes: What a replica put on the wire.
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
    """When the last replica had done its own part."""
    return float(np.max(self.busy_until_s))

  @property
  def total_s(self) -> float:
    """When the last replica had finished."""
    return float(np.max(self.end_s))

  @property
  def utilisation(self) -> float:
    """Share of the run in which replicas took inner steps."""
    return (
      float(np.mean(self.compute_s)) / self.total_s if self.total_s else 1.0
    )

  @property
  def hidden_s(self) -> np.ndarray:
    """Exchange time behind which replicas did something else."""
    return np.maximum(self.exchange_s - self.exposed_s, 0.0)
