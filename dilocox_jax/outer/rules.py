"""Apply rules: what a replica does with the result of an exchange.

The papers differ mainly in these rules (docs/methods.md, "Apply rules"). A rule
says how a replica measures its pseudo-gradient, which gradient the outer
optimizer gets, and from which parameters the replica goes on. A rule consists
of pure functions of trees of one fragment, for one replica.
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
    own: Pseudo-gradient of this replica, as it was measured.
    sent: This replica's part of the mean, as the other replicas decode it. A
      codec makes it differ from `own`.
    retained: The part of `own` that was not sent and stays in the replica's
      parameters; None: nothing stays.
    observed: Arrays that the aggregator wants recorded, by name; None: none.
  """

  mean: Tree
  own: Tree
  sent: Tree
  retained: Tree | None = None
  observed: Mapping[str, Array] | None = None


def pseudo_gradient(outer: Tree, inner: Tree) -> Tree:
  """Returns the pseudo-gradient of a replica, outer minus inner parameters.

  An optimizer descends along its gradient. So the outer parameters move toward
  the replica.

  Args:
    outer: Outer parameters.
    inner: Parameters of the replica, same structure and shapes.

  Source: Douillard et al., 2023, arXiv 2311.08105, Algorithm 1, line 12.
  """
  return jax.tree.map(jnp.subtract, outer, inner)


def _from_outer(outer: Tree, unapplied: Tree, inner: Tree) -> Tree:
  """Measures from the newest outer parameters (`ApplyRule.measure`)."""
  del unapplied
  return pseudo_gradient(outer, inner)


def _averaged(result: ExchangeResult, fresh: Tree) -> Tree:
  """Takes the mean as the outer gradient (`ApplyRule.gradient`)."""
  del fresh
  return result.mean


def _adopt(inner: Tree, old: Tree, new: Tree, own: Tree) -> Tree:
  """Goes on from the new outer parameters (`ApplyRule.rejoin`)."""
  del inner, old, own
  return new


class ApplyRule(NamedTuple):
  """An apply rule. Its defaults are the rule "reset".

  Attributes:
    measure: Function (outer, unapplied, inner) -> pseudo-gradient. `outer` and
      `inner` are the outer parameters and the replica's own. `unapplied` is the
      sum of the replica's pseudo-gradients that are still in flight.
    gradient: Function (result, fresh) -> gradient for the outer optimizer.
      `result` is an `ExchangeResult`. `fresh` is the pseudo-gradient that was
      measured after the same inner step, zeros if there is none.
    rejoin: Function (inner, old, new, own) -> the replica's parameters after
      the apply. `old` and `new` are the outer parameters before and after it;
      `own` is `ExchangeResult.own`.
    is_shared: Whether all replicas have the same outer parameters.
    correct: Function (correction, result) -> new correction, a tree like the
      fragment. The function is called at every apply, and the correction is
      added to the replica's parameters after each inner step. So a rule can
      correct the drift of replicas whose data differ. The first correction is
      zeros. None: nothing is added.
    applies_at_first_send: Whether the outer step is also taken at the first
      send of a fragment, when no exchange has ended yet. `result` is then all
      zeros, so only `fresh` changes the parameters. This needs tau = H.
  """

  measure: Callable[[Tree, Tree, Tree], Tree] = _from_outer
  gradient: Callable[[ExchangeResult, Tree], Tree] = _averaged
  rejoin: Callable[[Tree, Tree, Tree, Tree], Tree] = _adopt
  is_shared: bool = True
  correct: Callable[[Tree, ExchangeResult], Tree] | None = None
  applies_at_first_send: bool = False


def reset_rule(method: Method, axis_name: str) -> ApplyRule:
  """Returns the rule by which a replica takes over the new outer parameters.

  With tau = H, the replica's progress since the send is dropped from its
  parameters. This progress was measured just before the apply, so its mean
  comes back a round later.

  Source: DiLoCo, arXiv 2311.08105 (tau = 0). DiLoCoX, arXiv 2506.21263 (tau =
  H), in one of the two ways in which that paper can be read.

  Args:
    method: Schedule and rule; not read.
    axis_name: Axis over which replicas are mapped; not read.
  """
  del method, axis_name
  return ApplyRule()


def continue_rule(method: Method, axis_name: str) -> ApplyRule:
  """Returns the rule by which a replica keeps progress not averaged yet.

  The outer parameters move from a to b. The replica at w makes the same move,
  b - a. It takes back its own pseudo-gradient d, because the move already has
  it, and goes on from w + (b - a) + d.

  Example in one dimension, with outer learning rate 1: the outer parameter is
  a = 10. At the send the replica is at 8, so d = 10 - 8 = 2. The mean of all
  replicas is 3, so b = 7. Meanwhile the replica has gone on to w = 7.5. It goes
  on from 7.5 + (7 - 10) + 2 = 6.5, which is the outer parameter 7 and the
  replica's progress of -0.5 since the send.

  With tau >= H the replica measures again before this apply. The new
  measurement must leave out the pseudo-gradient that is still in flight: at
  w = 7.5 it is (10 - 2) - 7.5 = 0.5. With tau = 0 there is no progress since
  the send, and the rule is `reset_rule`.

  Source: LOSCAR-SGD, Maziane et al., 2026, arXiv 2605.20866, with a proof of
  convergence: its "delay-corrected merge" of a shared subset of coordinates
  (recalled). At tau = H, DiLoCoX, arXiv 2506.21263, in the second of the two
  ways in which that paper can be read.
  Differs: with tau >= H, a new measurement leaves out the pseudo-gradients in
  flight.

  Args:
    method: Its schedule tells whether tau is 0.
    axis_name: Axis over which replicas are mapped; not read.
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
  """Returns the rule by which a replica mixes its own and outer parameters.

  The replica goes on from alpha * w + (1 - alpha) * b, with its own parameters
  w and the new outer parameters b.

  Source: Streaming DiLoCo, arXiv 2501.18512, Algorithm 2.

  Args:
    method: Its `mixing_alpha` is alpha, the weight of a replica's own
      parameters, from 0 to 1.
    axis_name: Axis over which replicas are mapped; not read.
  """
  del axis_name
  alpha = method.mixing_alpha

  def rejoin(inner: Tree, old: Tree, new: Tree, own: Tree) -> Tree:
    del old, own
    return jax.tree.map(lambda w, b: alpha * w + (1 - alpha) * b, inner, new)

  return ApplyRule(rejoin=rejoin)


def eager_rule(method: Method, axis_name: str) -> ApplyRule:
  """Returns the rule in which only the other replicas' part is a round old.

  In round t, replica m of M has the pseudo-gradient d_m(t), and its outer
  optimizer gets the gradient

    g_m(t) = mean_k d_k(t - 1) + (d_m(t) - d_m(t - 1)) / M

  which is the mean of the round before, with the replica's own part replaced by
  its newest one. Neither of the replica's own terms is compressed. So in the
  sum over many rounds all of them cancel except the first and the last one.

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
