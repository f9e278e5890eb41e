"""What a replica does when an exchange comes back.

The rules are the points at which the papers really differ (docs/design.md,
section 8). Each says what a replica measures, what the outer optimizer is
given, and where the replica goes on from. All are pure functions of one
fragment's trees, for one replica.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.pytypes import Array, Tree


class ExchangeResult(NamedTuple):
  """What comes back from an exchange.

  Attributes:
    mean: The replicas' averaged pseudo-gradient.
    own: This replica's contribution to it, uncompressed.
    sent: What the others received of it.
    observed: What the aggregator found worth recording, by name.
  """

  mean: Tree
  own: Tree
  sent: Tree
  observed: Mapping[str, Array] = MappingProxyType({})


class ApplyRule(NamedTuple):
  """One way of taking up an exchange.

  Attributes:
    measure: (outer, unapplied, inner) -> pseudo-gradient; `unapplied` is the
      sum of the replica's own pseudo-gradients still in flight.
    gradient: (arrival, fresh) -> what the outer optimizer is given; `fresh`
      is the pseudo-gradient measured on this very step.
    rejoin: (inner, old outer, new outer, own) -> the replica's parameters.
    is_per_replica: Whether every replica has outer parameters of its own.
  """

  measure: Callable[[Tree, Tree, Tree], Tree]
  gradient: Callable[[ExchangeResult, Tree], Tree]
  rejoin: Callable[[Tree, Tree, Tree, Tree], Tree]
  is_per_replica: bool = False


def _from_outer(outer: Tree, unapplied: Tree, inner: Tree) -> Tree:
  del unapplied
  return pseudo_gradient(outer, inner)


def _averaged(arrival: ExchangeResult, fresh: Tree) -> Tree:
  del fresh
  return arrival.mean


def _adopt(inner: Tree, old: Tree, new: Tree, own: Tree) -> Tree:
  del inner, old, own
  return new


def reset_rule() -> ApplyRule:
  """The replica takes over the new outer parameters.

  Source: DiLoCo, arXiv 2311.08105 (tau = 0); DiLoCoX, arXiv 2506.21263, in
  one reading (tau = H), where progress made since the send arrives a round
  later.
  """
  return ApplyRule(_from_outer, _averaged, _adopt)


def continue_rule() -> ApplyRule:
  """The replica keeps the progress that has not been averaged yet.

  It adds the outer move and takes back its own contribution, which the move
  holds; later measurements leave out what is still in flight.

  Source: ours; DiLoCoX's other reading at tau = H.
  """

  def measure(outer: Tree, unapplied: Tree, inner: Tree) -> Tree:
    reached = jax.tree.map(jnp.subtract, outer, unapplied)
    return pseudo_gradient(reached, inner)

  def rejoin(inner: Tree, old: Tree, new: Tree, own: Tree) -> Tree:
    return jax.tree.map(
      lambda w, a, b, d: w + (b - a) + d, inner, old, new, own
    )

  return ApplyRule(measure, _averaged, rejoin)


def mix_rule(alpha: float) -> ApplyRule:
  """The replica moves part of the way to the new outer parameters.

  Source: Streaming DiLoCo, arXiv 2501.18512, Algorithm 2.

  Args:
    alpha: Weight of the local value, 0 to 1.
  """

  def rejoin(inner: Tree, old: Tree, new: Tree, own: Tree) -> Tree:
    del old, own
    return jax.tree.map(lambda w, b: alpha * w + (1 - alpha) * b, inner, new)

  return ApplyRule(_from_outer, _averaged, rejoin)


def eager_rule() -> ApplyRule:
  """The replica's own part is fresh, the others' a round old.

  g_m = mean_k d_k(t - 1) + (d_m(t) - d_m(t - 1)) / M. The own terms telescope
  because they are the uncompressed ones on both sides.

  Source: Kale et al., 2025, arXiv 2502.12996.
  """

  def gradient(arrival: ExchangeResult, fresh: Tree) -> Tree:
    num_replicas = jax.lax.psum(1, REPLICA_AXIS)
    return jax.tree.map(
      lambda mean, new, old: mean + (new - old) / num_replicas,
      arrival.mean,
      fresh,
      arrival.own,
    )

  return ApplyRule(_from_outer, gradient, _adopt, is_per_replica=True)


def apply_rule(method: Method) -> ApplyRule:
  """The rule of a method; without overlap `continue` has nothing to keep."""
  if method.rule == "mix":
    return mix_rule(method.mixing_alpha)
  if method.rule == "eager":
    return eager_rule()
  if method.rule == "continue" and method.schedule.overlap_steps:
    return continue_rule()
  return reset_rule()


def pseudo_gradient(outer: Tree, inner: Tree) -> Tree:
  """The outer gradient of a replica, outer minus inner.

  Args:
    outer: Outer parameters.
    inner: The replica's parameters, same structure and shapes.

  Source: Douillard et al., 2023, arXiv 2311.08105, Algorithm 1, line 8.
  """
  return jax.tree.map(jnp.subtract, outer, inner)
