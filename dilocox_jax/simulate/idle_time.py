"""How long replicas have sent nothing, as far as a script tells.

Both paths of the simulator ask here which launches pay for slow start. What
counts are inner steps since the last launch, jitter left out: a transfer that
went on behind them would make the silence shorter, so nothing is left unpaid.
"""

import numpy as np

from dilocox_jax.simulate.transfer import RETRANSMISSION_TIMEOUT_S

_EVER_S = 1e9  # Before the first launch; a state in JSON knows no infinity.


class IdleTime:
  """Seconds since every replica's last launch.

  Attributes:
    seconds: Of inner steps, [M].
  """

  def __init__(self, num_replicas: int):
    """Nothing was ever sent.

    Args:
      num_replicas: M.
    """
    self.seconds = np.full(num_replicas, _EVER_S)

  def last(self, seconds: np.ndarray) -> None:
    """Inner steps are taken.

    Args:
      seconds: Of them, [M].
    """
    self.seconds = self.seconds + seconds

  def end(self) -> np.ndarray:
    """Something is launched.

    Returns:
      Whether connections have to start anew, [M].
    """
    was_long = self.seconds > RETRANSMISSION_TIMEOUT_S
    self.seconds = np.zeros_like(self.seconds)
    return was_long
