"""Trains replicas that average in pairs, as in NoLoCo (arXiv 2506.10911).

For each exchange, the replicas are divided into new pairs. So each replica has
outer parameters of its own, and a pair also averages its outer parameters. The
fast code is in aggregators/pairs.py.

Example in one dimension, with outer learning rate 1: the two replicas of a pair
have the outer parameters 10 and 12, and have trained to 9 and 10. The mean of
their pseudo-gradients is ((10 - 9) + (12 - 10)) / 2 = 1.5. To average the outer
parameters, too, half of their difference is added: the gradients are
1.5 + (10 - 12) / 2 = 0.5 and 1.5 + (12 - 10) / 2 = 2.5. So the new outer
parameters are 10 - 0.5 = 9.5 and 12 - 2.5 = 9.5.
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
  """Trains replicas that exchange with one other replica at a time.

  Args:
    loss_and_gradient: Function (params, batch) -> (loss, gradients).
    params: First parameters of every replica.
    batches: Batches by replica and step, [M][num_steps].
    sync_interval: Number of inner steps between two exchanges, H.
    inner: Inner optimizer of each replica (`reference.optimizers`). Its state
      changes in place.
    outer: Outer optimizer of each replica. Its state changes in place, too.
    partners_of: Function from the number of an exchange, from 0, to the partner
      of each replica. A replica that is left over is its own partner.
    averages_parameters: Whether a pair averages its outer parameters too.

  Returns:
    The outer parameters of each replica.
  """
  theta = [dict(params) for _ in batches]
  for start in range(0, len(batches[0]), sync_interval):
    trained = []
    for m, replica_batches in enumerate(batches):
      w = dict(theta[m])
      for batch in replica_batches[start : start + sync_interval]:
        _, gradient = loss_and_gradient(w, batch)
        w = inner[m].step(w, gradient)
      trained.append(w)
    partners = partners_of(start // sync_interval)
    gradients = []
    for m, partner in enumerate(partners):
      gradient = {}
      for name in params:
        own_delta = theta[m][name] - trained[m][name]
        partner_delta = theta[partner][name] - trained[partner][name]
        gradient[name] = (own_delta + partner_delta) / 2
        # An optimizer subtracts its gradient. So with learning rate 1, half the
        # difference moves both outer parameters to their mean.
        if averages_parameters:
          difference = theta[m][name] - theta[partner][name]
          gradient[name] = gradient[name] + difference / 2
      gradients.append(gradient)
    theta = [
      outer[m].step(theta[m], gradient) for m, gradient in enumerate(gradients)
    ]
  return theta
