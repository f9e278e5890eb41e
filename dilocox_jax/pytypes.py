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
    update: From one replica's values and the state to the replicas' mean,
      the same on all, and the new state.
  """

  init: Callable[[Tree], Tree]
  update: Callable[[Tree, Tree], tuple[Tree, Tree]]
