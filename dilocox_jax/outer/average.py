"""Keeps a running average of the parameters that an optimizer updates.

At a high learning rate the parameters jump from side to side in a valley of
the loss, and their average lies nearer to its floor. Training goes on from the
optimizer's own parameters; the average is evaluated and kept. It costs the
memory of one more copy of the parameters, in fp32 or wider. Exchanges do not
send it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from optax.contrib import ScheduleFreeState

from dilocox_jax.checks import require, shown, within_limits
from dilocox_jax.trees import Array, Index, Tree


class AverageState(NamedTuple):
  """State of an optimizer that also averages the parameters it updates.

  Attributes:
    count: Number of updates taken (int32 scalar).
    average: The average, in fp32 or wider; the first parameters if `count` is
      0. With the wrapper `schedule_free`, it is the average x that the wrapped
      optimizer keeps.
    optimizer: State of the optimizer that makes the updates.
  """

  count: Index
  average: Tree
  optimizer: Tree


def averaged(
  optimizer: optax.GradientTransformation, power: float
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that it also averages the parameters it updates.

  The updates stay the same. Let x_s be the parameters after update s. Their
  weight in the average is about proportional to s^power. For power = 1, x_1,
  x_2 and x_3 have the weights 1/6, 2/6 and 3/6. The average lags behind the
  newest parameters by about 1 / (power + 2) of the updates so far.

  Args:
    optimizer: Makes the updates.
    power: 0 or more. 0 gives the plain mean of all parameters; a higher power
      forgets old ones sooner.

  Returns:
    The transformation, with an `AverageState`. It must be the outermost
    transformation, so that no other one changes its updates afterwards.

  Raises:
    ValueError: If `power` is not a number of at least 0, or `optimizer` is no
      optax transformation. The update raises ValueError if it does not get
      `params`.

  Source: Shamir and Zhang, 2013, arXiv 1212.1824, section 4.
  """
  within_limits("power", power, at_least=0)
  _check_optimizer(optimizer)
  # With 64-bit types, a scalar of numpy would widen the average.
  power = float(power)
  inner = optax.with_extra_args_support(optimizer)

  def init(params: Tree) -> AverageState:
    average = jax.tree.map(_precise, params)
    return AverageState(jnp.zeros((), jnp.int32), average, inner.init(params))

  def update(updates, state, params=None, **extra):
    if params is None:
      raise ValueError("an average needs tx.update(grads, state, params)")
    updates, inner_state = inner.update(
      updates, state.optimizer, params, **extra
    )
    count = state.count + 1

    def move_average(old, new):
      # With power = 0 it is 1 / count, which gives the plain mean.
      fraction = (power + 1) / (count.astype(old.dtype) + power)
      return old + fraction * (_precise(new) - old)

    new_params = optax.apply_updates(params, updates)
    average = jax.tree.map(move_average, state.average, new_params)
    return updates, AverageState(count, average, inner_state)

  return optax.GradientTransformationExtraArgs(init, update)


def schedule_free(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Wraps a schedule-free optimizer so that the run evaluates its average.

  A schedule-free optimizer takes its steps at z, keeps an average x of all z,
  and measures gradients at y = (1 - b1) z + b1 x. As an outer optimizer it has
  y as the outer parameters, from which replicas begin their rounds. The model
  to evaluate is x, which this wrapper puts into its state.

  Args:
    optimizer: Result of `optax.contrib.schedule_free`, `schedule_free_sgd` or
      `schedule_free_adamw`, e.g. `optax.contrib.schedule_free_sgd(0.7)`.

  Returns:
    The transformation, with an `AverageState` whose average is x. It must be
    the outermost transformation.

  Raises:
    ValueError: If `optimizer` is no optax transformation. `init` raises it if
      `optimizer` is not schedule-free. The update raises it if it does not get
      `params`.

  Source: Defazio et al., 2024, arXiv 2405.15682.
  """
  _check_optimizer(optimizer)
  inner = optax.with_extra_args_support(optimizer)

  def init(params: Tree) -> AverageState:
    average = jax.tree.map(_precise, params)
    state = inner.init(params)
    require(
      isinstance(state, ScheduleFreeState),
      "schedule_free needs a schedule-free optimizer of optax, such as "
      "optax.contrib.schedule_free_sgd(0.7)",
    )
    return AverageState(jnp.zeros((), jnp.int32), average, state)

  def update(updates, state, params=None, **extra):
    if params is None:
      raise ValueError("schedule_free needs tx.update(grads, state, params)")
    updates, inner_state = inner.update(
      updates, state.optimizer, params, **extra
    )
    new_params = optax.apply_updates(params, updates)
    average = optax.contrib.schedule_free_eval_params(inner_state, new_params)
    average = jax.tree.map(_precise, average)
    return updates, AverageState(state.count + 1, average, inner_state)

  return optax.GradientTransformationExtraArgs(init, update)


def _check_optimizer(optimizer: Any) -> None:
  """Raises ValueError unless a value has `init` and `update`, as optax's."""
  require(
    hasattr(optimizer, "init") and hasattr(optimizer, "update"),
    f"optimizer={shown(optimizer)} must be an optax transformation",
  )


def _precise(leaf: Array) -> Array:
  """Copies a leaf in fp32 or wider: bfloat16 would round small moves to 0."""
  is_wide = leaf.dtype.itemsize >= 4
  return jnp.array(leaf, leaf.dtype if is_wide else jnp.float32)


def parameters_to_keep(optimizer: Tree, params: Tree) -> Tree:
  """Returns the average of the parameters, or `params` if there is none.

  Args:
    optimizer: State of any optimizer. It has an average if it is an
      `AverageState`.
    params: The optimizer's newest parameters. The average gets their dtypes.
  """
  kept = tree_to_keep(optimizer, params)
  if kept is params:
    return params
  return optax.tree.cast_like(kept, params)


def tree_to_keep(optimizer: Tree, params: Tree) -> Tree:
  """Returns the average of the parameters in a state, or else `params`.

  Unlike `parameters_to_keep` it does not cast, so leaves need not be arrays.

  Args:
    optimizer: State of any optimizer. It has an average if it is an
      `AverageState`.
    params: The optimizer's newest parameters.
  """
  if isinstance(optimizer, AverageState):
    return optimizer.average
  return params


def check_outermost(optimizer: Tree) -> None:
  """Raises ValueError if a run would not find the average in a state.

  The run looks for an `AverageState`. There are two mistakes:

  - The optimizer is schedule-free, and is not wrapped in `schedule_free`.
  - The state contains an `AverageState` but is not one itself. For example, the
    average is kept by one part of a chain.

  Args:
    optimizer: State of an optimizer.
  """
  require(
    not isinstance(optimizer, ScheduleFreeState),
    "a schedule-free optimizer evaluates its average and not its newest "
    "parameters: wrap it, dilocox_jax.schedule_free(optimizer)",
  )
  # If the state itself is an `AverageState`, it is the only node.
  nodes = jax.tree.leaves(
    optimizer, is_leaf=lambda node: isinstance(node, AverageState)
  )
  require(
    all(
      node is optimizer or not isinstance(node, AverageState) for node in nodes
    ),
    "an average is kept inside another transformation: make it the outermost "
    "one, dilocox_jax.averaged(optax.chain(...), power)",
  )
