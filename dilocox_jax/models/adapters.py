"""Trains a part of a model, or low-rank adapters beside it; the rest is frozen.

What is frozen exists once on a device, whatever the number of replicas. It has
no optimizer, no outer parameters and no residual, and it is never sent.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dilocox_jax.checks import require
from dilocox_jax.models.tensor_files import check_alone, write_tensors
from dilocox_jax.models.weights import FAMILIES, family_of, save_json
from dilocox_jax.plan.model.adapters import DOWN, UP, Lora
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.trees import (
  Tree,
  leaves_by_path,
  nested,
  shapes_by_path,
  tree_digest,
)

# (path of the kernel in its layer, x [T, I], kernel [I, O]) -> x @ kernel.
Multiply = Callable[[str, Array, Array], Array]
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"


@dataclasses.dataclass(frozen=True)
class Adaptation:
  """What is trained of a model, and how it makes a whole with the rest.

  Attributes:
    init: (key) -> what is trained.
    frozen: The rest, arrays of the host.
    join: (trained, frozen) -> parameters of the model.
    fold: Likewise, but with the tree of a model without adapters.
  """

  init: Callable[[Array], Tree]
  frozen: Tree
  join: Callable[[Tree, Tree], Tree]
  fold: Callable[[Tree, Tree], Tree]

  @functools.cached_property
  def digest(self) -> str:
    """16 hex digits that name what is frozen, values included."""
    return tree_digest([self.frozen], "frozen")


def _adapters(lora: Lora, base: Tree) -> Adaptation:
  """Returns the adapters of a model with these parameters."""
  shapes = lora.shapes(shapes_by_path(base))

  def init(key: Array) -> Tree:
    made = {}
    for path, shape in sorted(shapes.items()):
      made[path] = jnp.zeros(shape)
      if path.endswith(DOWN):
        key, own = jax.random.split(key)
        bound = 1 / math.sqrt(shape[1])
        made[path] = jax.random.uniform(own, shape, jnp.float32, -bound, bound)
    return nested(made)

  def join(trained: Tree, frozen: Tree) -> Tree:
    scaled = jax.tree_util.tree_map_with_path(
      lambda path, leaf: lora.scale * leaf if path[-1].key == UP else leaf,
      trained,
    )
    return joined(scaled, frozen)

  def fold(trained: Tree, frozen: Tree) -> Tree:
    adapters, flat = leaves_by_path(trained), leaves_by_path(frozen)
    for path, down in adapters.items():
      if path.endswith(DOWN):
        above = path.removesuffix(DOWN)
        kernel, up = flat[f"{above}kernel"], adapters[above + UP]
        # Not `+=`, which would change the frozen kernel itself.
        flat[f"{above}kernel"] = kernel + lora.scale * down @ up
    return nested(flat)

  return Adaptation(init, base, join, fold)


def export(
  lora: Lora,
  folder: pathlib.Path,
  shape: ModelShape,
  adapters: Tree,
  base: str = "",
) -> None:
  """Writes adapters as the library `peft` reads them.

  Args:
    lora: Which adapters they are.
    folder: Folder, which exists.
    shape: Sizes of the model.
    adapters: What was trained.
    base: Name or folder of the model's checkpoint, for the record.

  Raises:
    ValueError: If no family of checkpoints has such a model, or the folder has
      files of another checkpoint.
  """
  family = family_of(shape)
  modules = FAMILIES[family].modules
  names = {p.split("/")[-1]: m.split(".")[-1] for p, m in modules.items()}
  tensors = {}
  for path, leaf in leaves_by_path(adapters).items():
    above, _, name = path.rpartition("/")
    kind = "lora_A" if name == DOWN else "lora_B"
    for number, one in enumerate(np.asarray(leaf)):
      module = modules[above].format(number)
      tensors[f"base_model.model.{module}.{kind}.weight"] = (
        np.ascontiguousarray(one.T)
      )
  settings = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": lora.rank,
    "lora_alpha": lora.alpha,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": [names[product] for product in lora.names],
  }
  check_alone(folder, {_CONFIG, _TENSORS})
  (folder / _CONFIG).unlink(missing_ok=True)  # As in `weights`.
  write_tensors(folder / _TENSORS, tensors)
  save_json(folder / _CONFIG, settings)


def adapt(trainable: Any, base: Tree) -> Adaptation:
  """Returns what is trained of a model.

  Args:
    trainable: `Lora`, or a function of the path of a leaf, such as
      "blocks/mlp/up/kernel", that says whether it is trained.
    base: Parameters of the model, a nested dict.

  Raises:
    TypeError: If it is neither.
    ValueError: If nothing is trained.
  """
  if isinstance(trainable, Lora):
    return _adapters(trainable, base)
  if not callable(trainable):
    raise TypeError(
      f"trainable={trainable!r} must be a dilocox_jax.Lora, or a function of "
      "the path of a leaf"
    )
  flat = leaves_by_path(base)
  own = {path: leaf for path, leaf in flat.items() if trainable(path)}
  require(bool(own), "trainable: it is true for no leaf")
  rest = {path: leaf for path, leaf in flat.items() if path not in own}
  trained, frozen = (nested(part) for part in (own, rest))
  return Adaptation(
    lambda key: jax.tree.map(jnp.asarray, trained), frozen, joined, joined
  )


def joined(one: Tree, other: Tree) -> Tree:
  """Returns the leaves of two nested dicts in one."""
  return nested(leaves_by_path(one) | leaves_by_path(other))


def split_layer(layer: Tree) -> tuple[Tree, Multiply | None]:
  """Takes the adapters out of the leaves of a layer.

  Args:
    layer: Leaves of one layer, perhaps with adapters beside kernels.

  Returns:
    The layer without them, and a function (path of a kernel, x, kernel) ->
    product that adds theirs; None for a layer without.
  """
  flat = leaves_by_path(layer)
  pairs = {
    path.removesuffix(DOWN): (leaf, flat[path.removesuffix(DOWN) + UP])
    for path, leaf in flat.items()
    if path.endswith(f"/{DOWN}")
  }
  if not pairs:
    return layer, None

  def with_adapters(path: str, x: Array, kernel: Array) -> Array:
    product, pair = x @ kernel, pairs.get(path.removesuffix("kernel"))
    if pair is None:
      return product
    down, up = (leaf.astype(x.dtype) for leaf in pair)
    return product + (x @ down) @ up

  kept = {k: x for k, x in flat.items() if not k.endswith((DOWN, UP))}
  return nested(kept), with_adapters
