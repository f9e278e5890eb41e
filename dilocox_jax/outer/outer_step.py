"""Takes the outer step of a fragment (a part of the parameters) in three calls.

The calls are measure, exchange and apply. They may come after different inner
steps, because an exchange over a slow link may last several inner steps. They
are the code of one replica and one fragment. Any optax optimizer can take the
outer step: its gradient is the averaged pseudo-gradient.

Example in one dimension, with H = 4 steps a round, a delay of tau = 2 steps,
rule `continue`, outer SGD with learning rate 1, and two replicas. The outer
parameter is theta, and w is the parameter of the first replica; numbers of the
second replica are in parentheses:

    step 4   measure   theta = 10, w = 9 (8): pseudo-gradients 10 - 9 = 1 (2)
             exchange  mean = 1.5; meanwhile steps 5 and 6 move w to 8.4
    step 6   apply     theta becomes 10 - 1.5 = 8.5
                       w becomes 8.4 + (8.5 - 10) + 1 = 7.9, which is theta
                       plus the replica's move of -0.6 in steps 5 and 6
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
  """State of the outer step of one fragment, which is a part of the parameters.

  Attributes:
    params: Outer parameters of the fragment. All replicas share them, unless
      each replica has its own (`OuterStep.is_shared`).
    optimizer: State of the outer optimizer, shared like `params`.
    exchange: State of the aggregator, e.g. residuals of error feedback.
    in_flight: This replica's pseudo-gradients that were sent and whose mean is
      not applied yet, the oldest first. In a `StepState` the length is fixed:
      zeros stand for pseudo-gradients that were not sent yet, and one whose
      mean was applied may stay until the next send.
  """

  params: Tree
  optimizer: Tree
  exchange: Tree
  in_flight: tuple[Tree, ...] = ()


@dataclasses.dataclass(frozen=True)
class OuterStep:
  """Takes the outer step of a fragment: `measure`, `exchange`, `apply`.

  The methods are the code of one replica, and may use collectives over the axis
  `axis_name`. A fragment is a part of the parameters. A replica whose
  pseudo-gradient is not finite is left out of the mean.

  Attributes:
    method: The schedule and the apply rule.
    optimizer: The outer optimizer, of optax. Its gradient is the averaged
      pseudo-gradient of a fragment.
    aggregator: Averages pseudo-gradients over replicas.
    axis_name: Axis over which replicas are mapped.

  Raises:
    ValueError: If the function registered for the rule does not return an
      `ApplyRule`. Also if the rule takes an outer step at the first send of a
      fragment (`ApplyRule.applies_at_first_send`), but the delay tau is not H,
      the length of a round.
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
    """The apply rule that `method.rule` names, as an object."""
    return loaded(RULES[self.method.rule].build)(self.method, self.axis_name)

  @property
  def is_shared(self) -> bool:
    """Whether all replicas have the same outer parameters.

    Otherwise the rule or the aggregator gives each replica its own.
    """
    return self.rule.is_shared and self.aggregator.is_shared

  @property
  def axes(self) -> FragmentState:
    """Replica axis of every part of the state, for `in_axes` of `jax.vmap`.

    The axis is None for a part that all replicas share, else 0.
    """
    shared: Any = None if self.is_shared else 0
    per_replica: Any = 0
    return FragmentState(shared, shared, self.aggregator.axes, per_replica)

  def init(self, params: Tree) -> FragmentState:
    """Returns the first state of a fragment, of which nothing was sent yet.

    Raises:
      ValueError: If the optimizer keeps an average of the parameters where the
        run would not find it (`outer.average.check_outermost`).
    """
    optimizer = self.optimizer.init(params)
    check_outermost(optimizer)
    return FragmentState(params, optimizer, self.aggregator.init(params))

  def measure(
    self, state: FragmentState, pending: tuple[Tree, ...], inner: Tree
  ) -> Tree:
    """Returns a replica's new pseudo-gradient, a tree like the fragment.

    Args:
      state: State of the fragment.
      pending: Earlier pseudo-gradients of the replica whose means are not
        applied yet. A rule may leave their sum out of the new one.
      inner: The replica's own parameters of the fragment.
    """
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    total = functools.reduce(optax.tree.add, pending, zeros)
    return self.rule.measure(state.params, total, inner)

  def exchange(
    self,
    state: FragmentState,
    pseudo_gradient: Tree,
    weight: Scalar | None = None,
  ) -> tuple[ExchangeResult, Tree]:
    """Averages a pseudo-gradient over replicas, through the slow link.

    Args:
      state: State of the fragment.
      pseudo_gradient: This replica's pseudo-gradient, a tree like the fragment.
      weight: Factor of the pseudo-gradient, a float scalar; 0 leaves the
        replica out. The sum is divided by the number of replicas that are not
        left out, so their weights should have the mean 1. None: all weights
        are 1.

    Returns:
      The result, and the new state of the aggregator.
    """
    return as_function(self.exchange_coroutine)(state, pseudo_gradient, weight)

  def exchange_coroutine(
    self,
    state: FragmentState,
    pseudo_gradient: Tree,
    weight: Scalar | None = None,
  ) -> Coroutine:
    """Runs `exchange` in parts, so that inner steps can run in between.

    Args:
      state: State of the fragment.
      pseudo_gradient: This replica's pseudo-gradient, a tree like the fragment.
      weight: Factor of the pseudo-gradient in the mean, as in `exchange`.

    Returns:
      A coroutine that returns the result of `exchange`. It yields arrays before
      and after each collective, and the caller sends these arrays back to it
      (`Aggregator`). If replicas exchange through a mailbox (a shared folder or
      bucket), the coroutine yields each message instead, and the caller sends
      back the reply.
    """
    values = pseudo_gradient
    if weight is not None:
      values = _weighted(pseudo_gradient, weight)
    averaged = yield from self.aggregator.average_coroutine(
      values, state.exchange, state.params
    )
    retained = averaged.retained
    # The weighted values were exchanged, but the parameters are not weighted.
    if retained is not None and weight is not None:
      retained = _unweighted(retained, weight)
    result = ExchangeResult(
      mean=averaged.mean,
      own=pseudo_gradient,
      sent=averaged.sent,
      retained=retained,
      observed=dict(self.aggregator.observe(averaged.state)),
      is_left_out=averaged.is_left_out,
    )
    return result, averaged.state

  def apply(
    self, state: FragmentState, inner: Tree, result: ExchangeResult, fresh: Tree
  ) -> tuple[FragmentState, Tree]:
    """Updates the outer parameters, and then the replica as the rule says.

    Args:
      state: State of the fragment.
      inner: The replica's own parameters of the fragment.
      result: Result of `exchange`.
      fresh: Pseudo-gradient measured after the same inner step as this apply;
        zeros if none was. Of the rules of this package only "eager" reads it.

    Returns:
      The new state and the replica's new parameters of the fragment.

    Raises:
      ValueError: If a part of the pseudo-gradient was not sent and stays with
        the replica (`keep_unsent=True`), but the method does not allow this
        (`Method.can_keep_unsent`).
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
      # A pseudo-gradient is parameters before minus parameters after, so adding
      # progress means subtracting its pseudo-gradient.
      inner = jax.tree.map(jnp.subtract, inner, result.retained)
    state = state._replace(params=new, optimizer=optimizer)
    return state, inner

  def first_correction(self, params: Tree) -> Tree | None:
    """Returns zeros like `params`; None if the rule has no correction.

    A correction is added to a replica's parameters after each inner step
    (`ApplyRule.correct`).
    """
    if self.rule.correct is None:
      return None
    return jax.tree.map(jnp.zeros_like, params)

  def correct(self, correction: Tree, result: ExchangeResult) -> Tree:
    """Returns the new correction, which inner steps add to the parameters.

    If this replica was left out of the mean, its correction stays as it was.
    Without a filter (`ExchangeResult.is_left_out` is None), a replica that has
    sent only zeros counts as left out.

    Args:
      correction: The correction before, a tree like the fragment.
      result: Result of `exchange`.
    """
    assert self.rule.correct is not None, "the rule corrects nothing"
    # A mean without this replica does not tell how far this replica is from the
    # others.
    norm = squared_norm(result.sent)
    if result.is_left_out is None:
      # A replica that was left out has sent zeros or values that are not finite
      # (`ExchangeResult.sent`). One that has learned nothing also sends zeros,
      # and cannot be told apart.
      is_in_mean = jnp.isfinite(norm) & (norm > 0)
    else:
      is_in_mean = jnp.isfinite(norm) & ~result.is_left_out
    return jax.tree.map(
      lambda new, old: jnp.where(is_in_mean, new, old).astype(old.dtype),
      self.rule.correct(correction, result),
      correction,
    )


def zero_result(params: Tree) -> ExchangeResult:
  """Returns an exchange result of zeros with the shapes of `params`."""
  zeros = jax.tree.map(jnp.zeros_like, params)
  return ExchangeResult(mean=zeros, own=zeros, sent=zeros)


def _weighted(pseudo_gradient: Tree, weight: Scalar) -> Tree:
  """Scales a pseudo-gradient by a weight; a weight of 0 makes it NaN."""
  # NaN leaves the replica out: every aggregator excludes a replica with values
  # that are not finite, and sets its residual of error feedback to zero.
  factor = jnp.where(weight > 0, weight, jnp.full_like(weight, jnp.nan))
  return jax.tree.map(
    lambda leaf: leaf * factor.astype(leaf.dtype), pseudo_gradient
  )


def _unweighted(retained: Tree, weight: Scalar) -> Tree:
  """Divides a tree by the replica's weight; returns zeros for a weight of 0."""

  def unscaled(leaf: Array) -> Array:
    part = leaf / weight.astype(leaf.dtype)
    return jnp.where(weight > 0, part, jnp.zeros_like(part))

  return jax.tree.map(unscaled, retained)
