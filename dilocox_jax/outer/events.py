"""What happens to a fragment after an inner step: measure, apply, send.

Only this module decides this order. Both the windows of rounds
(`rounds.window`) and the transform of single steps (`outer.step_transform`)
call it. First the replica measures its new pseudo-gradient of the fragment.
Then it applies the mean of an earlier one, if such a mean has arrived, so the
outer step can read the new pseudo-gradient. Then the new pseudo-gradient counts
as sent: it is in flight until its own mean is applied. With tau = 0 the new
pseudo-gradient is averaged and applied at once, so it is never in flight.

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
  """Measures a pseudo-gradient, applies an earlier mean, and then sends.

  To send means here only to put the new pseudo-gradient in flight. Its exchange
  runs later. With tau = 0 it is never in flight: `apply` exchanges and applies
  it at once (`exchange_at_once`).

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    state: State of the fragment.
    inner: The replica's own parameters of the fragment.
    in_flight: Pseudo-gradients of the fragment in flight, the oldest first. The
      one that is applied now is still among them.
    apply: Function that is called after measuring, and applies a mean, such as
      the result of `apply_arrived`, `exchange_at_once` or `apply_nothing_yet`.
    num_arrived: How many pseudo-gradients are no longer in flight afterwards,
      counted from the oldest. It is 1 if a mean is applied, also if it is the
      mean of the new one, or if the oldest one is only a placeholder of zeros;
      0 otherwise.

  Returns:
    The new state, and the other two values that `apply` returned: the replica's
    new parameters of the fragment, and the result that was applied or None.
  """
  fresh = outer.measure(state, in_flight, inner)
  state, inner, result = apply(state, inner, fresh)
  still_in_flight = (*in_flight, fresh)[num_arrived:]
  return state._replace(in_flight=still_in_flight), inner, result


def exchange_at_once(outer: OuterStep, weight: Scalar | None = None) -> Apply:
  """Returns the argument `apply` of `measure_apply_send` for tau = 0.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    weight: Factor of this replica's pseudo-gradient in the mean, a float scalar
      (`OuterStep.exchange`). None: all replicas have the same weight.

  Returns:
    Function that averages the new pseudo-gradient over replicas, waits for the
    mean, and applies it.
  """

  def apply(state: FragmentState, inner: Tree, fresh: Tree) -> Any:
    arrived = outer.exchange(state, fresh, weight)
    return apply_arrived(outer, arrived)(state, inner, fresh)

  return apply


def apply_arrived(outer: OuterStep, arrived: Arrived) -> Apply:
  """Returns the argument `apply` of `measure_apply_send` for a mean at hand.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    arrived: The result of the exchange, which contains the mean, and the
      aggregator's new state.

  Returns:
    Function that applies this mean.
  """
  result, exchange = arrived

  def apply(state: FragmentState, inner: Tree, fresh: Tree) -> Any:
    state = state._replace(exchange=exchange)
    state, inner = outer.apply(state, inner, result, fresh)
    return state, inner, result

  return apply


def apply_nothing_yet(outer: OuterStep) -> Apply:
  """Returns the argument `apply` of `measure_apply_send` for the first send.

  No mean has arrived then.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.

  Returns:
    Function that changes nothing under most rules. A rule that applies at the
    first send (`ApplyRule.applies_at_first_send`) gets a mean of zeros, so that
    only the replica's new pseudo-gradient changes the parameters.
  """

  def apply(state: FragmentState, inner: Tree, fresh: Tree) -> Any:
    if outer.rule.applies_at_first_send:
      zeros = zero_result(state.params)
      state, inner = outer.apply(state, inner, zeros, fresh)
    return state, inner, None

  return apply


def no_measurement(state: FragmentState) -> Tree:
  """Returns zeros in the place of a new pseudo-gradient.

  A mean may be applied after a step at which nothing is measured.

  Args:
    state: State of the fragment.

  Returns:
    A tree of zeros like the fragment's parameters.
  """
  return jax.tree.map(jnp.zeros_like, state.params)
