"""Compiles the averaging of a pseudo-gradient as a program of its own.

A window is some inner steps with a send or an apply after them. Usually one
program runs a whole window. If an exchange is a program of its own, it and the
rest of the window call the same functions with the same values as the single
program would. So the results have the same bits, with one exception: on CPUs
with a fused multiply-add, the compiler rounds a * b + c only once where both
operations are in one program. The results then differ by about 1e-7 relative.
"""

from collections.abc import Callable
from typing import Any

import jax

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.outer.events import Arrived
from dilocox_jax.outer.outer_step import FragmentState, OuterStep
from dilocox_jax.outer.rules import ExchangeResult
from dilocox_jax.trees import Tree

# Function (aggregator's state, fragment's state with `exchange` = None,
# pseudo-gradient) -> (result, aggregator's new state).
Exchange = Callable[[Tree, FragmentState, Tree], Arrived]


def arrived_axes(outer: OuterStep) -> Arrived:
  """Returns which parts of an exchange's result have a replica axis.

  Args:
    outer: Exchanges pseudo-gradients.

  Returns:
    A tree prefix of the result and of the aggregator's new state: 0 where
    leaves have a replica axis, None where all replicas share them.
  """
  shared: Any = None
  per_replica: Any = 0
  result = ExchangeResult(
    mean=shared if outer.aggregator.is_shared else per_replica,
    own=per_replica,
    sent=per_replica,
    retained=per_replica,
    observed=shared,
    is_left_out=per_replica,
  )
  return result, outer.axes.exchange


def exchange_program(outer: OuterStep, replicas: Replicas) -> Exchange:
  """Returns the jitted program that averages a pseudo-gradient over replicas.

  Args:
    outer: Exchanges pseudo-gradients.
    replicas: Number of replicas, and their devices.

  Returns:
    Function (aggregator's state, fragment's state with `exchange` = None,
    pseudo-gradient) -> (result, aggregator's new state). It reuses the memory
    of its first argument.
  """

  def replica_program(
    aggregator_state: Tree, rest: FragmentState, pseudo_gradient: Tree
  ) -> Arrived:
    state = rest._replace(exchange=aggregator_state)
    result, new_state = outer.exchange(state, pseudo_gradient)
    return divided_arrived(replicas, result, new_state)

  axes = outer.axes
  arguments = axes.exchange, axes._replace(exchange=None), 0
  mapped = replicas.map(replica_program, arguments, arrived_axes(outer))
  return jax.jit(mapped, donate_argnums=0)


def divided_arrived(
  replicas: Replicas, result: ExchangeResult, exchange: Tree
) -> Arrived:
  """Divides the result of an exchange among a replica's devices.

  The aggregator's state is divided, too. The arrays in `result.observed`, which
  are only recorded, are not.

  Args:
    replicas: Number of replicas, and their devices.
    result: Result of the exchange.
    exchange: New state of the aggregator.

  Returns:
    The result and the new state, with the same values.
  """
  trees = replicas.divided(result._replace(observed={}))
  result = trees._replace(observed=result.observed)
  return result, replicas.divided(exchange)
