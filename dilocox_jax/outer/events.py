"""What happens to a fragment after an inner step: measure, apply, send.

A fragment is a part of the parameters. A replica first measures its new
pseudo-gradient of the fragment. Then it applies the mean of an earlier one, if
that is due. Last, it sends the new pseudo-gradient, which is then in flight
until its own mean is applied. With a delay of tau = 0 steps, the new
pseudo-gradient is averaged and applied at once instead.

In this module `inner` is the replica's own parameters of the fragment, and
`fresh` is the pseudo-gradient that the replica has just measured.
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
# the fragment, the result that was applied or None). `measure_apply_send` only
# passes the second value on. So a caller may pass a function that returns
# another value there.
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
  """Measures a pseudo-gradient, perhaps applies a mean, and then sends.

  To send means here only to keep the new pseudo-gradient in `state.in_flight`.
  A caller exchanges it later, except that `exchange_at_once` exchanges it
  during this call.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    state: State of the fragment.
    inner: The replica's own parameters of the fragment.
    in_flight: Pseudo-gradients of the fragment in flight before this call, the
      oldest first. They include the one whose mean `apply` applies, if any.
    apply: Called after measuring; for example the result of `apply_arrived`,
      `exchange_at_once` or `apply_nothing_yet`.
    num_arrived: How many pseudo-gradients are no longer in flight after this
      call. They are removed, the oldest first; the new one counts as the last.
      The number is 1 if `apply` applies a mean, or if the oldest one is a
      placeholder of zeros. Otherwise it is 0.

  Returns:
    The new state; the replica's new parameters of the fragment; the result that
    was applied, or None.
  """
  fresh = outer.measure(state, in_flight, inner)
  state, inner, result = apply(state, inner, fresh)
  still_in_flight = (*in_flight, fresh)[num_arrived:]
  return state._replace(in_flight=still_in_flight), inner, result


def exchange_at_once(outer: OuterStep, weight: Scalar | None = None) -> Apply:
  """Returns a function that averages pseudo-gradients and applies the mean.

  The function is the argument `apply` of `measure_apply_send` for tau = 0: the
  mean is that of the pseudo-gradients that were just measured.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    weight: Factor of this replica's pseudo-gradient in the mean, a float scalar
      (`OuterStep.exchange`). None: all replicas have the same weight.
  """

  def apply(state: FragmentState, inner: Tree, fresh: Tree) -> Any:
    arrived = outer.exchange(state, fresh, weight)
    return apply_arrived(outer, arrived)(state, inner, fresh)

  return apply


def apply_arrived(outer: OuterStep, arrived: Arrived) -> Apply:
  """Returns a function that applies a mean that has arrived.

  The function is an argument `apply` of `measure_apply_send`.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    arrived: A pair, as `OuterStep.exchange` returns it: the result of the
      exchange with the mean in it, and the aggregator's new state.
  """
  result, exchange = arrived

  def apply(state: FragmentState, inner: Tree, fresh: Tree) -> Any:
    state = state._replace(exchange=exchange)
    state, inner = outer.apply(state, inner, result, fresh)
    return state, inner, result

  return apply


def apply_nothing_yet(outer: OuterStep) -> Apply:
  """Returns an `apply` of `measure_apply_send` for a send without a mean.

  With most rules, the function changes nothing. With a rule that applies at the
  first send (`ApplyRule.applies_at_first_send`), the function takes an outer
  step with a mean of zeros. Then only the new pseudo-gradient changes the
  parameters.
  """

  def apply(state: FragmentState, inner: Tree, fresh: Tree) -> Any:
    if outer.rule.applies_at_first_send:
      zeros = zero_result(state.params)
      state, inner = outer.apply(state, inner, zeros, fresh)
    return state, inner, None

  return apply


def no_measurement(state: FragmentState) -> Tree:
  """Returns zeros like the fragment, for a step that measures nothing."""
  return jax.tree.map(jnp.zeros_like, state.params)
