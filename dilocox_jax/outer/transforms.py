"""The outer side as one transform with four moments.

Optax's `update` is one call; across a slow link it falls apart into measure,
send, exchange and apply, at different inner steps. `OuterTransform` is that
split form, for one replica, under the axis "replica". Any optax optimizer or
chain can stand inside; it sees one fragment and plain gradients.
"""

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from dilocox_jax.outer.drift import Drift, measure_drift
from dilocox_jax.outer.partition import FragmentIndex, Partition, Store
from dilocox_jax.outer.rules import ApplyRule, ExchangeResult, apply_rule
from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.pytypes import Aggregator, Array, Index, Tree


class OuterState(NamedTuple):
  """Everything the outer side remembers.

  Attributes:
    params: Outer parameters, like the model's tree. Shared by all replicas
      unless the rule is personal.
    optimizer: Outer optimizer state by fragment; shared like `params`.
    exchange: The aggregator's state by fragment: shared, but for residuals,
      which are a replica's own.
    in_flight: Own pseudo-gradients by fragment, [depth, ...] each leaf; a
      replica's own. None where no exchange is ever in flight.
  """

  params: Tree
  optimizer: Store
  exchange: Store
  in_flight: Store | None


@dataclasses.dataclass(frozen=True)
class OuterTransform:
  """Measures, sends, exchanges and applies fragments.

  Attributes:
    method: Schedule and rule.
    partition: How fragments are cut from the tree.
    optimizer: Any optax optimizer or chain.
    aggregator: Averages over replicas.
    keep_unsent: Whether a replica goes on with the part of its progress that
      a codec did not send, rather than losing it or owing it.
  """

  method: Method
  partition: Partition
  optimizer: optax.GradientTransformation
  aggregator: Aggregator
  keep_unsent: bool = False

  @property
  def rule(self) -> ApplyRule:
    """What happens at an apply."""
    return apply_rule(self.method)

  @property
  def depth(self) -> int:
    """Pseudo-gradients of one fragment that may be in flight."""
    return self.method.schedule.depth

  def init(self, params: Tree) -> OuterState:
    """The state before the first round; nothing is in flight."""
    chex.assert_tree_no_nones(params)

    def empty(part: Tree) -> Tree:
      return jax.tree.map(
        lambda leaf: jnp.zeros((self.depth, *leaf.shape), leaf.dtype), part
      )

    store = self.partition.store
    return OuterState(
      params=params,
      optimizer=store(self.optimizer.init, params),
      exchange=store(self.aggregator.init, params),
      in_flight=store(empty, params) if self.depth else None,
    )

  def measure(
    self,
    state: OuterState,
    inner: Tree,
    fragment: FragmentIndex,
    unapplied: Array | None,
  ) -> Tree:
    """A replica's pseudo-gradient of one fragment.

    Args:
      state: The outer state.
      inner: The replica's parameters, the whole tree.
      fragment: Which fragment.
      unapplied: [depth] booleans, which slots are still in flight; None says
        that none is.
    """
    outer = self.partition.take(state.params, fragment)
    if unapplied is None or state.in_flight is None:
      pending = jax.tree.map(jnp.zeros_like, outer)
    else:
      pending = _masked_sum(state.in_flight.get(fragment), unapplied)
    part = self.partition.take(inner, fragment)
    return self.rule.measure(outer, pending, part)

  def unapplied_at_send(self, slot: Index) -> Array | None:
    """Which slots are in flight when a new one is about to be filled.

    With tau a multiple of H the oldest is still there, as measuring comes
    before applying; otherwise its slot is free already.
    """
    if self.method.schedule.is_whole_rounds:
      return jnp.ones((self.depth,), bool) if self.depth else None
    if self.depth == 1:
      return None
    return jnp.arange(self.depth, dtype=slot.dtype) != slot

  def send(
    self, state: OuterState, fragment: FragmentIndex, slot: Index, own: Tree
  ) -> OuterState:
    """Puts a measured pseudo-gradient in flight."""
    if state.in_flight is None:
      return state
    kept = state.in_flight.set(fragment, own, slot)
    return state._replace(in_flight=kept)

  def in_flight(
    self, state: OuterState, fragment: FragmentIndex, slot: Index
  ) -> Tree:
    """A pseudo-gradient that was sent and is not applied yet."""
    assert state.in_flight is not None, "without overlap nothing is in flight"
    return state.in_flight.get(fragment, slot)

  def exchange(
    self, state: OuterState, fragment: FragmentIndex, own: Tree
  ) -> tuple[OuterState, ExchangeResult]:
    """Averages a pseudo-gradient over replicas; the one slow operation."""
    before = state.exchange.get(fragment)
    mean, sent, kept = self.aggregator.average(own, before)
    exchange = state.exchange.set(fragment, kept)
    arrival = ExchangeResult(mean, own, sent, self.aggregator.observe(kept))
    return state._replace(exchange=exchange), arrival

  def nothing(
    self, state: OuterState, fragment: FragmentIndex
  ) -> ExchangeResult:
    """The arrival before there is one: zeros, as eager updates start from."""
    part = self.partition.take(state.params, fragment)
    zeros = jax.tree.map(jnp.zeros_like, part)
    return ExchangeResult(zeros, zeros, zeros)

  def apply(
    self,
    state: OuterState,
    inner: Tree,
    fragment: FragmentIndex,
    arrival: ExchangeResult,
    fresh: Tree,
  ) -> tuple[OuterState, Tree, Drift]:
    """Takes the outer step for one fragment and lets the replica rejoin.

    Args:
      state: The outer state.
      inner: The replica's parameters, the whole tree.
      fragment: Which fragment; all others stay untouched.
      arrival: What came back.
      fresh: The pseudo-gradient measured on this step (read by eager only).

    Returns:
      The new outer state, the replica's new parameters, and the drift.
    """
    old = self.partition.take(state.params, fragment)
    kept = state.optimizer.get(fragment)
    gradient = self.rule.gradient(arrival, fresh)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradient, old)
    updates, kept = self.optimizer.update(gradient, kept, old)
    new = optax.apply_updates(old, updates)
    part = self.partition.take(inner, fragment)
    part = self.rule.rejoin(part, old, new, arrival.own)
    if self.keep_unsent:
      part = jax.tree.map(
        lambda w, own, sent: w - (own - sent), part, arrival.own, arrival.sent
      )
    state = state._replace(
      params=self.partition.put(state.params, fragment, new),
      optimizer=state.optimizer.set(fragment, kept),
    )
    return (
      state,
      self.partition.put(inner, fragment, part),
      measure_drift(arrival),
    )


def _masked_sum(slots: Tree, mask: Array) -> Tree:
  """Sums [depth, ...] leaves over the slots that a mask names."""

  def total(leaf):
    kept = mask.reshape(mask.shape + (1,) * (leaf.ndim - 1))
    return jnp.sum(jnp.where(kept, leaf, jnp.zeros_like(leaf)), axis=0)

  return jax.tree.map(total, slots)
