"""An exchange whose messages the host carries, such as through a mailbox.

It cannot be one compiled program, since what arrives comes from outside. So it
is cut into stages, one more than there are messages. Stage k is the whole
exchange from its start, which is given what k turns have brought and stops
where it needs more; the compiler drops what it does not need. Low rank:

    stage 0    ()               -> left factors, which the host sends
    stage 1    (left,)          -> right factors, which the host sends
    stage 2    (left, right)    -> the mean, and the new state

How many replicas have sent may change: the stage is then compiled again.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dilocox_jax.distributed.replicas import (
  Replicas,
  is_none,
  without_axis,
)
from dilocox_jax.outer.lone_exchange import (
  Averaged,
  Exchange,
  arrived_axes,
  compiled_exchange,
  divided,
)
from dilocox_jax.outer.outer_step import FragmentState, OuterStep
from dilocox_jax.pytypes import Array, Tree


def lone_exchange(outer: OuterStep, replicas: Replicas) -> Exchange:
  """Returns an exchange that is no part of a window's program."""
  if outer.is_carried:
    return CarriedExchange(outer, replicas, arrived_axes(outer))
  return compiled_exchange(outer, replicas)


@dataclasses.dataclass(eq=False)
class CarriedExchange:
  """Exchanges a fragment of the one replica of this runtime.

  Attributes:
    outer: Measures, exchanges and applies pseudo-gradients. Its aggregator has
      a carrier.
    replicas: The replica and its devices.
    axes: Replica axes of a result (`lone_exchange.arrived_axes`).
  """

  outer: OuterStep
  replicas: Replicas
  axes: Averaged
  fragment: int = 0
  fragments: Sequence[FragmentState] = ()

  def begin(self, fragment: int, fragments: Sequence[FragmentState]) -> None:
    """Says which fragment is exchanged next, and the states of all."""
    self.fragment, self.fragments = fragment, tuple(fragments)

  def __call__(self, kept: Tree, rest: FragmentState, due: Tree) -> Averaged:
    """Exchanges a pseudo-gradient, and waits for the other replicas.

    Args:
      kept: State of the aggregator.
      rest: State of the fragment beside it.
      due: Its pseudo-gradient.

    Returns:
      The result, and the new state of the aggregator.
    """
    carrier = self.outer.aggregator.carrier
    state = rest._replace(exchange=kept)
    shared = jax.device_get(shared_leaves(self.outer, state))
    turns = carrier.exchange(self.fragment, shared)
    arrived: tuple[Any, ...] = ()
    leaving, result = self._stage(kept, rest, due, arrived)
    while result is None:
      arrays, is_finite = jax.device_get(leaving)
      message = [np.asarray(array[0]) for array in arrays]
      came = turns.send(message, bool(is_finite[0]), lambda: self._all(state))
      arrived += (tuple(came),)
      leaving, result = self._stage(kept, rest, due, arrived)
    found, kept = result
    if not turns.is_counted and not carrier.keeps:
      # Under "continue" a replica takes its own part back from its parameters,
      # because the mean has it. This mean does not.
      zeros = jax.tree.map(jax.numpy.zeros_like, found.own)
      found = found._replace(own=zeros)
    return found, kept

  @functools.cached_property
  def _stage(self):
    """The program (state, rest, due, arrived) -> what leaves, or the result.

    There is one replica, so each value has an axis of length 1 at first.
    """
    none = self.outer.axes._replace(exchange=None)
    given: Any = self.outer.axes.exchange, none, 0, None

    def program(*arguments):
      mapped = self.replicas.map(self._until_more_is_needed, given, 0)
      leaving, result = mapped(*arguments)
      if result is not None:
        result = without_axis(self.axes, result)
      return leaving, result

    return jax.jit(program)

  def _until_more_is_needed(
    self, kept: Tree, rest: FragmentState, due: Tree, arrived: tuple[Any, ...]
  ):
    """Runs the exchange; returns what leaves next and no result, or (,)."""
    run = self.outer.exchange_paused(rest._replace(exchange=kept), due)
    leaving = next(run)
    try:
      for each in arrived:
        leaving = run.send(each)
    except StopIteration as stop:
      return None, divided(self.replicas, *stop.value)
    run.close()
    return leaving, None

  def _all(self, state: FragmentState) -> list[np.ndarray]:
    """Returns what all replicas share of all fragments, in order.

    Args:
      state: State of the fragment that is exchanged; the one that was given
        before may be used up.
    """
    states = list(self.fragments) or [state]
    states[self.fragment] = state
    leaves = [shared_leaves(self.outer, each) for each in states]
    return jax.device_get([leaf for each in leaves for leaf in each])


def shared_leaves(outer: OuterStep, state: FragmentState) -> list[Array]:
  """Returns the leaves of a fragment's state that all replicas share."""
  found: list[Array] = []

  def take(leaf: Array) -> Array:
    found.append(leaf)
    return leaf

  map_shared(take, outer, state)
  return found


def map_shared(
  function: Callable[[Array], Array], outer: OuterStep, state: FragmentState
) -> FragmentState:
  """Maps a function over the leaves that all replicas share, in order."""

  def under(axis, subtree):
    return jax.tree.map(function, subtree) if axis is None else subtree

  axes = outer.axes._replace(in_flight=())
  mapped = jax.tree.map(
    under, axes, state._replace(in_flight=()), is_leaf=is_none
  )
  return mapped._replace(in_flight=state.in_flight)
