"""Takes the outer step of a fragment in three parts: measure, exchange, apply.

In optax an update is a single call. On a slow link an update takes several
inner steps, so `OuterStep` splits it into calls that are made at different
inner steps. They are written for one replica and one fragment, a tree of
parameters, and use collectives over the axis "replica". Any optax optimizer or
chain can take the outer step: the averaged pseudo-gradient is its gradient.

Example: a pseudo-gradient in one dimension, with H = 4, tau = 2, rule
`continue`, outer learning rate 1 and two replicas:

    step 4   measure   theta = 10, w = 9 (other replica: 8) -> Delta = 1 (2),
                       which waits in flight
             exchange  mean = 1.5, behind steps 5 and 6, which make w = 8.4
    step 6   apply     theta becomes 10 - 1.5 = 8.5
                       w becomes 8.4 + (8.5 - 10) + 1 = 7.9: the outer
                       parameters plus the 0.6 of progress in steps 5 and 6
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from dilocox_jax.aggregator import Aggregator
from dilocox_jax.checks import require
from dilocox_jax.coroutines import Coroutine, as_function
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.outer.average import check_outermost
from dilocox_jax.outer.drift import squared_norm
from dilocox_jax.outer.rules import ApplyRule, ExchangeResult
from dilocox_jax.plan.choices import loaded
from dilocox_jax.plan.schedule.methods import RULES, Method
from dilocox_jax.trees import Array, Scalar, Tree


class FragmentState(NamedTuple):
  """State of the outer step of one fragment.

  Attributes:
    params: Outer parameters of the fragment. All replicas share them, unless
      each has its own (`OuterStep.is_shared`).
    optimizer: State of the outer optimizer, shared like `params`.
    exchange: State of the aggregator. Codec state is shared by all replicas.
      Each replica has its own residual.
    in_flight: This replica's own pseudo-gradients that were sent and are not
      applied yet, the oldest first.
  """

  params: Tree
  optimizer: Tree
  exchange: Tree
  in_flight: tuple[Tree, ...] = ()


@dataclasses.dataclass(frozen=True)
class OuterStep:
  """Measures, exchanges and applies a fragment of one replica.

  If the pseudo-gradient of a replica is not finite, every aggregator leaves
  this replica out of the mean, so that the other replicas stay finite. The host
  has to notice the problem. It cannot rely on the replica's parameters, since
  some rules replace them by finite values. So it looks at the drift: then
  `Drift.own_squared` of the replica is not finite.

  Attributes:
    method: Schedule and rule.
    optimizer: Any optax optimizer or chain. Its gradient is the averaged
      pseudo-gradient of a fragment.
    aggregator: Averages pseudo-gradients over replicas.
    axis_name: Axis over which replicas are mapped.

  Raises:
    ValueError: One line, if the rule does not go with the schedule or with the
      aggregator.
  """

  method: Method
  optimizer: optax.GradientTransformation
  aggregator: Aggregator
  axis_name: str = REPLICA_AXIS

  def __post_init__(self):
    name = self.method.rule
    rule = self.rule
    schedule = self.method.schedule
    require(
      isinstance(rule, ApplyRule),
      f"rule={name!r}: its builder must return a dilocox_jax.ApplyRule, not a "
      f"{type(rule).__name__}",
    )
    require(
      not rule.applies_at_first_send
      or schedule.overlap_steps == schedule.sync_interval,
      f"rule={name!r} applies at the first send, which needs tau = H: set "
      f"overlap_steps={schedule.sync_interval} instead of "
      f"{schedule.overlap_steps}",
    )

  @functools.cached_property
  def rule(self) -> ApplyRule:
    """The method's apply rule."""
    return loaded(RULES[self.method.rule].build)(self.method, self.axis_name)

  @property
  def is_shared(self) -> bool:
    """Whether all replicas have the same outer parameters.

    They have their own if the rule says so, or if the exchange gives each
    replica a mean of its own.
    """
    return self.rule.is_shared and self.aggregator.is_shared

  @property
  def axes(self) -> FragmentState:
    """Replica axes of the state as a tree prefix: 0, or None where shared."""
    shared: Any = None if self.is_shared else 0
    per_replica: Any = 0
    return FragmentState(shared, shared, self.aggregator.axes, per_replica)

  def init(self, params: Tree) -> FragmentState:
    """Returns the state of a fragment of which nothing is in flight."""
    optimizer = self.optimizer.init(params)
    check_outermost(optimizer)
    return FragmentState(params, optimizer, self.aggregator.init(params))

  def measure(
    self, state: FragmentState, pending: tuple[Tree, ...], inner: Tree
  ) -> Tree:
    """Returns a replica's pseudo-gradient.

    Args:
      state: State of the fragment.
      pending: Pseudo-gradients of the replica that are not applied yet.
      inner: The replica's own parameters of the fragment.
    """
    none = jax.tree.map(jnp.zeros_like, state.params)
    total = functools.reduce(optax.tree.add, pending, none)
    return self.rule.measure(state.params, total, inner)

  def exchange(
    self, state: FragmentState, own: Tree, weight: Scalar | None = None
  ) -> tuple[ExchangeResult, Tree]:
    """Averages a pseudo-gradient over replicas.

    This is the only operation that uses the slow link.

    Args:
      state: State of the fragment.
      own: This replica's pseudo-gradient.
      weight: Factor of it in the mean; 0 leaves the replica out. None: all
        replicas have the same.

    Returns:
      The result, and the new state of the aggregator.
    """
    return as_function(self.exchange_coroutine)(state, own, weight)

  def exchange_coroutine(
    self, state: FragmentState, own: Tree, weight: Scalar | None = None
  ) -> Coroutine:
    """Returns `exchange` as a coroutine, which stops for inner steps.

    It stops where `Aggregator.average_coroutine` does.

    Args:
      state: State of the fragment.
      own: This replica's pseudo-gradient.
      weight: Factor of it in the mean, as in `exchange`.
    """
    values = own if weight is None else _weighted(own, weight)
    averaged = yield from self.aggregator.average_coroutine(
      values, state.exchange, state.params
    )
    retained = averaged.retained
    if retained is not None and weight is not None:
      retained = _unweighted(retained, weight)
    result = ExchangeResult(
      mean=averaged.mean,
      own=own,
      sent=averaged.sent,
      retained=retained,
      observed=dict(self.aggregator.observe(averaged.state)),
    )
    return result, averaged.state

  def apply(
    self, state: FragmentState, inner: Tree, result: ExchangeResult, fresh: Tree
  ) -> tuple[FragmentState, Tree]:
    """Takes the outer step and lets the replica rejoin.

    Args:
      state: State of the fragment.
      inner: The replica's own parameters of the fragment.
      result: Result of the exchange.
      fresh: Pseudo-gradient that was measured in the same inner step. Only the
        rule "eager" reads it.

    Returns:
      The new state and the replica's new parameters.

    Raises:
      ValueError: If the exchange leaves something with the replica, which the
        rule would count twice.
    """
    old = state.params
    gradient = self.rule.gradient(result, fresh)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradient, old)
    updates, optimizer = self.optimizer.update(gradient, state.optimizer, old)
    new = optax.apply_updates(old, updates)
    inner = self.rule.rejoin(inner, old, new, result.own)
    if result.retained is not None:
      require(
        self.method.can_keep_unsent,
        "keep_unsent=True needs replicas that go on from the outer parameters "
        f"at once, or rule 'continue', not {self.method.rule!r} with "
        f"overlap_steps={self.method.schedule.overlap_steps}: take "
        "feedback=1.0",
      )
      # A pseudo-gradient is parameters before minus parameters after, so the
      # progress that was not sent is minus what was retained.
      inner = jax.tree.map(jnp.subtract, inner, result.retained)
    state = state._replace(params=new, optimizer=optimizer)
    return state, inner

  def first_correction(self, params: Tree) -> Tree | None:
    """Returns the correction with which a replica begins; None if none.

    Args:
      params: Parameters of one replica.
    """
    if self.rule.correct is None:
      return None
    return jax.tree.map(jnp.zeros_like, params)

  def correct(self, correction: Tree, result: ExchangeResult) -> Tree:
    """Returns the new correction of a fragment (`ApplyRule.correct`).

    It stays as it was if the mean does not have this replica's part, because
    its values were not finite or came too late: then the result does not say
    how far the replica is from the others.

    Args:
      correction: The correction before, a tree like the fragment.
      result: Result of the exchange.
    """
    assert self.rule.correct is not None, "the rule corrects nothing"
    norm = squared_norm(result.sent)
    is_counted = jnp.isfinite(norm) & (norm > 0)
    return jax.tree.map(
      lambda new, old: jnp.where(is_counted, new, old).astype(old.dtype),
      self.rule.correct(correction, result),
      correction,
    )


def nothing(params: Tree) -> ExchangeResult:
  """Returns zeros in place of a result, before the first exchange.

  Args:
    params: Outer parameters of the fragment.
  """
  zeros = jax.tree.map(jnp.zeros_like, params)
  return ExchangeResult(mean=zeros, own=zeros, sent=zeros)


def _weighted(own: Tree, weight: Scalar) -> Tree:
  """Scales what a replica sends; NaN, if its weight is 0.

  Every aggregator leaves a replica out of the mean, and clears its residual, if
  its values are not finite.
  """
  factor = jnp.where(weight > 0, weight, jnp.full_like(weight, jnp.nan))
  return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), own)


def _unweighted(retained: Tree, weight: Scalar) -> Tree:
  """Returns what stays with a replica, in the units of its own values.

  Args:
    retained: What stays of values that were scaled by the weight.
    weight: Factor of the values; 0 if the replica was left out, of which
      nothing stays then.
  """

  def unscaled(leaf: Array) -> Array:
    rest = leaf / weight.astype(leaf.dtype)
    return jnp.where(weight > 0, rest, jnp.zeros_like(rest))

  return jax.tree.map(unscaled, retained)
