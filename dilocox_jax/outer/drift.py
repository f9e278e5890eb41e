"""How far replicas have drifted apart, from scalars alone.

Pairwise cosines would cost a second exchange. With the mean already at hand
sum_{i != j} d_i . d_j = M^2 |mean|^2 - sum_i |d_i|^2, so two scalars a replica
are enough. They are not added up in the program, where a few bytes would cost
a slow link a message: each replica reports its own, beside its losses. All of
it is about what was sent: with a codec, that is not quite what was measured.
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
  """What replicas report of one exchange of a fragment.

  Scalars in one replica's program, arrays of all replicas outside.

  Attributes:
    own_squared: |own|^2, a replica's own part of the mean.
    apart_squared: |own - mean|^2, likewise.
    mean_squared: |mean|^2, the same for all.
    observed: What the aggregator found worth recording; arrays by name.
  """

  own_squared: Any
  apart_squared: Any
  mean_squared: Any
  observed: Any


# Which of it has a leading replica axis (tree prefix).
AXES = Drift(0, 0, None, None)


def squared_norm(tree: Tree) -> Scalar:
  """Sum of squares over all leaves."""
  return sum(
    (jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)),
    start=jnp.zeros((), jnp.result_type(*jax.tree.leaves(tree))),
  )


def measure_drift(arrival: ExchangeResult) -> Drift:
  """Measures one replica's disagreement behind an exchange; sends nothing."""
  difference = jax.tree.map(jnp.subtract, arrival.sent, arrival.mean)
  return Drift(
    squared_norm(arrival.sent),
    squared_norm(difference),
    squared_norm(arrival.mean),
    dict(arrival.observed),
  )


def by_window(drift: Drift) -> list[Drift]:
  """The exchanges of a piece one by one, on the host.

  Args:
    drift: Of replicas, [M, num_windows]; of all, [num_windows, ...].

  Returns:
    For every window [M] and [...].
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
    cosine: Mean cosine between two replicas' pseudo-gradients, weighted by
      the product of their norms; None where there is none, as for one replica.
    disagreement: Root mean square over replicas of |own - mean|.
    pseudo_gradient_norm: |mean|.
  """

  cosine: float | None
  disagreement: float
  pseudo_gradient_norm: float


def disagreement(
  own_squared: ArrayLike, apart_squared: ArrayLike, mean_squared: ArrayLike
) -> Disagreement:
  """Puts together what the replicas reported, on the host.

  Args:
    own_squared: [M].
    apart_squared: [M].
    mean_squared: A scalar.
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
