"""Leaves out a message that is finite and yet far too large.

A replica with a broken device can send values that are wrong and finite. Its
message is left out if its norm is more than a multiple of what is usual: the
running median of the norms that were accepted. So that a change of all replicas
at once (a new learning rate) does not stop the run, the median of the messages
of the moment counts as usual too, if it is higher.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

KEPT = 6  # Accepted norms behind the running median: a few events.


def norm_of(arrays: Sequence[np.ndarray]) -> float:
  """Returns the Euclidean norm of all floating-point values together."""
  squares = 0.0
  for array in arrays:
    if array.dtype.kind == "V":  # The short floats of `ml_dtypes`.
      array = array.astype(np.float32)
    if array.dtype.kind == "f":
      flat = array.reshape(-1)
      # The sum is in float64, and makes no copy in float64.
      squares += float(np.einsum("i,i->", flat, flat, dtype=np.float64))
  return math.sqrt(squares) if squares >= 0 else math.nan


def too_large(
  norms: Mapping[str, float], accepted: Sequence[float], max_ratio: float
) -> dict[str, str]:
  """Returns the messages to leave out, each with the reason.

  Args:
    norms: Norms of the messages of a turn, by replica.
    accepted: Norms that were accepted before, the oldest first.
    max_ratio: How many times the usual norm a message may have.
  """
  finite = [norm for norm in norms.values() if math.isfinite(norm)]
  usual = [statistics.median_low(accepted[-KEPT:])] if accepted else []
  if len(finite) > 1 or not usual:
    usual += [statistics.median_low(finite)] if finite else []
  limit = max_ratio * max(usual, default=0.0)
  reasons = {}
  for replica, norm in norms.items():
    if not math.isfinite(norm):
      reasons[replica] = "its values are not finite"
    elif norm > limit:
      reasons[replica] = (
        f"its norm {norm:.3g} is over {max_ratio:g} times the usual"
        f" {max(usual):.3g}"
      )
  return reasons
