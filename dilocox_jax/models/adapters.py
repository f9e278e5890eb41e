"""Trains a part of a model, or low-rank adapters beside it; the rest is frozen.

What is frozen exists once on a device, whatever the number of replicas. It has
no optimizer, no outer parameters and no residual, and it is never sent.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dilocox_jax import files
from dilocox_jax.checks import check_limits, extra_package, limited, require
from dilocox_jax.models.weights import FAMILIES, family_of
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.trees import Tree, leaves_by_path, nested

# (path of the kernel in its layer, x [T, I], kernel [I, O]) -> x @ kernel.
Multiply = Callable[[str, Array, Array], Array]
DOWN, UP = "lora_a", "lora_b"  # Beside the kernel: [I, R] and [R, O].
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"


class Adaptation(NamedTuple):
  """What is trained of a model, and how it makes a whole with the rest.

  Attributes:
    init: (key) -> what is trained.
    frozen: The rest, arrays of the host.
    join: (trained, frozen) -> parameters of the model.
    fold: Likewise, but with the tree of a model without adapters.
    lora: The adapters, if these are trained.
  """

  init: Callable[[Array], Tree]
  frozen: Tree
  join: Callable[[Tree, Tree], Tree]
  fold: Callable[[Tree, Tree], Tree]
  lora: Any = None


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters beside products of the built-in decoder's layers.

  x @ kernel becomes x @ kernel + (alpha / rank) (x @ a) @ b, with b = 0 first.

  Source: Hu et al., 2021, arXiv 2106.09685.

  Attributes:
    rank: R, the columns of a.
    alpha: Scale of the adapters, times the rank.
    products: Names of the products: query, key, value, output, gate, up, down.
  """

  rank: int = limited(8, at_least=1)
  alpha: float = limited(16.0, above=0, below=math.inf)
  products: tuple[str, ...] = ("query", "value")

  def __post_init__(self):
    check_limits(self)

  def adapt(self, base: Tree) -> Adaptation:
    """Returns the adapters of a model.

    Args:
      base: Its parameters, a nested dict with "blocks/.../NAME/kernel".

    Raises:
      ValueError: If it lacks a product.
    """
    flat = leaves_by_path(base)
    kernels = {
      path.removesuffix("/kernel"): leaf
      for path, leaf in flat.items()
      if path.startswith("blocks/")
      and path.endswith(tuple(f"/{name}/kernel" for name in self.products))
    }
    lacking = set(self.products) - {path.split("/")[-1] for path in kernels}
    require(
      not lacking,
      f"Lora: the model has no product {min(lacking, default='')!r}",
    )

    def init(key: Array) -> Tree:
      made = {}
      for path, kernel in sorted(kernels.items()):
        key, own = jax.random.split(key)
        layers, inputs, outputs = kernel.shape
        bound = 1 / math.sqrt(inputs)
        shape = layers, inputs, self.rank
        down = jax.random.uniform(own, shape, jnp.float32, -bound, bound)
        made[f"{path}/{DOWN}"] = down
        made[f"{path}/{UP}"] = jnp.zeros((layers, self.rank, outputs))
      return nested(made)

    return Adaptation(init, base, self._join, self.fold, self)

  @property
  def _scale(self) -> float:
    return self.alpha / self.rank

  def _join(self, trained: Tree, frozen: Tree) -> Tree:
    scaled = jax.tree_util.tree_map_with_path(
      lambda path, leaf: self._scale * leaf if path[-1].key == UP else leaf,
      trained,
    )
    return joined(scaled, frozen)

  def fold(self, trained: Tree, frozen: Tree) -> Tree:
    """Returns parameters without adapters that compute the same."""
    adapters = leaves_by_path(trained)
    flat = leaves_by_path(frozen)
    for path, down in adapters.items():
      if path.endswith(DOWN):
        above = path.removesuffix(DOWN)
        kernel, up = flat[f"{above}kernel"], adapters[above + UP]
        # Not `+=`, which would change the frozen kernel itself.
        flat[f"{above}kernel"] = kernel + self._scale * down @ up
    return nested(flat)

  def export(
    self,
    folder: pathlib.Path,
    shape: ModelShape,
    adapters: Tree,
    base: str = "",
  ) -> None:
    """Writes adapters as the library `peft` reads them.

    Args:
      folder: Folder, which is made if it is missing.
      shape: Sizes of the model.
      adapters: What was trained.
      base: Name or folder of the model's checkpoint, for the record.

    Raises:
      ValueError: If no family of checkpoints has such a model.
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
      "r": self.rank,
      "lora_alpha": self.alpha,
      "lora_dropout": 0.0,
      "bias": "none",
      "target_modules": [names[product] for product in self.products],
    }
    folder.mkdir(parents=True, exist_ok=True)
    library = extra_package("safetensors.numpy", "an adapter", "weights")
    with files.replaced(folder / _TENSORS) as file:
      library.save_file(tensors, file.name, {"format": "pt"})
    with files.replaced(folder / _CONFIG) as file:
      file.write(json.dumps(settings, indent=2).encode() + b"\n")


def adapt(trainable: Any, base: Tree) -> Adaptation:
  """Returns what is trained of a model.

  Args:
    trainable: Adapters, or a function of the path of a leaf, such as
      "blocks/mlp/up/kernel", that says whether it is trained.
    base: Parameters of the model, a nested dict.

  Raises:
    TypeError: If it is neither.
    ValueError: If nothing is trained.
  """
  if isinstance(trainable, Lora):
    return trainable.adapt(base)
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
