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

How far replicas have drifted apart follows from two scalars per replica. The
cosine of every pair would need all pseudo-gradients in one place, which would
cost a second exchange. But the sum over all pairs follows from the mean, which
the exchange has already computed. With the pseudo-gradient d_i that replica i
has sent, as the others decode it:

    |sum_i d_i|^2 = sum_i |d_i|^2 + sum_{i != j} d_i . d_j
    sum_{i != j} d_i . d_j = M^2 |mean|^2 - sum_i |d_i|^2

For example d_1 = (3, 0) and d_2 = (0, 4): the mean is (1.5, 2) with a squared
norm of 6.25, and 4 * 6.25 - (9 + 16) = 0, so d_1 and d_2 are orthogonal. The
same sum over |d_i| |d_j| is (3 + 4)^2 - 25 = 24, and the mean cosine is
0 / 24 = 0.

The replicas do not add up their scalars in the program, since that would cost
one more message on the slow link. Each replica reports its scalars together
with its losses, and the host adds them up (`disagreement`).
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import ArrayLike

from dilocox_jax.checks import require
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.outer.average import check_outermost
from dilocox_jax.outer.rules import ApplyRule, ExchangeResult
from dilocox_jax.plan.choices import loaded
from dilocox_jax.plan.schedule.methods import RULES, Method
from dilocox_jax.trees import Aggregator, Pausing, Scalar, Tree, without_pauses


class FragmentState(NamedTuple):
  """State of the outer step of one fragment.

  Attributes:
    params: Outer parameters of the fragment. All replicas share them, unless
      the rule gives each its own (`ApplyRule.is_shared`).
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
    name, rule, schedule = self.method.rule, self.rule, self.method.schedule
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
    require(
      rule.is_shared or not self.is_carried,
      f"rule={name!r} gives each replica outer parameters of its own, which "
      "replicas that meet in a store cannot have: take rule 'continue'",
    )

  @functools.cached_property
  def rule(self) -> ApplyRule:
    """The method's apply rule."""
    return loaded(RULES[self.method.rule].build)(self.method, self.axis_name)

  @property
  def is_carried(self) -> bool:
    """Whether the host carries the messages (`carried`)."""
    return self.aggregator.carrier is not None

  @property
  def axes(self) -> FragmentState:
    """Replica axes of the state as a tree prefix: 0, or None where shared."""
    shared: Any = None if self.rule.is_shared else 0
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
    return without_pauses(self.exchange_paused)(state, own, weight)

  def exchange_paused(
    self, state: FragmentState, own: Tree, weight: Scalar | None = None
  ) -> Pausing:
    """Runs `exchange` with pauses for inner steps (`Aggregator.paused`).

    Args:
      state: State of the fragment.
      own: This replica's pseudo-gradient.
      weight: Factor of it in the mean, as in `exchange`.
    """
    given = own if weight is None else _weighted(own, weight)
    mean, sent, kept = yield from self.aggregator.paused(
      given, state.exchange, state.params
    )
    observed = dict(self.aggregator.observe(kept))
    return ExchangeResult(mean, own, sent, observed, weight), kept

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
    """
    old = state.params
    gradient = self.rule.gradient(result, fresh)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradient, old)
    updates, optimizer = self.optimizer.update(gradient, state.optimizer, old)
    new = optax.apply_updates(old, updates)
    inner = self.rule.rejoin(inner, old, new, result.own)
    if self.aggregator.keep_unsent:
      # A pseudo-gradient is parameters before minus parameters after, so the
      # progress that was not sent is -(own - sent).
      unsent = result.unsent
      if self.aggregator.is_screened:
        is_in = squared_norm(result.sent) > 0
        unsent = jax.tree.map(lambda x: jnp.where(is_in, x, 0), unsent)
      inner = jax.tree.map(jnp.subtract, inner, unsent)
    state = state._replace(params=new, optimizer=optimizer)
    return state, inner


def nothing(params: Tree) -> ExchangeResult:
  """Returns zeros in place of a result, before the first exchange.

  Args:
    params: Outer parameters of the fragment.
  """
  zeros = jax.tree.map(jnp.zeros_like, params)
  return ExchangeResult(zeros, zeros, zeros)


def _weighted(own: Tree, weight: Scalar) -> Tree:
  """Scales what a replica sends; NaN, if its weight is 0.

  Every aggregator leaves a replica out of the mean, and clears its residual, if
  its values are not finite.
  """
  factor = jnp.where(weight > 0, weight, jnp.full_like(weight, jnp.nan))
  return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), own)


class Drift(NamedTuple):
  """Squared norms that a replica reports about one exchange of a fragment.

  In the program of one replica the fields are scalars. Outside of it they are
  arrays; `own_squared` and `apart_squared` then have a replica axis [M, ...].

  Attributes:
    own_squared: |sent|^2, where `sent` is the replica's part of the mean. It
      is not finite if the replica's pseudo-gradient was not finite, in which
      case the replica was left out of the mean.
    apart_squared: |sent - mean|^2.
    mean_squared: |mean|^2, the same for all replicas.
    observed: Arrays that the aggregator wants recorded, by name.
  """

  own_squared: Any
  apart_squared: Any
  mean_squared: Any
  observed: Any


# Axis of the replicas in every field; None if there is none.
DRIFT_AXES = Drift(0, 0, None, None)


def squared_norm(tree: Tree) -> Scalar:
  """Returns the sum of squares over all leaves, in at least fp32."""
  leaves = jax.tree.leaves(tree)
  dtypes = [leaf.dtype for leaf in leaves]
  dtype = functools.reduce(np.promote_types, dtypes, np.dtype(np.float32))
  squares = [jnp.sum(jnp.square(leaf.astype(dtype))) for leaf in leaves]
  return sum(squares, start=jnp.zeros((), dtype))


def measure_drift(result: ExchangeResult) -> Drift:
  """Computes one replica's drift in an exchange, without sending anything."""
  difference = jax.tree.map(jnp.subtract, result.sent, result.mean)
  return Drift(
    squared_norm(result.sent),
    squared_norm(difference),
    squared_norm(result.mean),
    dict(result.observed or {}),
  )


class Disagreement(NamedTuple):
  """Disagreement of the replicas about one fragment.

  Attributes:
    cosine: Mean cosine between two replicas' pseudo-gradients, weighted by the
      product of their norms. It is None if no pair has a cosine (there is only
      one replica, or at most one pseudo-gradient is not zero), or if there is
      no mean of all replicas.
    disagreement: Root mean square over replicas of |sent - mean|.
    pseudo_gradient_norm: Norm of the mean pseudo-gradient.
  """

  cosine: float | None
  disagreement: float
  pseudo_gradient_norm: float


def disagreement(
  own_squared: ArrayLike, apart_squared: ArrayLike, mean_squared: ArrayLike
) -> Disagreement:
  """Computes the disagreement about one fragment from all replicas' scalars.

  This runs on the host. The module's docstring has the formula of the cosine.

  Args:
    own_squared: Squared norm of what each replica sent, [M].
    apart_squared: Squared distance from what it sent to the mean, [M].
    mean_squared: Squared norm of the mean pseudo-gradient, a scalar.

  Returns:
    The mean cosine, the distance to the mean and the norm of the mean.
  """
  squared_norms = np.asarray(own_squared, np.float64)
  num_replicas = squared_norms.size
  squared_mean_norm = float(np.asarray(mean_squared, np.float64))
  sum_of_squares = np.sum(squared_norms)
  sum_of_norms = np.sum(np.sqrt(squared_norms))
  with np.errstate(invalid="ignore", divide="ignore"):
    # Both sums go over all pairs of different replicas, sum_{i != j}.
    dot_products = num_replicas**2 * squared_mean_norm - sum_of_squares
    norm_products = sum_of_norms**2 - sum_of_squares
    cosine = dot_products / norm_products
  has_cosine = num_replicas > 1 and np.isfinite(cosine)
  return Disagreement(
    float(cosine) if has_cosine else None,
    math.sqrt(np.mean(np.asarray(apart_squared, np.float64))),
    math.sqrt(squared_mean_norm),
  )
