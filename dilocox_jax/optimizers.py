"""Builds optimizers of optax by name, and learning rate schedules.

A config has the same options, such as `b1`, for all optimizers. An optimizer
gets only the options that it takes. If the user has changed another option, an
error says that it would be ignored.
"""

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from dilocox_jax.checks import require
from dilocox_jax.distributed.local_map import on_whole_layers
from dilocox_jax.plan.choices import OPTIMIZER_OPTIONS, Registry
from dilocox_jax.plan.schedule.fragments import BLOCKS, is_stacked
from dilocox_jax.trees import Array, Index, Tree, leaves_by_path, path_name

OPTIMIZERS: Registry[Callable[..., Any]] = Registry("optimizer")


def register_optimizer(name: str, build: Callable[..., Any]) -> None:
  """Registers an optimizer under a name, for `inner` and `outer` of a config.

  Args:
    name: Name of the optimizer, a Python identifier. It must not be a name in
      optax or optax.contrib.
    build: Function that returns an `optax.GradientTransformation`. It must have
      an argument `learning_rate`, for a number or a schedule. It may also have
      arguments with the names of options of the config. It then gets the values
      of these options. `inner` has the options b1, b2, weight_decay, momentum
      and nesterov. `outer` has momentum and nesterov. A momentum of 0 is not
      passed.

  Raises:
    ValueError: If the name is taken (also by optax) or is no identifier, or if
      the function has no argument `learning_rate`.
  """
  is_new = not hasattr(optax, name) and not hasattr(optax.contrib, name)
  require(is_new, f"optimizer {name!r} is optax's own: take another name")
  require(
    "learning_rate" in inspect.signature(build).parameters,
    f"optimizer {name!r} must have an argument learning_rate",
  )
  OPTIMIZERS.add(name, build)


def _builder(name: str) -> Any:
  """Returns the registered function, or else optax's attribute, of a name.

  The attribute of optax or optax.contrib need not be an optimizer. None: there
  is neither.
  """
  build = OPTIMIZERS.get(name)
  if build is None:
    build = getattr(optax, name, None)
  if build is None:
    build = getattr(optax.contrib, name, None)
  return build


def named_optimizer(
  name: str,
  learning_rate: float | Array | optax.Schedule,
  needed: Collection[str] = (),
  /,
  **options: float | bool | Callable | None,
) -> optax.GradientTransformationExtraArgs:
  """Builds an optimizer of optax, or a registered one.

  Args:
    name: Name of a registered optimizer (`register_optimizer`), or of a
      function of optax or optax.contrib with an argument `learning_rate`, such
      as "adamw".
    learning_rate: A number, which may be traced, or a schedule.
    needed: Names of options that must not be ignored, because the user has
      changed them. This function checks them only for optimizers that are not
      in `OPTIMIZER_OPTIONS`; for the others the config has checked them.
    **options: Keyword arguments of the function. Options that the function
      does not take are left out. A momentum of 0 means the function's default.

  Returns:
    The optimizer. It may mix dtypes (`standard_promotion`).

  Raises:
    ValueError: If there is no such optimizer, if it would ignore an option in
      `needed`, or if it cannot be built with these arguments (some optimizers
      take no schedule).
  """
  build = _builder(name)
  parameters = {}
  if callable(build):
    parameters = inspect.signature(build).parameters
  require(
    "learning_rate" in parameters,
    f"optimizer={name!r} is not an optimizer of optax; try 'adamw' or 'sgd'",
  )
  if name not in OPTIMIZER_OPTIONS:
    for option in needed:
      require(
        option in parameters,
        f"{option} would be ignored, as optimizer={name} has no {option}: drop "
        "it",
      )
  arguments = {
    option: value for option, value in options.items() if option in parameters
  }
  if arguments.get("momentum") == 0:
    # A momentum of 0 means "not set" in a config. So lars, sm3 and madgrad use
    # their default of 0.9, and sgd keeps no trace, which momentum=0 would make.
    del arguments["momentum"]
  try:
    optimizer: Any = build(learning_rate=learning_rate, **arguments)
  except TypeError as error:
    raise ValueError(
      f"optimizer={name!r} cannot be built with "
      f"{', '.join(arguments) or 'nothing'} and a learning rate of type "
      f"{type(learning_rate).__name__}: {error}"
    ) from error
  return standard_promotion(optimizer)


def standard_promotion(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Lets an optimizer mix dtypes, also if JAX's dtype promotion is strict.

  Several optimizers of optax raise a float to the power of an integer count.
  Strict dtype promotion refuses this. The update of the returned optimizer runs
  with JAX's standard promotion, and with "high" precision of matrix products
  (TF32 on an NVIDIA GPU, three bfloat16 products on a TPU).

  Args:
    optimizer: The optimizer.
  """
  inner = optax.with_extra_args_support(optimizer)

  def update(
    updates: Tree, state: Any, params: Tree = None, **extra: Any
  ) -> tuple[Tree, Any]:
    with (
      jax.numpy_dtype_promotion("standard"),
      jax.default_matmul_precision("high"),
    ):
      return inner.update(updates, state, params, **extra)

  return optax.GradientTransformationExtraArgs(inner.init, update)


# Muon's updates are scaled to the usual size of AdamW's (Liu et al., 2025,
# arXiv 2502.16982, section 2.2), so that learning rates carry over.
_MUON_UPDATE_RMS = 0.2
# Words in the names of the leaves before and after the layers.
_OUTSIDE = frozenset({"embed", "embedding", "embeddings", "head"})
# Share of the run's inner steps, at the end, in which "wsd" decays.
_WSD_DECAY = 0.2


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
      schedule starts with a linear warm-up from 0.
    peak: Highest learning rate.
    warmup_steps: Inner steps until the peak.
    total_steps: Inner steps of the run, counted from 0. The decay ends at step
      `total_steps`, one step after the last step of the run.
    final_fraction: Ratio of the rate at the end of the decay to the peak.
      "constant" does not use it.

  Returns:
    Function (number of the inner step, from 0) -> learning rate.
  """
  schedules = []
  boundaries = []  # Step at which each schedule after the first starts.
  steps_after_warmup = total_steps - warmup_steps
  if warmup_steps:
    schedules.append(optax.linear_schedule(0.0, peak, warmup_steps))
    boundaries.append(warmup_steps)
  if name == "cosine":
    schedules.append(
      optax.cosine_decay_schedule(peak, steps_after_warmup, final_fraction)
    )
  else:  # "constant", or the stable part of "wsd".
    schedules.append(optax.constant_schedule(peak))
  if name == "wsd":
    # The decay begins after the warm-up, and has at least one step.
    decay_steps = round(_WSD_DECAY * total_steps)
    decay_steps = max(1, min(steps_after_warmup, decay_steps))
    schedules.append(
      optax.linear_schedule(peak, peak * final_fraction, decay_steps)
    )
    boundaries.append(total_steps - decay_steps)
  return optax.join_schedules(schedules, boundaries)


def outer_rate_schedule(
  name: str,
  peak: float | Array,
  round_starts: Sequence[float],
  final_fraction: float,
) -> optax.Schedule:
  """Builds the learning rate of outer steps, a function of their number.

  The rate follows the inner steps, so it falls less after a short round than
  after a long one. Example: three rounds start when none, a half and three
  quarters of the inner steps are done. With final_fraction 0 their outer steps
  have 1, 0.5 and 0.15 times the peak.

  Args:
    name: "cosine", the only choice.
    peak: Learning rate of the first outer step.
    round_starts: For each round of the run, the fraction (0 to 1) of all inner
      steps that come before it.
    final_fraction: Ratio to the peak that the decay reaches at the end of the
      run. The last outer step does not reach it: it has the rate of the start
      of the last round.

  Returns:
    Function (number of earlier outer steps) -> learning rate of the next one.
    After the last round it returns the rate of the last round.
  """
  assert name == "cosine", name
  starts = np.asarray(round_starts)
  # The cosine is 1 at the start of the run, and would be 0 at its end.
  cosine = (1 + np.cos(np.pi * starts)) / 2
  factors = np.asarray(
    final_fraction + (1 - final_fraction) * cosine, np.float32
  )

  def rate(count: Any) -> Any:
    last = len(factors) - 1
    return peak * jnp.asarray(factors)[jnp.minimum(count, last)]

  return rate


def inner_optimizer(
  name: str,
  schedule: optax.Schedule,
  needed: Collection[str] = (),
  /,
  *,
  clip_norm: float,
  **options: float | bool,
) -> optax.GradientTransformation:
  """Builds an optimizer that first clips gradients by their global norm.

  "muon" updates the matrices of the layers (`block_matrices`). Its updates are
  scaled to the usual size of AdamW's.

  Args:
    name: Name of an optimizer, e.g. "adamw" (`named_optimizer`).
    schedule: Function from the inner step to the learning rate.
    needed: Names of options that must not be ignored, because the user has
      changed them (`named_optimizer`).
    clip_norm: Largest norm of a gradient; 0 means no clipping.
    **options: Values of options, e.g. b1, b2, weight_decay. Those that the
      optimizer lacks are left out. A momentum of 0 means its default.

  Raises:
    ValueError: As for `named_optimizer`.
  """
  # `named_optimizer` passes these options only to Muon: no other optimizer of
  # optax has arguments of these names.
  muon_options: dict[str, Any] = {
    "muon_weight_dimension_numbers": block_matrices,
    "consistent_rms": _MUON_UPDATE_RMS,
  }
  # Muon gives the leaves that are not matrices to its own AdamW. With these
  # options they get the steps of AdamW, except that Muon's AdamW has Nesterov
  # momentum.
  for option, value in options.items():
    muon_options[f"adam_{option}"] = value
  # Muon calls its momentum `beta`. Other optimizers with a `beta`, e.g. signum,
  # have no `momentum`, so they are refused if it is in `needed`.
  if options.get("momentum"):
    muon_options["beta"] = options["momentum"]
  optimizer = named_optimizer(name, schedule, needed, **options, **muon_options)
  if name == "muon":
    # Newton-Schulz needs whole matrices, also if devices share the parameters.
    update = on_whole_layers(optimizer.update)
    optimizer = optax.GradientTransformation(optimizer.init, update)
  if not clip_norm:
    return optimizer
  return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)


def block_matrices(params: Tree) -> Tree:
  """Selects the leaves that Muon updates: the matrices of the layers.

  Embedding, head and norms are left to Muon's own AdamW. Layers are below
  "blocks": either stacked in leaves [num_layers, ...], or one by one with the
  keys "0", "1" and so on. Without "blocks", Muon updates all matrices except
  those of an embedding or a head. A matrix belongs to an embedding or a head if
  a name on its path begins or ends with the word "embed", "embedding",
  "embeddings" or "head". Examples are "embed_tokens" and "lm_head", but not
  "MultiHeadAttention_0".

  Source: Jordan et al., 2024, "Muon".

  Args:
    params: Parameters of one replica.

  Returns:
    A tree like `params`. It has the axes of the matrices
    (`MuonDimensionNumbers`) for a leaf that Muon updates, and None for a leaf
    that AdamW updates.

  Raises:
    ValueError: If there are leaves, and none has the shape of a matrix.
  """
  leaves = leaves_by_path(params)
  has_blocks = any(path.startswith(f"{BLOCKS}/") for path in leaves)

  def is_matrix(path: str, leaf: Any) -> bool:
    # Scales of norms are [model_dim], or [num_layers, model_dim] if stacked.
    num_axes = 3 if is_stacked(path) else 2
    return leaf.ndim == num_axes

  def axes(keys: Any, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
    path = path_name(keys)
    if has_blocks:
      is_in_layer = path.startswith(f"{BLOCKS}/")
    else:
      is_in_layer = not any(map(_is_outside, path.split("/")))
    if not is_in_layer or not is_matrix(path, leaf):
      return None
    first_axis = 1 if is_stacked(path) else 0
    return optax.contrib.MuonDimensionNumbers(first_axis, first_axis + 1)

  # A tree without leaves passes: `optax.tree.map_params` calls the `init` of an
  # optimizer with such a tree.
  has_matrix = any(is_matrix(path, leaf) for path, leaf in leaves.items())
  require(
    not leaves or has_matrix,
    "optimizer='muon' finds no matrix in the parameters: take 'adamw'",
  )
  return jax.tree_util.tree_map_with_path(axes, params)


def _is_outside(name: str) -> bool:
  """Returns whether a name on a path is that of an embedding or a head.

  Examples of such names: "lm_head", "Embed_0" and "embedTokens".
  """
  words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
  ends = {word.lower() for word in words[:1] + words[-1:]}
  return not ends.isdisjoint(_OUTSIDE)


def advanced(state: Tree, num_steps: Index) -> Tree:
  """Returns an optimizer's state with advanced learning rate schedules.

  Other counts in the state, e.g. Adam's, stay as they are.

  Args:
    state: State of an optimizer of optax. Its schedules are the nodes of type
      `optax.ScaleByScheduleState`.
    num_steps: Number of inner steps by which the schedules advance.
  """

  def is_schedule(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)

  def advance(node: Any) -> Any:
    if not is_schedule(node):
      return node
    return node._replace(count=node.count + num_steps)

  return jax.tree.map(advance, state, is_leaf=is_schedule)
