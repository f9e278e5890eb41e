"""Compiles the averaging of a pseudo-gradient as a program of its own.

A second thread runs this program beside the inner steps (`exchange_thread`).
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
  """Returns the replica axes of an `Arrived`, as a prefix of its tree.

  An `Arrived` is a pair: the result of an exchange, and the aggregator's new
  state. The prefix is 0 for leaves [M, ...], and None for leaves that all
  replicas share.
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

  The program takes the aggregator's state, the rest of the fragment's state and
  the pseudo-gradient. It returns a pair: the result of the exchange, which has
  the mean, and the aggregator's new state. It reuses the memory of the
  aggregator's state.
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
  """Divides the result of an exchange among the devices of a replica.

  `exchange`, the aggregator's new state, is divided, too. The arrays in
  `result.observed`, which are only recorded, are not.
  """
  trees = replicas.divided(result._replace(observed={}))
  result = trees._replace(observed=result.observed)
  return result, replicas.divided(exchange)
