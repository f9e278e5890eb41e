"""Measures how far replicas have drifted apart, from a few scalars of each.

The mean cosine between the pseudo-gradients of two replicas says how much they
agree. To compute the dot product of two pseudo-gradients, both would be needed
in one place, which would cost a second exchange. But the sum of the dot
products over all pairs follows from the mean, which the exchange has already
computed. Let d_i be the pseudo-gradient that replica i of M has sent, as the
others decode it:

    |sum_i d_i|^2 = sum_i |d_i|^2 + sum_{i != j} d_i . d_j
    sum_{i != j} d_i . d_j = M^2 |mean|^2 - sum_i |d_i|^2

For example, take d_1 = (3, 0) and d_2 = (0, 4). The mean is (1.5, 2) with a
squared norm of 6.25. The sum of dot products is 4 * 6.25 - (9 + 16) = 0, so d_1
and d_2 are orthogonal. The sum of |d_i| |d_j| over the same pairs is (3 + 4)^2
- 25 = 24, and the mean cosine is 0 / 24 = 0.

Each replica reports its scalars with its losses, and the host adds them up
(`disagreement`), because a sum in the program would cost one more message.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from dilocox_jax.outer.rules import ExchangeResult
from dilocox_jax.trees import Scalar, Tree


class Drift(NamedTuple):
  """Squared norms that a replica reports when a fragment was averaged.

  A fragment is a part of the parameters. In the code of one replica, each norm
  is a scalar; mapped over M replicas, it is [M] where replicas differ.

  Attributes:
    own_squared: |sent|^2, where `sent` is the replica's pseudo-gradient as the
      other replicas decode it; 0 or not finite if the replica was left out of
      the mean.
    apart_squared: |sent - mean|^2, with the mean that this replica gets.
    mean_squared: |mean|^2.
    observed: Arrays of the aggregator to record in `metrics.jsonl`, by name.
    is_left_out: Whether a filter left the replica out of the mean. None: there
      is no filter.
  """

  own_squared: Any
  apart_squared: Any
  mean_squared: Any
  observed: Any
  is_left_out: Any = None


def drift_axes(is_shared: bool) -> Drift:
  """Returns a `Drift` of replica axes, for `out_axes` of `jax.vmap`.

  A field that has a replica axis is 0, and any other field is None.

  Args:
    is_shared: Whether all replicas have the same mean.
  """
  per_replica: Any = 0
  shared: Any = None
  return Drift(
    own_squared=per_replica,
    apart_squared=per_replica,
    mean_squared=shared if is_shared else per_replica,
    observed=shared,
    is_left_out=per_replica,
  )


def squared_norm(tree: Tree) -> Scalar:
  """Returns the sum of squares over all leaves, in at least fp32."""
  leaves = jax.tree.leaves(tree)
  dtypes = [leaf.dtype for leaf in leaves]
  dtype = functools.reduce(np.promote_types, dtypes, np.dtype(np.float32))
  squares = [jnp.sum(jnp.square(leaf.astype(dtype))) for leaf in leaves]
  return sum(squares, start=jnp.zeros((), dtype))


def measure_drift(result: ExchangeResult) -> Drift:
  """Computes one replica's `Drift` of a fragment, without sending anything."""
  difference = jax.tree.map(jnp.subtract, result.sent, result.mean)
  return Drift(
    own_squared=squared_norm(result.sent),
    apart_squared=squared_norm(difference),
    mean_squared=squared_norm(result.mean),
    observed=dict(result.observed or {}),
    is_left_out=result.is_left_out,
  )


class Disagreement(NamedTuple):
  """How much the replicas' pseudo-gradients of one fragment differ.

  Attributes:
    cosine: Mean cosine between two replicas' pseudo-gradients, weighted by the
      product of their norms. None if there is one replica, if this cosine is
      not finite (e.g. all pseudo-gradients are zero), or if each replica has a
      mean pseudo-gradient of its own.
    disagreement: Root mean square, over the replicas, of the distance between a
      replica's pseudo-gradient (as it was sent) and the mean.
    pseudo_gradient_norm: Norm of the mean pseudo-gradient. If each replica has
      a mean of its own, the root mean square of the norms of these means.
  """

  cosine: float | None
  disagreement: float
  pseudo_gradient_norm: float


def disagreement(
  own_squared: ArrayLike, apart_squared: ArrayLike, mean_squared: ArrayLike
) -> Disagreement:
  """Computes how much the pseudo-gradients of one fragment differ, on the host.

  Replicas that were left out of the mean must not be among the M replicas.

  Args:
    own_squared: Squared norm of each replica's sent pseudo-gradient, [M].
    apart_squared: Squared distance of each replica's sent pseudo-gradient from
      the mean, [M].
    mean_squared: Squared norm of the mean pseudo-gradient, a scalar; [M] if
      each replica has a mean of its own.
  """
  squared_norms = np.asarray(own_squared, np.float64)
  num_replicas = squared_norms.size
  has_one_mean = not np.ndim(mean_squared)
  squared_mean_norm = float(np.mean(np.asarray(mean_squared, np.float64)))
  sum_of_squares = np.sum(squared_norms)
  sum_of_norms = np.sum(np.sqrt(squared_norms))
  with np.errstate(invalid="ignore", divide="ignore"):
    # Both sums go over all pairs of different replicas, sum_{i != j}.
    dot_products = num_replicas**2 * squared_mean_norm - sum_of_squares
    norm_products = sum_of_norms**2 - sum_of_squares
    cosine = dot_products / norm_products
  has_cosine = has_one_mean and num_replicas > 1 and np.isfinite(cosine)
  return Disagreement(
    cosine=float(cosine) if has_cosine else None,
    disagreement=math.sqrt(np.mean(np.asarray(apart_squared, np.float64))),
    pseudo_gradient_norm=math.sqrt(squared_mean_norm),
  )
