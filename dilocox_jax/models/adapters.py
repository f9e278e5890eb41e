"""Divides a model into trained and frozen leaves, and adds low-rank adapters.

Either some leaves of the model are trained, or only adapters are: small
matrices beside the kernels of the model, which is frozen. Frozen leaves have no
optimizer state, no outer parameters and no residual of error feedback, and they
are never sent. A device with several replicas holds them once.
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
from dilocox_jax.models.families import FAMILIES, family_of
from dilocox_jax.models.tensor_files import (
  TensorShape,
  check_no_other_checkpoint,
  write_tensors,
)
from dilocox_jax.models.weights import save_json
from dilocox_jax.plan.model.adapters import DOWN, UP, Lora
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.trees import (
  Tree,
  in_memory,
  leaves_by_path,
  nested,
  shapes_by_path,
  tree_digest,
)

# (path of the kernel in its layer, x [T, I], kernel [I, O]) -> x @ kernel.
Multiply = Callable[[str, Array, Array], Array]
_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"


@dataclasses.dataclass(frozen=True)
class Adaptation:
  """How a model is divided into trained and frozen leaves, and joined again.

  Attributes:
    init: (key) -> first values of the trained leaves. If adapters are trained,
      the key draws `lora_a`, and `lora_b` is 0. Otherwise the first values are
      those in the model, and the key is not used.
    frozen: Frozen leaves. Each is an array, or a `LazyArray` whose values are
      still in a file.
    join: (trained, frozen) -> parameters of the model. Adapters lie beside
      their kernels, where `split_layer` finds them, with `lora_b` multiplied by
      the scale of the adapters.
    fold: (trained, frozen) -> parameters of an equal model without adapters:
      each scaled product of adapters is added to its kernel. If no adapters are
      trained, the result is that of `join`, in memory.
  """

  init: Callable[[Array], Tree]
  frozen: Tree
  join: Callable[[Tree, Tree], Tree]
  fold: Callable[[Tree, Tree], Tree]

  @functools.cached_property
  def digest(self) -> str:
    """Digest of the frozen leaves, 16 hex digits.

    It depends on their paths, values, dtypes and shapes.
    """
    # Equal arrays under other names may be another model.
    paths = "\n".join(leaves_by_path(self.frozen))
    return tree_digest([self.frozen], f"frozen\n{paths}")


def _adapters(lora: Lora, base: Tree) -> Adaptation:
  """Returns an `Adaptation` that trains LoRA adapters and freezes `base`."""
  # Shapes of all `lora_a` and `lora_b` by path.
  shapes = lora.shapes(shapes_by_path(base))

  def init(key: Array) -> Tree:
    leaves = {}
    # Sorted, so that a key gives the same values for any order of `shapes`.
    for path, shape in sorted(shapes.items()):
      leaves[path] = jnp.zeros(shape)
      if path.endswith(DOWN):
        key, leaf_key = jax.random.split(key)
        # `shape` is [layers, inputs, rank].
        bound = 1 / math.sqrt(shape[1])
        leaves[path] = jax.random.uniform(
          leaf_key, shape, jnp.float32, minval=-bound, maxval=bound
        )
    return nested(leaves)

  def join(trained: Tree, frozen: Tree) -> Tree:
    scaled = jax.tree_util.tree_map_with_path(
      lambda path, leaf: lora.scale * leaf if path[-1].key == UP else leaf,
      trained,
    )
    return merged(scaled, frozen)

  def fold(trained: Tree, frozen: Tree) -> Tree:
    adapters = leaves_by_path(trained)
    leaves = leaves_by_path(in_memory(frozen))
    for path, down in adapters.items():
      if path.endswith(DOWN):
        prefix = path.removesuffix(DOWN)
        up = adapters[prefix + UP]
        kernel = leaves[f"{prefix}kernel"]
        # `+=` would change the frozen kernel itself.
        leaves[f"{prefix}kernel"] = kernel + lora.scale * down @ up
    return nested(leaves)

  return Adaptation(init=init, frozen=base, join=join, fold=fold)


def export(
  lora: Lora,
  folder: pathlib.Path,
  shape: ModelShape,
  adapters: Tree,
  base: str = "",
) -> None:
  """Writes adapters in the format of the library `peft`.

  Args:
    lora: Rank, scale and places of the adapters.
    folder: Folder to write into, which must exist.
    shape: Sizes of the model.
    adapters: Trained adapters, a nested dict. `lora_a` is [layers, inputs,
      rank], and `lora_b` is [layers, rank, outputs].
    base: Name or folder of the model's own checkpoint, which
      `adapter_config.json` will name.

  Raises:
    ValueError: If no family of checkpoints has such a model, or if the folder
      has files of another checkpoint.
  """
  family = family_of(shape)
  modules = FAMILIES[family].module_names
  # For example "query" is "q_proj" in this family of checkpoints.
  module_names = {
    path.split("/")[-1]: module.split(".")[-1]
    for path, module in modules.items()
  }
  tensors = {}
  for path, leaf in leaves_by_path(adapters).items():
    kernel_path, _, name = path.rpartition("/")
    kind = "lora_A" if name == DOWN else "lora_B"
    # `peft` has matrices [outputs, inputs], the decoder [inputs, outputs].
    for layer, matrix in enumerate(np.asarray(leaf)):
      module = modules[kernel_path].format(layer)
      tensor_name = f"base_model.model.{module}.{kind}.weight"
      tensors[tensor_name] = np.ascontiguousarray(matrix.T)
  settings = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": lora.rank,
    "lora_alpha": lora.alpha,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": [module_names[name] for name in lora.names],
  }
  check_no_other_checkpoint(folder, {_CONFIG, _TENSORS})
  # The config is written last, so that a folder with a config is complete.
  (folder / _CONFIG).unlink(missing_ok=True)
  tensor_shapes = [
    TensorShape(name, array.dtype, array.shape)
    for name, array in tensors.items()
  ]
  write_tensors(folder / _TENSORS, tensor_shapes, iter(tensors.items()))
  save_json(folder / _CONFIG, settings)


def adapt(trainable: Any, base: Tree) -> Adaptation:
  """Divides a model into trained and frozen leaves.

  Args:
    trainable: A `Lora` of rank 1 or more: adapters are trained, and the whole
      model is frozen. Or a function (path of a leaf, e.g.
      "blocks/mlp/up/kernel") -> whether this leaf is trained.
    base: Parameters of the model, a nested dict.

  Raises:
    TypeError: If `trainable` is neither a `Lora` nor a function.
    ValueError: If the function chooses no leaf, or if the `Lora` names a matrix
      product that the model lacks.
  """
  if isinstance(trainable, Lora):
    return _adapters(trainable, base)
  if not callable(trainable):
    raise TypeError(
      f"trainable={trainable!r} must be a dilocox_jax.Lora, or a function of "
      "the path of a leaf"
    )
  trained_leaves = {}
  frozen_leaves = {}
  for path, leaf in leaves_by_path(base).items():
    if trainable(path):
      trained_leaves[path] = leaf
    else:
      frozen_leaves[path] = leaf
  require(bool(trained_leaves), "trainable: it is true for no leaf")
  first_values = in_memory(nested(trained_leaves))

  def fold(trained: Tree, frozen: Tree) -> Tree:
    return merged(trained, in_memory(frozen))

  return Adaptation(
    init=lambda key: jax.tree.map(jnp.asarray, first_values),
    frozen=nested(frozen_leaves),
    join=merged,
    fold=fold,
  )


def merged(first: Tree, second: Tree) -> Tree:
  """Returns the union of two nested dicts; at equal paths `second` wins."""
  return nested(leaves_by_path(first) | leaves_by_path(second))


def split_layer(layer: Tree) -> tuple[Tree, Multiply | None]:
  """Separates the adapters of a layer from its other leaves.

  Args:
    layer: Leaves of one layer, as `Adaptation.join` returns them.

  Returns:
    The layer without adapters, and a function (path of a kernel in the layer,
    x, kernel) -> product. The product is x @ kernel. If the kernel has
    adapters, (x @ lora_a) @ lora_b is added. If no kernel of the layer has
    adapters, the function is None.
  """
  leaves = leaves_by_path(layer)
  adapters = {}
  for path, down in leaves.items():
    if path.endswith(f"/{DOWN}"):
      prefix = path.removesuffix(DOWN)
      adapters[prefix] = (down, leaves[prefix + UP])
  if not adapters:
    return layer, None

  def multiply(path: str, x: Array, kernel: Array) -> Array:
    product = x @ kernel
    prefix = path.removesuffix("kernel")
    if prefix not in adapters:
      return product
    down, up = adapters[prefix]
    down = down.astype(x.dtype)
    up = up.astype(x.dtype)
    return product + (x @ down) @ up

  layer_leaves = {
    path: leaf for path, leaf in leaves.items() if not path.endswith((DOWN, UP))
  }
  return nested(layer_leaves), multiply
