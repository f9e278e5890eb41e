"""Compiles an exchange as a program of its own, apart from the window's.

The exchange program and the rest of the window call the same functions, in the
same order of data, as a single program of the window would. So the results have
the same bits, with one exception: on CPUs with a fused multiply-add, the
compiler rounds a * b + c only once where both operations are in one program.
The results then differ by about 1e-7 relative.
"""

from collections.abc import Callable
from typing import Any

import jax

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.outer.events import Arrived
from dilocox_jax.outer.outer_step import FragmentState, OuterStep
from dilocox_jax.outer.rules import ExchangeResult
from dilocox_jax.trees import Tree

# Function (aggregator's state, fragment's state without it, pseudo-gradient) ->
# (result, aggregator's new state).
Exchange = Callable[[Tree, FragmentState, Tree], Arrived]


def arrived_axes(outer: OuterStep) -> Arrived:
  """Returns the replica axes of an exchange's result, a tree prefix.

  An axis is 0 where leaves have a replica axis, None where all replicas share
  them.

  Args:
    outer: Exchanges pseudo-gradients.
  """
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

  The program reuses the memory of the aggregator's state.

  Args:
    outer: Exchanges pseudo-gradients.
    replicas: Number of replicas, and their devices.
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
  """Divides a result, and the aggregator's state, among a replica's devices.

  The recorded arrays, `result.observed`, are not divided.

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
