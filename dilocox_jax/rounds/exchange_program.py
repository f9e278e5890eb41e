"""An exchange in a program of its own, apart from that of a window.

The programs consist of the same functions as a window's one program, in the
same order of data. They give the same bits, unless the compiler rounds
a * b + c once where both operations stand in one program. It does so on CPUs
with such an instruction, and the results then differ by about 1e-7 relative.
"""

from collections.abc import Callable
from typing import Any

import jax

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.outer.events import Arrived
from dilocox_jax.outer.outer_step import FragmentState, OuterStep
from dilocox_jax.outer.rules import ExchangeResult
from dilocox_jax.trees import Tree

# Function (aggregator's state, the rest of the fragment's state, its pseudo-
# gradient) -> the result and the aggregator's new state.
Exchange = Callable[[Tree, FragmentState, Tree], Arrived]


def arrived_axes(outer: OuterStep) -> Arrived:
  """Returns the replica axes of what an exchange returns, tree prefixes."""
  shared: Any = None
  per_replica: Any = 0
  result = ExchangeResult(
    mean=shared if outer.aggregator.is_shared else per_replica,
    own=per_replica,
    sent=per_replica,
    retained=per_replica,
    observed=shared,
  )
  return result, outer.axes.exchange


def exchange_program(outer: OuterStep, replicas: Replicas) -> Exchange:
  """Returns the jitted program of an exchange.

  Args:
    outer: Exchanges pseudo-gradients.
    replicas: Number of replicas, and their devices.
  """

  def replica_program(kept: Tree, rest: FragmentState, due: Tree) -> Arrived:
    result, state = outer.exchange(rest._replace(exchange=kept), due)
    return divided_arrived(replicas, result, state)

  axes = outer.axes
  arguments = axes.exchange, axes._replace(exchange=None), 0
  mapped = replicas.map(replica_program, arguments, arrived_axes(outer))
  return jax.jit(mapped, donate_argnums=0)


def divided_arrived(
  replicas: Replicas, result: ExchangeResult, exchange: Tree
) -> Arrived:
  """Returns a result whose trees a replica's devices divide.

  Args:
    replicas: Number of replicas, and their devices.
    result: Result of the exchange.
    exchange: New state of the aggregator.
  """
  trees = replicas.divided(result._replace(observed={}))
  result = trees._replace(observed=result.observed)
  return result, replicas.divided(exchange)
