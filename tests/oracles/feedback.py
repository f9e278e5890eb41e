"""Error feedback around any lossy function, one replica after the other.

sent_m = C(d_m + e_m); e_m <- decay (d_m + e_m - R) with R = sent_m ("own") or
the mean of what was sent ("mean"). A replica that is not finite is as if it
had not been there, and owes nothing afterwards.
"""

import numpy as np


def simulate(rounds, lossy, *, decay=1.0, against="own"):
  """Runs exchanges in a row.

  Args:
    rounds: For every exchange the replicas' values, arrays [M, N].
    lossy: From values [N] to what is received of them [N].
    decay: Share of the residual that is kept.
    against: "own" or "mean".

  Returns:
    For every exchange (mean [N], residuals [M, N]).
  """
  residuals = np.zeros(np.shape(rounds[0]))
  seen = []
  for values in np.asarray(rounds, np.float64):
    wanted, received = {}, {}
    for m, (value, residual) in enumerate(zip(values, residuals, strict=True)):
      if np.isfinite(value).all():
        wanted[m] = value + residual
        received[m] = lossy(wanted[m])
    mean = np.zeros(values.shape[1])
    for sent in received.values():
      mean += sent / len(received)
    residuals = np.zeros(values.shape)
    for m, want in wanted.items():
      reference = received[m] if against == "own" else mean
      residuals[m] = decay * (want - reference)
    seen.append((mean, residuals))
  return seen
