"""How far replicas have drifted apart, from scalars alone.

Pairwise cosines would cost a second exchange. With the mean already at hand
sum_{i != j} d_i . d_j = M^2 |mean|^2 - sum_i |d_i|^2, so three scalars a
fragment are enough. All of it is about what was sent: with a codec, that is
not quite what was measured.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dilocox_jax.mesh import REPLICA_AXIS
from dilocox_jax.outer.rules import Arrival
from dilocox_jax.pytypes import Array, Scalar, Tree


class Drift(NamedTuple):
  """Disagreement of the replicas about one fragment.

  Attributes:
    cosine: Mean cosine between two replicas' pseudo-gradients, weighted by
      the product of their norms; not finite for one replica.
    disagreement: Root mean square over replicas of |own - mean|.
    pseudo_gradient_norm: |mean|.
    observed: What the aggregator found worth recording, by name.
  """

  cosine: Scalar
  disagreement: Scalar
  pseudo_gradient_norm: Scalar
  observed: dict[str, Array]


def squared_norm(tree: Tree) -> Scalar:
  """Sum of squares over all leaves."""
  return sum(
    (jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)),
    start=jnp.zeros((), jnp.result_type(*jax.tree.leaves(tree))),
  )


def drift(arrival: Arrival) -> Drift:
  """Measures the disagreement behind an exchange; sends four scalars."""
  count = jax.lax.psum(1, REPLICA_AXIS)
  mean_squared = squared_norm(arrival.mean)
  own_squared = squared_norm(arrival.sent)
  difference = jax.tree.map(jnp.subtract, arrival.sent, arrival.mean)
  norms = jnp.stack(
    [own_squared, jnp.sqrt(own_squared), squared_norm(difference)]
  )
  squares, lengths, apart = jax.lax.psum(norms, REPLICA_AXIS)
  cosine = (count**2 * mean_squared - squares) / (lengths**2 - squares)
  return Drift(
    cosine,
    jnp.sqrt(apart / count),
    jnp.sqrt(mean_squared),
    dict(arrival.observed),
  )
