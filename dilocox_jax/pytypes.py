"""Names for arrays, trees and what is done to them.

Dimension letters, the same everywhere: B batch, L length, D model, N heads,
K head width, F feed-forward, V vocabulary, S stages, M replicas, R rank.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

Tree = Any  # A pytree of arrays; structure is checked by chex at the borders.
Scalar = Float[Array, ""]
Index = Int[Array, ""]
Boolean = Bool[Array, ""]


class Aggregator(NamedTuple):
  """Averages a tree over the replica axis, written for one replica.

  It is optax's pair of functions with a replica axis in the middle; from
  outside it takes leaves [M, ...] to leaves [...].

  Attributes:
    init: From one fragment's parameters to the aggregator's state.
    average: From one replica's values and the state to the replicas' mean,
      the same on all, what of the values went into it, and the new state.
    axes: Tree prefix of the state: 0 where it is a replica's own, None where
      it is the same on all.
    observe: From the state to arrays worth recording, by name.
  """

  init: Callable[[Tree], Tree]
  average: Callable[[Tree, Tree], tuple[Tree, Tree, Tree]]
  axes: Any = 0
  observe: Callable[[Tree], dict[str, Array]] = lambda state: {}

  def update(self, values: Tree, state: Tree) -> tuple[Tree, Tree]:
    """The mean and the new state alone."""
    mean, _, state = self.average(values, state)
    return mean, state
