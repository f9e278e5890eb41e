"""Apply rules: what a replica does with an averaged pseudo-gradient.

An `ApplyRule` has pure functions in the code of one replica. Their trees are
those of one fragment, which is a part of the parameters. The document
docs/methods.md defines the rules in its section "Apply rules".
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.trees import Array, Boolean, Tree


class ExchangeResult(NamedTuple):
  """Result of averaging the pseudo-gradients of one fragment, for one replica.

  Attributes:
    mean: Mean pseudo-gradient of the replicas, or of a pair if pairs exchange.
    own: Pseudo-gradient of this replica, as it was measured.
    sent: Pseudo-gradient of this replica, as the other replicas decode it, e.g.
      after rounding by a codec. It is zeros or not finite if the replica was
      left out of the mean.
    retained: The part of `own` that was not sent and stays in the replica's
      parameters; None: nothing stays.
    observed: Arrays that the aggregator wants recorded, by name; None: none.
    is_left_out: Whether a filter of outliers left this replica out of the mean;
      None: there is no filter.
  """

  mean: Tree
  own: Tree
  sent: Tree
  retained: Tree | None = None
  observed: Mapping[str, Array] | None = None
  is_left_out: Boolean | None = None


def pseudo_gradient(outer: Tree, inner: Tree) -> Tree:
  """Returns the pseudo-gradient of a replica: outer minus inner parameters.

  An optimizer that takes it as a gradient moves the outer parameters toward
  the parameters of the replica.

  Source: Douillard et al., 2023, arXiv 2311.08105, Algorithm 1, line 12.
  """
  return jax.tree.map(jnp.subtract, outer, inner)


def _from_outer(outer: Tree, unapplied: Tree, inner: Tree) -> Tree:
  """Returns outer minus inner: the default of `ApplyRule.measure`."""
  del unapplied
  return pseudo_gradient(outer, inner)


def _averaged(result: ExchangeResult, fresh: Tree) -> Tree:
  """Returns the mean: the default of `ApplyRule.gradient`."""
  del fresh
  return result.mean


def _adopt(inner: Tree, old: Tree, new: Tree, own: Tree) -> Tree:
  """Returns the new outer parameters: the default of `ApplyRule.rejoin`."""
  del inner, old, own
  return new


class ApplyRule(NamedTuple):
  """What a replica does with an averaged pseudo-gradient, as pure functions.

  The functions are written for one replica, and get trees of one fragment (a
  part of the parameters). The defaults are the rule "reset": the replica goes
  on from the new outer parameters.

  Attributes:
    measure: Function (outer, unapplied, inner) -> pseudo-gradient. `outer` are
      the outer parameters, and `inner` the replica's own. `unapplied` is the
      sum of the pseudo-gradients that the replica has sent and whose means are
      not applied yet.
    gradient: Function (result, fresh) -> gradient for the outer optimizer.
      `result` is the `ExchangeResult` that is applied. `fresh` is the
      pseudo-gradient measured after the same inner step, or zeros.
    rejoin: Function (inner, old, new, own) -> the replica's parameters after
      the outer step. `inner` are its parameters before; `old` and `new` are the
      outer parameters before and after; `own` is `ExchangeResult.own`.
    is_shared: Whether all replicas have the same outer parameters. False: each
      replica has its own, and its own outer optimizer's state.
    correct: Function (correction, result) -> new correction, called at every
      outer step that applies a result. The correction is a tree that is added
      to the replica's parameters after each inner step; at first it is zeros.
      None: nothing is added.
    applies_at_first_send: Whether the outer step is also taken at the first
      send of a fragment, before a mean has arrived. `result` is then all zeros,
      so only `fresh` changes the parameters. This needs tau = H.
  """

  measure: Callable[[Tree, Tree, Tree], Tree] = _from_outer
  gradient: Callable[[ExchangeResult, Tree], Tree] = _averaged
  rejoin: Callable[[Tree, Tree, Tree, Tree], Tree] = _adopt
  is_shared: bool = True
  correct: Callable[[Tree, ExchangeResult], Tree] | None = None
  applies_at_first_send: bool = False


def reset_rule(method: Method, axis_name: str) -> ApplyRule:
  """Returns the rule by which a replica takes over the new outer parameters.

  The replica drops what it has learned since it sent. With tau = 0 this is
  nothing. With tau between 0 and H it is lost. With tau = H it is the progress
  of a whole round. This progress is measured and sent just before it is
  dropped, so it comes back in the mean that is applied a round later.

  Source: DiLoCo, arXiv 2311.08105 (tau = 0). DiLoCoX, arXiv 2506.21263 (tau =
  H), in one of the two ways in which that paper can be read.

  Args:
    method: Not read.
    axis_name: Not read.
  """
  del method, axis_name
  return ApplyRule()


def continue_rule(method: Method, axis_name: str) -> ApplyRule:
  """Returns the rule by which a replica keeps what it learned since it sent.

  The outer parameters move from a to b. The replica at w makes the same move.
  This move already contains the progress that the replica has sent. So the
  replica takes this progress back, by adding its pseudo-gradient d. It goes on
  from w + (b - a) + d.

  Example in one dimension, with outer learning rate 1: the outer parameter is
  a = 10. At the send the replica is at 8, so d = 10 - 8 = 2. The mean of all
  replicas is 3, so b = 7. Meanwhile the replica has gone on to w = 7.5. It goes
  on from 7.5 + (7 - 10) + 2 = 6.5, which is the outer parameter 7 plus the
  replica's progress of -0.5 since the send.

  With tau >= H the replica measures its next pseudo-gradient before this mean
  is applied. It subtracts d, which it has sent before. At w = 7.5 this next
  pseudo-gradient is (10 - 2) - 7.5 = 0.5. With tau = 0 the rule is
  `reset_rule`.

  Source: LOSCAR-SGD, Maziane et al., 2026, arXiv 2605.20866, with a proof of
  convergence: its "delay-corrected merge" of a shared subset of coordinates
  (cited from memory). DiLoCoX, arXiv 2506.21263, has tau = H. Its text can be
  read as this rule or as `reset_rule`.
  Differs from both papers: with tau >= H, a new pseudo-gradient leaves out
  those that were sent before and are not applied yet.

  Args:
    method: Its schedule tells whether tau is 0.
    axis_name: Not read.
  """
  if not method.schedule.overlap_steps:
    return reset_rule(method, axis_name)

  def measure(outer: Tree, unapplied: Tree, inner: Tree) -> Tree:
    measured_from = jax.tree.map(jnp.subtract, outer, unapplied)
    return pseudo_gradient(measured_from, inner)

  def rejoin(inner: Tree, old: Tree, new: Tree, own: Tree) -> Tree:
    return jax.tree.map(
      lambda w, a, b, d: w + (b - a) + d, inner, old, new, own
    )

  return ApplyRule(measure=measure, rejoin=rejoin)


def mix_rule(method: Method, axis_name: str) -> ApplyRule:
  """Returns the rule by which a replica mixes its parameters with outer ones.

  The replica goes on from alpha * w + (1 - alpha) * b, with its own parameters
  w and the new outer parameters b.

  Source: Streaming DiLoCo, arXiv 2501.18512, Algorithm 2.

  Args:
    method: Its `mixing_alpha` is alpha, the weight of a replica's own
      parameters, from 0 to 1.
    axis_name: Not read.
  """
  del axis_name
  # A scalar of numpy would widen parameters of bfloat16 to float32.
  alpha = float(method.mixing_alpha)

  def rejoin(inner: Tree, old: Tree, new: Tree, own: Tree) -> Tree:
    del old, own
    return jax.tree.map(lambda w, b: alpha * w + (1 - alpha) * b, inner, new)

  return ApplyRule(rejoin=rejoin)


def eager_rule(method: Method, axis_name: str) -> ApplyRule:
  """Returns the rule of eager updates: only the others' part is a round old.

  In round t, replica m of M has the pseudo-gradient d_m(t). Its outer optimizer
  gets the gradient

    g_m(t) = mean_k d_k(t - 1) + (d_m(t) - d_m(t - 1)) / M

  This is the mean of the round before, in which the newest pseudo-gradient of
  the replica has replaced its old one. The two terms in parentheses are never
  compressed.

  Source: Kale et al., 2025, arXiv 2502.12996.

  Args:
    method: Not read.
    axis_name: Axis over which replicas are mapped.
  """
  del method

  def gradient(result: ExchangeResult, fresh: Tree) -> Tree:
    num_replicas = jax.lax.psum(1, axis_name)
    return jax.tree.map(
      lambda mean, new, old: mean + (new - old) / num_replicas,
      result.mean,
      fresh,
      result.own,
    )

  return ApplyRule(
    gradient=gradient, is_shared=False, applies_at_first_send=True
  )
