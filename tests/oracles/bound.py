"""A bound on how slowly a delayed, compressed method converges.

Replica m has a quadratic loss whose minimum all replicas share. Then its H
inner steps of rate eta turn a distance x to the minimum into (I - eta A_m)^H x,
so its pseudo-gradient is linear in x:

    Delta_m = B_m x        with        B_m = I - (I - eta A_m)^H

The mean B of the B_m is the Hessian of f(x) = x' B x / 2, and averaging is one
gradient step on f. L is the largest eigenvalue of B. Let theta_t be the outer
parameters at round t, gamma the outer rate, and let x_t be where they would be
without delay and without loss: x_{t+1} = x_t - gamma Delta_t. The codec and its
residual leave theta_t behind by gamma (Delta_{t-1} + e_t), if the delay is one
round. A codec that loses at most a share omega of what it is given,

    |C(v) - v| <= omega |v|,

leaves residuals with sum |e_t|^2 <= (omega / (1 - omega))^2 sum |Delta_m|^2. So
theta is behind x by at most gamma K times the root of that sum, where

    K = delay + sqrt(kappa) omega / (1 - omega),

and kappa >= 1 says how much larger the replicas' pseudo-gradients are than
their mean: mean |B_m x|^2 <= kappa |B x|^2. As f has smoothness L, every step
lowers f(x_t), except for what the distance to theta costs. Summed up to any t:

    (1 - gamma L - (gamma L K)^2) sum |Delta_s|^2 <= 2 f(x_0) / gamma

DiLoCoX (arXiv 2506.21263) bounds the same quantities, with noise and for any
smooth loss; this derivation is ours. Without noise the sum stays finite, so
the mean of |Delta|^2 over T rounds falls as 1 / T.
"""

import math


def bound_on_pseudo_gradients(
  initial_loss: float,
  smoothness: float,
  outer_rate: float,
  *,
  omega: float,
  delay_rounds: int,
  dissimilarity: float = 1.0,
) -> float:
  """Bounds the sum of |Delta_t|^2 over all rounds, however many there are.

  Args:
    initial_loss: f(x_0) = x_0' B x_0 / 2.
    smoothness: L, the largest eigenvalue of B.
    outer_rate: gamma, the rate of plain gradient descent outside.
    omega: Largest share of a message that the codec loses, less than 1.
    delay_rounds: Rounds by which an average comes late: 0 or 1.
    dissimilarity: kappa.

  Returns:
    The bound; infinity where the outer rate is too high for any.
  """
  residual = math.sqrt(dissimilarity) * omega / (1 - omega)
  scaled = outer_rate * smoothness
  remaining = 1 - scaled - (scaled * (delay_rounds + residual)) ** 2
  if remaining <= 0:
    return math.inf
  return 2 * initial_loss / (outer_rate * remaining)
