"""What happens to a fragment after an inner step: measure, apply, send.

This order stands here once, for the windows of rounds and for the transform of
single steps. First the replica measures how far it has come. Then it applies
the exchange that has arrived, so the outer step can read the new measurement.
Then the new measurement is in flight. With tau = 0 it is exchanged and applied
at once, and never in flight.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dilocox_jax.outer.outer_step import FragmentState, OuterStep, nothing
from dilocox_jax.outer.rules import ExchangeResult
from dilocox_jax.trees import Scalar, Tree

# Result of an exchange, and the aggregator's new state.
Arrived = tuple[ExchangeResult, Tree]

# Function (state, own parameters, new measurement) -> the new state, the
# replica's new parameters (or what its caller makes of them), and the exchange
# that it has applied; None if it has applied none.
Apply = Callable[
  [FragmentState, Tree, Tree],
  tuple[FragmentState, Tree, ExchangeResult | None],
]


def measure_apply_send(
  outer: OuterStep,
  state: FragmentState,
  own: Tree,
  *,
  in_flight: tuple[Tree, ...],
  apply: Apply,
  num_arrived: int,
) -> tuple[FragmentState, Tree, ExchangeResult | None]:
  """Runs the events of a fragment that is sent.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    state: State of the fragment.
    own: The replica's own parameters of the fragment.
    in_flight: Pseudo-gradients of the fragment in flight, the oldest first,
      with what is applied now.
    apply: What happens between measuring and sending, e.g. `apply_arrived`.
    num_arrived: How many of `in_flight` are in flight no longer.

  Returns:
    The new state, the replica's new parameters, and what `apply` returned last.
  """
  fresh = outer.measure(state, in_flight, own)
  state, own, result = apply(state, own, fresh)
  left = (*in_flight, fresh)[num_arrived:]
  return state._replace(in_flight=left), own, result


def exchange_at_once(outer: OuterStep, weight: Scalar | None = None) -> Apply:
  """Returns what exchanges the new measurement, waits for it and applies it.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    weight: Factor of this replica in the mean, as for `OuterStep.exchange`.
  """

  def apply(state: FragmentState, own: Tree, fresh: Tree) -> Any:
    arrived = outer.exchange(state, fresh, weight)
    return apply_arrived(outer, arrived)(state, own, fresh)

  return apply


def apply_arrived(outer: OuterStep, arrived: Arrived) -> Apply:
  """Returns what applies the result of an exchange that has ended.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    arrived: Result of the exchange, and the aggregator's new state.
  """
  result, exchange = arrived

  def apply(state: FragmentState, own: Tree, fresh: Tree) -> Any:
    state = state._replace(exchange=exchange)
    state, own = outer.apply(state, own, result, fresh)
    return state, own, result

  return apply


def apply_nothing_yet(outer: OuterStep) -> Apply:
  """Returns what happens at the first send, when no exchange has ended.

  By most rules nothing happens. A rule that applies at the first send is given
  zeros in place of a result, so that only its own new measurement changes the
  parameters.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
  """

  def apply(state: FragmentState, own: Tree, fresh: Tree) -> Any:
    if outer.rule.applies_at_first_send:
      none = nothing(state.params)
      state, own = outer.apply(state, own, none, fresh)
    return state, own, None

  return apply


def no_measurement(state: FragmentState) -> Tree:
  """Returns zeros in place of a new measurement where none is taken.

  Args:
    state: State of the fragment.
  """
  return jax.tree.map(jnp.zeros_like, state.params)
