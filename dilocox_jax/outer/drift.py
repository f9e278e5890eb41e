"""How far replicas have drifted apart, from two scalars a replica.

Pairwise cosines need every pair of pseudo-gradients, which would cost a second
exchange. The mean is already at hand, and it gives the sum over pairs:

    |sum_i d_i|^2 = sum_i |d_i|^2 + sum_{i != j} d_i . d_j
    sum_{i != j} d_i . d_j = M^2 |mean|^2 - sum_i |d_i|^2

For example d_1 = (3, 0) and d_2 = (0, 4): the mean is (1.5, 2) with a squared
norm of 6.25, and 4 * 6.25 - (9 + 16) = 0. They are orthogonal. The same sum
over |d_i| |d_j| is (3 + 4)^2 - 25 = 24, and the mean cosine is 0 / 24 = 0.

The replicas do not add their scalars up in the program, where a few bytes
would cost a slow link a message. Each reports its own beside its losses.
All of this is about what was sent; a codec makes that differ from what was
measured.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from dilocox_jax.outer.rules import ExchangeResult
from dilocox_jax.pytypes import Scalar, Tree


class Drift(NamedTuple):
  """Scalars that a replica reports of one exchange of a fragment.

  Scalars in one replica's program, arrays of all replicas outside.

  Attributes:
    own_squared: |sent|^2, where `sent` is the replica's part of the mean. It
      is not finite if the replica was left out of the mean because a value of
      it was not finite.
    apart_squared: |sent - mean|^2.
    mean_squared: |mean|^2, the same for all replicas.
    observed: Arrays that the aggregator wants recorded, by name.
  """

  own_squared: Any
  apart_squared: Any
  mean_squared: Any
  observed: Any


# Fields with a leading replica axis, as a tree prefix.
AXES = Drift(0, 0, None, None)


def squared_norm(tree: Tree) -> Scalar:
  """Returns the sum of squares over all leaves."""
  return sum(
    (jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)),
    start=jnp.zeros((), jnp.result_type(*jax.tree.leaves(tree))),
  )


def measure_drift(result: ExchangeResult) -> Drift:
  """Measures one replica's drift in an exchange; it sends nothing."""
  difference = jax.tree.map(jnp.subtract, result.sent, result.mean)
  return Drift(
    squared_norm(result.sent),
    squared_norm(difference),
    squared_norm(result.mean),
    dict(result.observed),
  )


def by_window(drift: Drift) -> list[Drift]:
  """Splits the drift of a window group into its exchanges, on the host.

  Args:
    drift: Fields of replicas [M, num_windows], the others [num_windows, ...].

  Returns:
    For every window, fields of replicas [M] and the others [...].
  """
  own, apart = np.asarray(drift.own_squared), np.asarray(drift.apart_squared)
  return [
    Drift(
      own[:, window],
      apart[:, window],
      mean_squared,
      {name: value[window] for name, value in drift.observed.items()},
    )
    for window, mean_squared in enumerate(np.asarray(drift.mean_squared))
  ]


class Disagreement(NamedTuple):
  """Disagreement of the replicas about one fragment.

  Attributes:
    cosine: Mean cosine between two replicas' pseudo-gradients, weighted by the
      product of their norms. None where there is none: for one replica, and
      where all but one pseudo-gradient is zero.
    disagreement: Root mean square over replicas of |sent - mean|.
    pseudo_gradient_norm: |mean|.
  """

  cosine: float | None
  disagreement: float
  pseudo_gradient_norm: float


def disagreement(
  own_squared: ArrayLike, apart_squared: ArrayLike, mean_squared: ArrayLike
) -> Disagreement:
  """Puts the reports of all replicas together, on the host.

  Args:
    own_squared: Squared norm of every replica's part, [M].
    apart_squared: Squared distance of every replica's part to the mean, [M].
    mean_squared: Squared norm of the mean, a scalar.
  """
  own = np.asarray(own_squared, np.float64)
  mean = float(np.asarray(mean_squared, np.float64))
  squares, lengths = np.sum(own), np.sum(np.sqrt(own))
  with np.errstate(invalid="ignore", divide="ignore"):
    cosine = (own.size**2 * mean - squares) / (lengths**2 - squares)
  return Disagreement(
    float(cosine) if own.size > 1 and np.isfinite(cosine) else None,
    math.sqrt(np.mean(np.asarray(apart_squared, np.float64))),
    math.sqrt(mean),
  )
