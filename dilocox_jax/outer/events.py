"""The events of a fragment after an inner step: measure, apply, send.

Only this module decides their order. Both the windows of rounds
(`rounds.window`) and the transform of single steps (`outer.step_transform`)
call it. First the replica measures its new pseudo-gradient. Then it applies the
result of the exchange that has arrived, so the outer step can read the new
pseudo-gradient. Then the new pseudo-gradient is in flight. With tau = 0 the new
pseudo-gradient is exchanged and applied at once, so it is never in flight.

In this module `inner` is always the replica's own parameters of the fragment,
and `fresh` is the pseudo-gradient that the replica has just measured.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dilocox_jax.outer.outer_step import (
  FragmentState,
  OuterStep,
  zero_result,
)
from dilocox_jax.outer.rules import ExchangeResult
from dilocox_jax.trees import Scalar, Tree

# The result of an exchange that has ended, and the aggregator's new state.
Arrived = tuple[ExchangeResult, Tree]

# Function (state, inner, fresh) -> (new state, the replica's new parameters of
# the fragment, the result that was applied or None). The caller of
# `measure_apply_send` may have its function return another value in the second
# place; `measure_apply_send` only passes it on.
Apply = Callable[
  [FragmentState, Tree, Tree],
  tuple[FragmentState, Tree, ExchangeResult | None],
]


def measure_apply_send(
  outer: OuterStep,
  state: FragmentState,
  inner: Tree,
  *,
  in_flight: tuple[Tree, ...],
  apply: Apply,
  num_arrived: int,
) -> tuple[FragmentState, Tree, ExchangeResult | None]:
  """Runs the events of a fragment that is sent.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    state: State of the fragment.
    inner: The replica's own parameters of the fragment.
    in_flight: Pseudo-gradients of the fragment in flight, the oldest first. The
      one that is applied now is still among them.
    apply: Function that applies between measuring and sending, such as the
      result of `apply_arrived`.
    num_arrived: How many of `in_flight` and the new pseudo-gradient are no
      longer in flight after this, counted from the oldest.

  Returns:
    The new state, and the other two values that `apply` returned: the replica's
    new parameters of the fragment, and the result that was applied or None.
  """
  fresh = outer.measure(state, in_flight, inner)
  state, inner, result = apply(state, inner, fresh)
  left = (*in_flight, fresh)[num_arrived:]
  return state._replace(in_flight=left), inner, result


def exchange_at_once(outer: OuterStep, weight: Scalar | None = None) -> Apply:
  """Returns an `Apply` that exchanges the new pseudo-gradient and applies it.

  The replica waits for the exchange.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    weight: Factor of this replica in the mean, as for `OuterStep.exchange`.
  """

  def apply(state: FragmentState, inner: Tree, fresh: Tree) -> Any:
    arrived = outer.exchange(state, fresh, weight)
    return apply_arrived(outer, arrived)(state, inner, fresh)

  return apply


def apply_arrived(outer: OuterStep, arrived: Arrived) -> Apply:
  """Returns an `Apply` that applies the result of an exchange that has ended.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    arrived: Result of the exchange, and the aggregator's new state.
  """
  result, exchange = arrived

  def apply(state: FragmentState, inner: Tree, fresh: Tree) -> Any:
    state = state._replace(exchange=exchange)
    state, inner = outer.apply(state, inner, result, fresh)
    return state, inner, result

  return apply


def apply_nothing_yet(outer: OuterStep) -> Apply:
  """Returns the `Apply` of the first send, when no exchange has ended.

  Most rules apply nothing then. A rule that applies at the first send
  (`ApplyRule.applies_at_first_send`) gets a result of zeros, so that only the
  replica's new pseudo-gradient changes the parameters.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
  """

  def apply(state: FragmentState, inner: Tree, fresh: Tree) -> Any:
    if outer.rule.applies_at_first_send:
      zeros = zero_result(state.params)
      state, inner = outer.apply(state, inner, zeros, fresh)
    return state, inner, None

  return apply


def no_measurement(state: FragmentState) -> Tree:
  """Returns zeros, for an apply on a step without a new pseudo-gradient.

  Args:
    state: State of the fragment.
  """
  return jax.tree.map(jnp.zeros_like, state.params)
