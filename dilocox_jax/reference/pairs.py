"""Averages in pairs, as plain loops: each replica has outer parameters.

NoLoCo (arXiv 2506.10911) averages over pairs that are drawn anew for each
exchange. No message goes to all replicas, so outer parameters differ, and the
two of a pair are averaged too. Fast: aggregators/pairs.py.

One dimension, outer learning rate 1: the pair has the outer parameters 10 and
12, and has trained to 9 and 10. The mean of the pair's inner parameters is 9.5.
The gradients are 10 - 9.5 = 0.5 and 12 - 9.5 = 2.5, and both go on at 9.5.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dilocox_jax.reference.exchanges import Arrays


def train_in_pairs(
  loss_and_gradient: Callable[[Arrays, Any], tuple[float, Arrays]],
  params: Arrays,
  batches: Sequence[Sequence[Any]],
  *,
  sync_interval: int,
  inner: Sequence[Any],
  outer: Sequence[Any],
  partners_of: Callable[[int], Sequence[int]],
  averages_parameters: bool = True,
) -> list[Arrays]:
  """Trains replicas that average with one other replica at a time.

  Args:
    loss_and_gradient: The model and its loss.
    params: Where training starts.
    batches: Batches by replica and step.
    sync_interval: Inner steps between two exchanges, H.
    inner: Optimizer of each replica.
    outer: Outer optimizer of each replica.
    partners_of: Function from the number of an exchange to the partner of each
      replica; one that waits is its own partner.
    averages_parameters: Whether a pair averages its outer parameters too.

  Returns:
    The outer parameters of each replica.
  """
  theta = [dict(params) for _ in batches]
  for start in range(0, len(batches[0]), sync_interval):
    trained = []
    for m, own in enumerate(batches):
      w = dict(theta[m])
      for batch in own[start : start + sync_interval]:
        _, gradient = loss_and_gradient(w, batch)
        w = inner[m].step(w, gradient)
      trained.append(w)
    partners = partners_of(start // sync_interval)
    gradients = []
    for m, partner in enumerate(partners):
      gradient = {}
      for name in params:
        ahead = theta[m][name] - trained[m][name]
        others = theta[partner][name] - trained[partner][name]
        gradient[name] = (ahead + others) / 2
        if averages_parameters:
          apart = theta[m][name] - theta[partner][name]
          gradient[name] = gradient[name] + apart / 2
      gradients.append(gradient)
    theta = [
      outer[m].step(theta[m], gradient) for m, gradient in enumerate(gradients)
    ]
  return theta
