"""Builds optimizers of optax by name, and learning rate schedules.

A config names the inner and the outer optimizer. This file leaves out options
that an optimizer does not have. An option that the user has changed is refused
instead: by the config for the optimizers that it knows (`config.unread`), and
here for all others.
"""

import inspect
from collections.abc import Callable, Collection
from typing import Any

import jax
import optax
import optax.contrib

from dilocox_jax.checks import require
from dilocox_jax.distributed.local_map import on_whole_layers
from dilocox_jax.plan.choices import OPTIMIZER_OPTIONS, Registry
from dilocox_jax.plan.schedule.fragments import BLOCKS, is_stacked
from dilocox_jax.trees import Index, Tree, leaves_by_path, path_name

OPTIMIZERS: Registry[Callable[..., Any]] = Registry("optimizer")


def register_optimizer(name: str, build: Callable[..., Any]) -> None:
  """Makes an optimizer known under a name, for `inner` and `outer`.

  Args:
    name: The name, which no optimizer of optax has.
    build: Function that returns an `optax.GradientTransformation`. It takes
      `learning_rate`, and those options of a config that it has.

  Raises:
    ValueError: If the name is taken or the function takes no learning rate.
  """
  is_new = not hasattr(optax, name) and not hasattr(optax.contrib, name)
  require(is_new, f"optimizer {name!r} is optax's own: take another name")
  require(
    "learning_rate" in inspect.signature(build).parameters,
    f"optimizer {name!r} must have an argument learning_rate",
  )
  OPTIMIZERS.add(name, build)


def named_optimizer(
  name: str,
  learning_rate: float | optax.Schedule,
  needed: Collection[str] = (),
  /,
  **options: float | bool | Callable | None,
) -> optax.GradientTransformationExtraArgs:
  """Builds an optimizer of optax, or one that was registered.

  Args:
    name: Name of a function of optax or optax.contrib that has an argument
      `learning_rate`, such as "adamw", "sgd" or "muon", or in `OPTIMIZERS`.
    learning_rate: Learning rate, a number or a schedule.
    needed: Names of options that are not at their default. The config has
      refused those that an optimizer in `OPTIMIZER_OPTIONS` lacks.
    **options: Keyword arguments of the function. Arguments that the function
      does not have are left out, and a momentum of 0 is its default.

  Raises:
    ValueError: If optax has no such optimizer, it takes no schedule, or lacks
      an option that is needed.
  """
  build: Any = OPTIMIZERS.get(name) or getattr(
    optax, name, getattr(optax.contrib, name, None)
  )
  parameters = inspect.signature(build).parameters if callable(build) else {}
  require(
    "learning_rate" in parameters,
    f"optimizer={name!r} is not an optimizer of optax; try 'adamw' or 'sgd'",
  )
  for option in () if name in OPTIMIZER_OPTIONS else needed:
    remedy = f"optimizer={name} has no {option}: drop it"
    require(option in parameters, f"{option} would be ignored, as {remedy}")
  known = {k: v for k, v in options.items() if k in parameters}
  if known.get("momentum") == 0:
    # lars, sm3 and madgrad have 0.9 of their own, and sgd would keep a trace.
    del known["momentum"]
  try:
    optimizer: Any = build(learning_rate=learning_rate, **known)
  except TypeError as error:
    raise ValueError(
      f"optimizer={name!r} cannot be built with {', '.join(known) or 'nothing'}"
      f" and a learning rate of type {type(learning_rate).__name__}: {error}"
    ) from error
  return standard_promotion(optimizer)


def standard_promotion(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Lets an optimizer mix dtypes although the program forbids it.

  Several optimizers of optax raise a float to the power of an integer count,
  which strict dtype promotion refuses. Only the update of the optimizer runs
  with JAX's standard promotion; the rest of the program stays strict.

  Products in an update, as those of Muon's Newton-Schulz iteration, are TF32 on
  a recent NVIDIA GPU and three products of bfloat16 on a TPU, whose default
  would be one. Full fp32 would be several times as slow, and the iteration ends
  with singular values between 0.7 and 1.2 anyway.
  """
  inner = optax.with_extra_args_support(optimizer)

  def update(updates, state, params=None, **extra):
    with (
      jax.numpy_dtype_promotion("standard"),
      jax.default_matmul_precision("high"),
    ):
      return inner.update(updates, state, params, **extra)

  return optax.GradientTransformationExtraArgs(inner.init, update)


# Muon's updates are scaled to the usual size of AdamW's (Liu et al., 2025,
# arXiv 2502.16982, section 2.2), so that learning rates carry over.
_MUON_UPDATE_RMS = 0.2
_OUTSIDE = "embed", "head"  # Names of what is before and after the layers.
_WSD_DECAY = 0.2  # Share of the run's steps in which "wsd" decays.


def learning_rate_schedule(
  name: str,
  peak: float,
  *,
  warmup_steps: int,
  total_steps: int,
  final_fraction: float,
) -> optax.Schedule:
  """Builds a learning rate schedule, a function of the inner step.

  With 600 steps, a peak of 2e-3, 50 steps of warm-up and final_fraction 0.05,
  "wsd" rises to 2e-3 until step 50, stays there until step 480 and falls to
  1e-4 at step 600.

  Args:
    name: "constant", "cosine" or "wsd" (warm-up, stable, linear decay). Each
      schedule begins with a linear warm-up from 0.
    peak: Highest learning rate.
    warmup_steps: Inner steps until the peak.
    total_steps: Inner steps of the run. The decay ends at the last step.
    final_fraction: Ratio of the last learning rate to the peak.
  """
  parts, starts = [optax.constant_schedule(peak)], []
  if name == "cosine":
    rest = total_steps - warmup_steps
    parts = [optax.cosine_decay_schedule(peak, rest, final_fraction)]
  if name == "wsd":
    decay = round(_WSD_DECAY * total_steps)
    decay = max(1, min(total_steps - warmup_steps, decay))
    parts += [optax.linear_schedule(peak, peak * final_fraction, decay)]
    starts += [total_steps - decay]
  if warmup_steps:
    parts = [optax.linear_schedule(0.0, peak, warmup_steps), *parts]
    starts = [warmup_steps, *starts]
  return optax.join_schedules(parts, starts)


def inner_optimizer(
  name: str,
  schedule: optax.Schedule,
  needed: Collection[str] = (),
  /,
  *,
  clip_norm: float,
  **options: float | bool,
) -> optax.GradientTransformation:
  """Builds an optimizer that clips gradients by their global norm first.

  Args:
    name: Name of an optimizer of optax.
    schedule: Learning rate by inner step.
    needed: Names of options that are not at their default.
    clip_norm: Largest gradient norm; 0 leaves gradients alone.
    **options: Options of the optimizer, e.g. b1, b2, weight_decay. A momentum
      of 0 stands for the optimizer's own.
  """
  for_muon = {
    "muon_weight_dimension_numbers": block_matrices,
    "consistent_rms": _MUON_UPDATE_RMS,
  }
  # Leaves that Muon gives to its AdamW get the steps that AdamW alone would
  # take, except that Muon's AdamW has Nesterov momentum.
  for_muon |= {f"adam_{option}": value for option, value in options.items()}
  if options.get("momentum"):
    for_muon["beta"] = options["momentum"]  # The name that optax gives it.
  optimizer = named_optimizer(name, schedule, needed, **options, **for_muon)
  if name == "muon":
    update = on_whole_layers(optimizer.update)
    optimizer = optax.GradientTransformation(optimizer.init, update)
  if not clip_norm:
    return optimizer
  return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)


def block_matrices(params: Tree) -> Tree:
  """Selects the leaves that Muon updates: the matrices of the blocks.

  Embedding, head and norms are left to its AdamW, as its authors advise
  (Jordan et al., 2024, "Muon"). Below "blocks" stand either stacked leaves
  [num_layers, ...], or "0", "1" and so on with the leaves of a layer each. Of a
  tree without "blocks" all matrices are taken but those that are called an
  embedding or a head.

  Args:
    params: Parameters of one replica.

  Returns:
    A tree like `params`: for a leaf that Muon updates, the axes of its
    matrices (`MuonDimensionNumbers`), and None for a leaf left to AdamW.

  Raises:
    ValueError: If there is no matrix at all, so that Muon would be AdamW.
  """
  leaves = leaves_by_path(params)
  has_blocks = any(path.startswith(f"{BLOCKS}/") for path in leaves)

  def is_matrix(path: str, leaf: Any) -> bool:
    # Norm scales are [model_dim], or [num_layers, model_dim] if stacked.
    return leaf.ndim == 2 + is_stacked(path)

  def axes(keys: Any, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
    path = path_name(keys)
    is_inside = not any(name in path.lower() for name in _OUTSIDE)
    if has_blocks:
      is_inside = path.startswith(f"{BLOCKS}/")
    if not is_inside or not is_matrix(path, leaf):
      return None
    first = int(is_stacked(path))
    return optax.contrib.MuonDimensionNumbers(first, first + 1)

  require(
    not leaves or any(is_matrix(*each) for each in leaves.items()),
    "optimizer='muon' finds no matrix in the parameters: take 'adamw'",
  )
  return jax.tree_util.tree_map_with_path(axes, params)


def advanced(state: Tree, num_steps: Index) -> Tree:
  """Lets the learning rate go on as if more steps had been taken.

  What an optimizer counts of its own updates, as Adam does, stays as it is.

  Args:
    state: State of an optimizer of optax with a learning rate schedule.
    num_steps: Steps by which the schedule moves on.
  """

  def is_schedule(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)

  def moved(node: Any) -> Any:
    if not is_schedule(node):
      return node
    return node._replace(count=node.count + num_steps)

  return jax.tree.map(moved, state, is_leaf=is_schedule)
