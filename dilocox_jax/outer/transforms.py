"""Takes the outer step in four parts: measure, send, exchange and apply.

In optax an update is a single call. On a slow link an update takes several
inner steps, so `OuterTransform` splits it into four calls, which are made at
different inner steps. They are written for one replica and use collectives over
the axis "replica". Any optax optimizer or chain can take the outer step. It is
called with the averaged pseudo-gradient of one fragment as its gradient.

Example: a pseudo-gradient in one dimension, with H = 4, tau = 2, rule
`continue`, outer learning rate 1 and two replicas:

    step 4   measure   theta = 10, w = 9 (other replica: 8) -> Delta = 1 (2)
             send      Delta waits in its slot
             exchange  mean = 1.5, behind steps 5 and 6, which make w = 8.4
    step 6   apply     theta becomes 10 - 1.5 = 8.5
                       w becomes 8.4 + (8.5 - 10) + 1 = 7.9: the outer
                       parameters plus the 0.6 of progress in steps 5 and 6
"""

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from dilocox_jax.distributed import host_memory
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.outer.average import (
  AverageState,
  check_outermost,
  parameters_to_keep,
)
from dilocox_jax.outer.drift import Drift, measure_drift
from dilocox_jax.outer.partition import FragmentIndex, Partition, Store
from dilocox_jax.outer.rules import ApplyRule, ExchangeResult, apply_rule
from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.pytypes import (
  Aggregator,
  Array,
  Index,
  Pausing,
  Scalar,
  Tree,
  without_pauses,
)


class OuterState(NamedTuple):
  """State of the outer step.

  Attributes:
    params: Outer parameters, a tree like that of the model. All replicas share
      them, unless the rule or the exchange gives each replica its own
      (`OuterTransform.is_per_replica`).
    optimizer: Outer optimizer state by fragment, shared like `params`.
    exchange: State of the aggregator by fragment. Codec state is shared by all
      replicas. Each replica has its own residuals.
    in_flight: This replica's own pseudo-gradients that were sent and are not
      applied yet, by fragment and slot, leaves [depth, ...]. It is None if the
      schedule has no overlap.
  """

  params: Tree
  optimizer: Store
  exchange: Store
  in_flight: Store | None


@dataclasses.dataclass(frozen=True)
class OuterTransform:
  """Measures, sends, exchanges and applies the fragments of one replica.

  If the pseudo-gradient of a replica is not finite, every aggregator leaves
  this replica out of the mean, so that the other replicas stay finite. The host
  has to notice the problem. It cannot rely on the replica's parameters, since
  some rules replace them by finite values. So it looks at the drift: then
  `Drift.own_squared` of the replica is not finite.

  Attributes:
    method: Schedule and rule.
    partition: Cuts fragments out of the parameter tree.
    optimizer: Any optax optimizer or chain. Its gradient is the averaged
      pseudo-gradient of a fragment.
    aggregator: Averages pseudo-gradients over replicas.
    keep_unsent: Whether a replica keeps the part of its progress that the codec
      did not send. If true, this part stays in the replica's parameters, and
      the next pseudo-gradient contains it. If false, this part is lost, unless
      error feedback holds it as a residual.
    axis_name: Axis over which replicas are mapped.
  """

  method: Method
  partition: Partition
  optimizer: optax.GradientTransformation
  aggregator: Aggregator
  keep_unsent: bool = False
  axis_name: str = REPLICA_AXIS

  @property
  def rule(self) -> ApplyRule:
    """The method's apply rule."""
    return apply_rule(self.method, self.axis_name)

  @property
  def is_per_replica(self) -> bool:
    """Whether every replica has outer parameters of its own."""
    return self.rule.is_per_replica or not self.aggregator.is_shared

  @property
  def depth(self) -> int:
    """Number of slots for pseudo-gradients of a fragment, ceil(tau / H)."""
    return self.method.schedule.depth

  def keeps_average(self, state: OuterState) -> bool:
    """Whether the outer optimizer keeps an average of what it moves."""
    return any(isinstance(value, AverageState) for value in state.optimizer)

  def init(self, params: Tree) -> OuterState:
    """Returns the state before the first round, when nothing is in flight."""

    def empty_slots(fragment: Tree) -> Tree:
      return jax.tree.map(
        lambda leaf: jnp.zeros((self.depth, *leaf.shape), leaf.dtype), fragment
      )

    store = self.partition.store
    optimizer = store(self.optimizer.init, params)
    for kept in optimizer:
      check_outermost(kept)
    return OuterState(
      params=params,
      optimizer=optimizer,
      exchange=store(self.aggregator.init, params),
      in_flight=store(empty_slots, params) if self.depth else None,
    )

  def measure(
    self,
    state: OuterState,
    inner: Tree,
    fragment: FragmentIndex,
    unapplied: Array | None,
  ) -> Tree:
    """Returns a replica's pseudo-gradient of one fragment.

    Args:
      state: The outer state.
      inner: Parameters of the replica, the whole tree.
      fragment: The fragment to measure.
      unapplied: Booleans [depth], true for slots whose pseudo-gradient is still
        in flight; None if no slot is in flight.
    """
    outer = self.partition.take(state.params, fragment)
    if unapplied is None or state.in_flight is None:
      pending = jax.tree.map(jnp.zeros_like, outer)
    else:
      pending = _masked_sum(state.in_flight.get(fragment), unapplied)
    inner_fragment = self.partition.take(inner, fragment)
    return self.rule.measure(outer, pending, inner_fragment)

  def unapplied_at_send(self, slot: Index) -> Array | None:
    """Returns which slots are in flight when `slot` is about to be filled.

    If tau is a multiple of H, a fragment is measured just before the oldest
    pseudo-gradient is applied, so every slot is in flight. If tau is not a
    multiple of H, the oldest pseudo-gradient was applied some steps ago, and
    `slot` is the slot that it left. For H = 4 and tau = 6 there are two slots:
    `slot` was freed by an apply two steps ago, and the other is in flight.

    Returns:
      Booleans [depth], or None if no slot is in flight.
    """
    if self.method.schedule.is_whole_rounds:
      return jnp.ones((self.depth,), bool) if self.depth else None
    if self.depth == 1:
      return None
    return jnp.arange(self.depth, dtype=slot.dtype) != slot

  def send(
    self, state: OuterState, fragment: FragmentIndex, slot: Index, own: Tree
  ) -> OuterState:
    """Puts a measured pseudo-gradient into a slot."""
    if state.in_flight is None:
      return state
    in_flight = state.in_flight.set(fragment, own, slot)
    return state._replace(in_flight=in_flight)

  def in_flight(
    self, state: OuterState, fragment: FragmentIndex, slot: Index
  ) -> Tree:
    """Returns a pseudo-gradient that was sent and is not applied yet."""
    assert state.in_flight is not None, "without overlap nothing is in flight"
    return state.in_flight.get(fragment, slot)

  def exchange(
    self,
    state: OuterState,
    fragment: FragmentIndex,
    own: Tree,
    weight: Scalar | None = None,
  ) -> tuple[OuterState, ExchangeResult]:
    """Averages a pseudo-gradient over replicas.

    This is the only operation that uses the slow link.

    Args:
      state: The outer state.
      fragment: The fragment that `own` belongs to.
      own: This replica's pseudo-gradient of the fragment.
      weight: Factor of it in the mean; 0 leaves the replica out. None: all
        replicas have the same.

    Returns:
      The outer state with the new aggregator state, and the exchange result.
    """
    return without_pauses(self.exchange_paused)(state, fragment, own, weight)

  def exchange_paused(
    self,
    state: OuterState,
    fragment: FragmentIndex,
    own: Tree,
    weight: Scalar | None = None,
  ) -> Pausing:
    """Runs `exchange` with pauses for inner steps (`Aggregator.paused`)."""
    old_exchange = state.exchange.get(fragment)
    params = self.partition.take(state.params, fragment)
    given = own if weight is None else _weighted(own, weight)
    mean, sent, new_exchange = yield from self.aggregator.paused(
      given, old_exchange, params
    )
    exchange = state.exchange.set(fragment, new_exchange)
    observed = self.aggregator.observe(new_exchange)
    result = ExchangeResult(mean, own, sent, observed, weight)
    return state._replace(exchange=exchange), result

  def nothing(
    self, state: OuterState, fragment: FragmentIndex
  ) -> ExchangeResult:
    """Returns zeros in place of a result, before the first exchange."""
    fragment_params = self.partition.take(state.params, fragment)
    zeros = jax.tree.map(jnp.zeros_like, fragment_params)
    return ExchangeResult(zeros, zeros, zeros)

  def apply(
    self,
    state: OuterState,
    inner: Tree,
    fragment: FragmentIndex,
    result: ExchangeResult,
    fresh: Tree,
  ) -> tuple[OuterState, Tree, Drift]:
    """Takes the outer step for one fragment and lets the replica rejoin.

    Args:
      state: The outer state.
      inner: Parameters of the replica, the whole tree.
      fragment: The fragment to update. The other fragments do not change.
      result: Result of the exchange of this fragment.
      fresh: Pseudo-gradient of this fragment that was measured in the same
        inner step. Only the rule "eager" reads it.

    Returns:
      The new outer state, the replica's new parameters, and the drift.
    """
    old = self.partition.take(state.params, fragment)
    old_optimizer = state.optimizer.get(fragment)
    gradient = self.rule.gradient(result, fresh)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradient, old)
    updates, optimizer = self.optimizer.update(gradient, old_optimizer, old)
    new = optax.apply_updates(old, updates)
    replica = self.partition.take(inner, fragment)
    replica = self.rule.rejoin(replica, old, new, result.own)
    if self.keep_unsent:
      # A pseudo-gradient is parameters before minus parameters after, so the
      # progress that was not sent is -(own - sent).
      replica = jax.tree.map(jnp.subtract, replica, result.unsent)
    state = state._replace(
      params=self.partition.put(state.params, fragment, new),
      optimizer=state.optimizer.set(fragment, optimizer),
    )
    inner = self.partition.put(inner, fragment, replica)
    return state, inner, measure_drift(result)

  def params_to_keep(self, state: OuterState) -> Tree:
    """Returns the outer parameters to evaluate and to keep, on the device.

    They are the average that the outer optimizer keeps, if it keeps one.
    """
    params = host_memory.on_device(state.params)
    for fragment in range(self.partition.fragments.num_fragments):
      newest = self.partition.take(params, fragment)
      optimizer = state.optimizer.get(fragment)
      kept = parameters_to_keep(optimizer, newest)
      params = self.partition.put(params, fragment, kept)
    return params


def _weighted(own: Tree, weight: Scalar) -> Tree:
  """Scales what a replica sends; NaN, if its weight is 0.

  Every aggregator leaves a replica out of the mean, and clears its residual, if
  its values are not finite.
  """
  factor = jnp.where(weight > 0, weight, jnp.full_like(weight, jnp.nan))
  return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), own)


def _masked_sum(slots: Tree, mask: Array) -> Tree:
  """Sums leaves [depth, ...] over the slots where a mask [depth] is true."""

  def total(leaf):
    wide_mask = mask.reshape(mask.shape + (1,) * (leaf.ndim - 1))
    return jnp.sum(jnp.where(wide_mask, leaf, jnp.zeros_like(leaf)), axis=0)

  return jax.tree.map(total, slots)
