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
from dilocox_jax.pytypes import Tree


def lone_exchange(outer: OuterStep, replicas: Replicas) -> Exchange:
  """Returns an exchange that is no part of a window's program."""
  if outer.is_carried:
    return CarriedExchange(outer, replicas, arrived_axes(outer))
  return compiled_exchange(outer, replicas)


@dataclasses.dataclass(frozen=True, eq=False)
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

  def __call__(
    self, group: Any, kept: Tree, rest: FragmentState, due: Tree
  ) -> Averaged:
    """Exchanges a pseudo-gradient, and waits for the other replicas.

    Args:
      group: Number of the group of fragments.
      kept: State of the aggregator.
      rest: State of the fragment beside it.
      due: Its pseudo-gradient.

    Returns:
      The result, and the new state of the aggregator.
    """
    carrier = self.outer.aggregator.carrier
    turns = carrier.exchange(group, self._shared(kept, rest))
    arrived: tuple[Any, ...] = ()
    leaving, result = self._stage(kept, rest, due, arrived)
    while result is None:
      arrays, is_finite = jax.device_get(leaving)
      message = [np.asarray(array[0]) for array in arrays]
      arrived += (tuple(turns.send(message, bool(is_finite[0]))),)
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

  def _shared(self, kept: Tree, rest: FragmentState) -> list[np.ndarray]:
    """Returns what all replicas must have alike of a fragment."""
    axes = self.outer.axes
    state = FragmentState(rest.params, rest.optimizer, kept)
    axes = axes._replace(in_flight=())
    return jax.device_get(shared_leaves(axes, state))


def shared_leaves(axes: Any, state: Any) -> list[Any]:
  """Returns the leaves of a state that all replicas share, in order."""
  found: list[Any] = []

  def under(axis, subtree):
    if axis is None:
      found.extend(jax.tree.leaves(subtree))

  jax.tree.map(under, axes, state, is_leaf=is_none)
  return found
