"""An exchange as a program of its own, beside the programs of windows."""

from collections.abc import Callable
from typing import Any

import jax

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.outer.outer_step import FragmentState, OuterStep
from dilocox_jax.outer.rules import ExchangeResult
from dilocox_jax.pytypes import Tree

Averaged = tuple[ExchangeResult, Any]

# Function (aggregator's state, the rest of the fragment's state, its pseudo-
# gradient) -> the result and the aggregator's new state.
Exchange = Callable[[Tree, FragmentState, Tree], Averaged]


def arrived_axes(outer: OuterStep) -> Averaged:
  """Returns the replica axes of what an exchange returns, tree prefixes."""
  shared: Any = None if outer.aggregator.is_shared else 0
  own: Any = 0
  unstacked: Any = None
  return ExchangeResult(shared, own, own, unstacked), outer.axes.exchange


def divided(replicas: Replicas, result: ExchangeResult, kept: Tree) -> Averaged:
  """Returns a result whose trees a replica's devices divide."""
  trees = replicas.divided(result._replace(observed={}))
  return trees._replace(observed=result.observed), replicas.divided(kept)


def compiled_exchange(outer: OuterStep, replicas: Replicas) -> Exchange:
  """Returns the exchange by collectives, as a jitted program."""

  def replica_program(kept: Tree, rest: FragmentState, due: Tree) -> Averaged:
    result, kept = outer.exchange(rest._replace(exchange=kept), due)
    return divided(replicas, result, kept)

  none = outer.axes._replace(exchange=None)
  given = outer.axes.exchange, none, 0
  mapped = replicas.map(replica_program, given, arrived_axes(outer))
  return jax.jit(mapped, donate_argnums=0)
