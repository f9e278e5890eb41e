"""Any optax optimizer by name, inside or outside.

Both sides take optimizers from configuration. Options that an optimizer does
not have are left out rather than listed case by case.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax
import optax.contrib


def named_optimizer(
  name: str,
  learning_rate: float | optax.Schedule,
  **options: float | bool | Callable | None,
) -> optax.GradientTransformationExtraArgs:
  """Builds an optimizer of optax.

  Args:
    name: A function of optax or optax.contrib with a `learning_rate`, such as
      "adamw", "sgd", "muon".
    learning_rate: A number or a schedule.
    **options: Keyword arguments; those the optimizer lacks are ignored.

  Raises:
    ValueError: If optax has no such optimizer.
  """
  build: Any = getattr(optax, name, getattr(optax.contrib, name, None))
  takes = inspect.signature(build).parameters if callable(build) else {}
  if build is None or "learning_rate" not in takes:
    raise ValueError(
      f"optimizer={name!r} is not an optimizer of optax; try 'adamw' or 'sgd'"
    )
  known = {k: v for k, v in options.items() if k in takes}
  optimizer: Any = build(learning_rate=learning_rate, **known)
  return standard_promotion(optimizer)


def standard_promotion(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Lets an optimizer mix dtypes even where the program forbids it.

  Several of optax's raise a float to an integer count, which strict dtype
  promotion refuses; the exception is opened around that call only.
  """
  inner = optax.with_extra_args_support(optimizer)

  def update(updates, state, params=None, **extra):
    with jax.numpy_dtype_promotion("standard"):
      return inner.update(updates, state, params, **extra)

  return optax.GradientTransformationExtraArgs(inner.init, update)
