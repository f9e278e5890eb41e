"""How long replicas have sent nothing, which decides who pays for slow start.

A TCP connection that was idle for longer than its retransmission timeout (at
least 0.2 s) starts with a small window again. Idle time is counted in inner
steps since the last launch, without jitter. A transfer that goes on behind
those steps would shorten it, so the cost of slow start is never too low.

Example, steps of 0.05 s and H = 10: 0.5 s lie between two launches, so every
exchange starts slowly. With an exchange after every step (0.05 s) only the
first one does.
"""

import numpy as np

from dilocox_jax.simulate.transfer import RETRANSMISSION_TIMEOUT_S

# Idle time before the first launch. JSON checkpoints have no infinity.
_NEVER_SENT_S = 1e9


class IdleTime:
  """Seconds since every replica's last launch.

  Attributes:
    seconds: Duration of the inner steps since then, [M].
  """

  def __init__(self, num_replicas: int):
    """Starts with replicas that have never sent anything.

    Args:
      num_replicas: M.
    """
    self.seconds = np.full(num_replicas, _NEVER_SENT_S)

  def add(self, seconds: np.ndarray) -> None:
    """Counts inner steps.

    Args:
      seconds: Their duration, [M].
    """
    self.seconds = self.seconds + seconds

  def end(self) -> np.ndarray:
    """Ends the idle time, since something is launched.

    Returns:
      Whether the replica's connections start slowly, [M] booleans.
    """
    was_long = self.seconds > RETRANSMISSION_TIMEOUT_S
    self.seconds = np.zeros_like(self.seconds)
    return was_long
