"""What a replica does when an exchange comes back.

The papers really differ in these rules (docs/methods.md, "Apply rules"). A rule
says what a replica measures, which gradient the outer optimizer is given, and
where the replica goes on from. All are pure functions of one fragment's trees,
for one replica.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.trees import Array, Tree


class ExchangeResult(NamedTuple):
  """Result of an exchange of one fragment.

  Attributes:
    mean: Averaged pseudo-gradient (`Averaged.mean`).
    own: Pseudo-gradient of this replica as it was measured.
    sent: What the other replicas received of `own`; a codec changes it.
    retained: What of `own` stays in the replica's parameters; None: nothing.
    observed: Arrays that the aggregator wants recorded, by name; None: none.
  """

  mean: Tree
  own: Tree
  sent: Tree
  retained: Tree | None = None
  observed: Mapping[str, Array] | None = None


def pseudo_gradient(outer: Tree, inner: Tree) -> Tree:
  """Returns the outer gradient of a replica, outer minus inner.

  It points away from the replica, so that the optimizer's descent moves the
  outer parameters toward it.

  Args:
    outer: Outer parameters.
    inner: Parameters of the replica, same structure and shapes.

  Source: Douillard et al., 2023, arXiv 2311.08105, Algorithm 1, line 12.
  """
  return jax.tree.map(jnp.subtract, outer, inner)


def _from_outer(outer: Tree, unapplied: Tree, inner: Tree) -> Tree:
  del unapplied
  return pseudo_gradient(outer, inner)


def _averaged(result: ExchangeResult, fresh: Tree) -> Tree:
  del fresh
  return result.mean


def _adopt(inner: Tree, old: Tree, new: Tree, own: Tree) -> Tree:
  del inner, old, own
  return new


class ApplyRule(NamedTuple):
  """One way of taking up an exchange; without arguments it is "reset".

  Attributes:
    measure: Function (outer, unapplied, inner) -> pseudo-gradient; `unapplied`
      is the sum of the replica's own pseudo-gradients still in flight.
    gradient: Function (result, fresh) -> gradient for the outer optimizer;
      `fresh` is the pseudo-gradient that was measured on this very step. It
      is zero if none was.
    rejoin: Function (inner, old outer, new outer, own) -> the replica's
      parameters after the apply.
    is_shared: Whether all replicas have the same outer parameters.
    correct: Function (correction, result) -> correction of one replica, a tree
      like the parameters. It is called at every apply. What it returns is added
      to the replica's parameters after each inner step, so a rule can correct
      the drift of replicas whose data differ. The first correction is zeros.
      None: nothing is added.
    applies_at_first_send: Whether the outer step is also taken at the first
      send of a fragment, when no exchange has ended yet. The result of the
      exchange is then all zeros, so only `fresh` changes the parameters. This
      needs tau = H.
  """

  measure: Callable[[Tree, Tree, Tree], Tree] = _from_outer
  gradient: Callable[[ExchangeResult, Tree], Tree] = _averaged
  rejoin: Callable[[Tree, Tree, Tree, Tree], Tree] = _adopt
  is_shared: bool = True
  correct: Callable[[Tree, ExchangeResult], Tree] | None = None
  applies_at_first_send: bool = False


def reset_rule(method: Method, axis_name: str) -> ApplyRule:
  """Returns the rule by which a replica takes over the new outer parameters.

  Source: DiLoCo, arXiv 2311.08105 (tau = 0). DiLoCoX, arXiv 2506.21263, in one
  reading (tau = H): progress made since the send is dropped from the replica.
  It was measured before the apply, so it comes back a round later.

  Args:
    method: Schedule and rule; not read.
    axis_name: Axis over which replicas are mapped; not read.
  """
  del method, axis_name
  return ApplyRule()


def continue_rule(method: Method, axis_name: str) -> ApplyRule:
  """Returns the rule by which a replica keeps progress not averaged yet.

  The replica adds the outer move b - a, and takes its own contribution d back,
  because the move already holds it: w + (b - a) + d.

  One dimension, outer learning rate 1: the outer parameters are a = 10. At the
  send the replica is at 8, so d = 10 - 8 = 2. The mean of all replicas is 3,
  so b = 7. Meanwhile the replica has gone on to w = 7.5. It rejoins at
  7.5 + (7 - 10) + 2 = 6.5, which is the outer 7 and its own last step of -0.5.

  With tau >= H the next measurement comes before this apply. It must leave out
  what is still in flight: at w = 7.5 it is (10 - 2) - 7.5 = 0.5. At tau = 0
  there is no progress since the send, and the rule is `reset_rule`.

  Source: LOSCAR-SGD, Maziane et al., 2026, arXiv 2605.20866, with a proof of
  convergence: its "delay-corrected merge" of a shared subset of coordinates
  (recalled). DiLoCoX's other reading at tau = H. Differs: what is in flight at
  tau >= H is left out of the next measurement.

  Args:
    method: Its schedule decides whether there is any progress to keep.
    axis_name: Axis over which replicas are mapped; not read.
  """
  if not method.schedule.overlap_steps:
    return reset_rule(method, axis_name)

  def measure(outer: Tree, unapplied: Tree, inner: Tree) -> Tree:
    reached = jax.tree.map(jnp.subtract, outer, unapplied)
    return pseudo_gradient(reached, inner)

  def rejoin(inner: Tree, old: Tree, new: Tree, own: Tree) -> Tree:
    return jax.tree.map(
      lambda w, a, b, d: w + (b - a) + d, inner, old, new, own
    )

  return ApplyRule(measure=measure, rejoin=rejoin)


def mix_rule(method: Method, axis_name: str) -> ApplyRule:
  """Returns the rule by which a replica moves part of the way to the outer.

  Source: Streaming DiLoCo, arXiv 2501.18512, Algorithm 2.

  Args:
    method: Has the weight of a replica's own value, `mixing_alpha`.
    axis_name: Axis over which replicas are mapped; not read.
  """
  del axis_name
  alpha = method.mixing_alpha  # Weight of the replica's own value, 0 to 1.

  def rejoin(inner: Tree, old: Tree, new: Tree, own: Tree) -> Tree:
    del old, own
    return jax.tree.map(lambda w, b: alpha * w + (1 - alpha) * b, inner, new)

  return ApplyRule(rejoin=rejoin)


def eager_rule(method: Method, axis_name: str) -> ApplyRule:
  """Returns the rule in which only the other replicas' part is a round old.

  g_m = mean_k d_k(t - 1) + (d_m(t) - d_m(t - 1)) / M: the mean of last round,
  in which this replica's own part is replaced by its newest one. Over many
  rounds the own terms telescope, because they are uncompressed on both sides.

  Source: Kale et al., 2025, arXiv 2502.12996.

  Args:
    method: Schedule and rule; not read.
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
