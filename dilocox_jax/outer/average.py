"""Keeps an average of the parameters that an optimizer has walked through.

While the learning rate is high, parameters jump about the valley that they
descend, and the average of many of them lies nearer to its floor. Training goes
on from the newest parameters; the average is what is evaluated and kept. It
costs one more copy of the parameters, and no byte on the link.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.checks import require
from dilocox_jax.trees import Array, Index, Tree


class AverageState(NamedTuple):
  """State of `averaged`.

  Attributes:
    count: Updates taken (int32 scalar).
    average: Average of the parameters after them, in fp32 or wider.
    optimizer: State of the optimizer that takes the updates.
  """

  count: Index
  average: Tree
  optimizer: Tree


def averaged(
  optimizer: optax.GradientTransformation, power: float
) -> optax.GradientTransformationExtraArgs:
  """Lets an optimizer average its parameters, newer ones with more weight.

  After t updates x_s has the weight s (s + 1) ... (s + power - 1), about
  s^power. So the average is a share of 1 / (power + 2) of the run behind, and
  the same power serves runs of all lengths. Each update moves the average by
  (power + 1) / (t + power) of its distance to x_t. For power = 1 these are 1,
  2/3 and 2/4, and after three updates the weights are 1/6, 2/6 and 3/6.

  Args:
    optimizer: Takes the updates, and does not see the average. Nothing may
      change its updates after it, so this is the outermost transformation.
    power: 0 is the plain mean of all; higher powers forget earlier.

  Raises:
    ValueError: If `power` is negative, or an update is not given the
      parameters.

  Source: Shamir and Zhang, 2013, arXiv 1212.1824, section 4.
  """
  require(power >= 0, f"power={power} must not be negative")
  inner = optax.with_extra_args_support(optimizer)

  def init(params: Tree) -> AverageState:
    average = jax.tree.map(_precise, params)
    return AverageState(jnp.zeros((), jnp.int32), average, inner.init(params))

  def update(updates, state, params=None, **extra):
    if params is None:
      raise ValueError("an average needs tx.update(grads, state, params)")
    updates, kept = inner.update(updates, state.optimizer, params, **extra)
    count = state.count + 1

    def moved(old, new):
      share = (power + 1) / (count.astype(old.dtype) + power)
      return old + share * (_precise(new) - old)

    new = optax.apply_updates(params, updates)
    average = jax.tree.map(moved, state.average, new)
    return updates, AverageState(count, average, kept)

  return optax.GradientTransformationExtraArgs(init, update)


def _precise(leaf: Array) -> Array:
  """Copies a leaf in at least fp32: bfloat16 would lose the small moves."""
  is_wide = leaf.dtype.itemsize >= 4
  return jnp.array(leaf, leaf.dtype if is_wide else jnp.float32)


def parameters_to_keep(optimizer: Tree, params: Tree) -> Tree:
  """Returns the average that an optimizer's state holds, or the parameters.

  Args:
    optimizer: State of any optimizer.
    params: Its newest parameters, which are returned if it has no average.
  """
  if not isinstance(optimizer, AverageState):
    return params
  return optax.tree.cast_like(optimizer.average, params)


def check_outermost(optimizer: Tree) -> None:
  """Raises ValueError if an average is kept inside another transformation.

  Nothing would find it there, and what comes after it may change its updates.

  Args:
    optimizer: State of any optimizer.
  """
  nodes = jax.tree.leaves(
    optimizer, is_leaf=lambda node: isinstance(node, AverageState)
  )
  require(
    all(x is optimizer or not isinstance(x, AverageState) for x in nodes),
    "an average is kept inside another transformation: make it the outermost "
    "one, dilocox_jax.averaged(optax.chain(...), power)",
  )
