"""Settings and shapes of the low-rank adapters of the built-in decoder.

This module needs no JAX. `models.adapters` builds and trains the adapters.
"""

import dataclasses
import math
from collections.abc import Mapping

from dilocox_jax.checks import check_limits, check_types, known, limited
from dilocox_jax.field_facts import ReadIf, setting

# Names of the two adapter matrices of a kernel [I, O].
DOWN = "lora_a"  # [I, R]
UP = "lora_b"  # [R, O]


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters of matrix products in the layers (LoRA).

  The product x @ kernel becomes x @ kernel + (alpha / rank) (x @ a) @ b. Only a
  and b are trained, and the model's own parameters are frozen. At first b is 0,
  so the model computes the same as without adapters.

  Source: Hu et al., 2021, arXiv 2106.09685.

  Attributes:
    rank: Number of columns of a and of rows of b; 0: there are no adapters, and
      all parameters are trained.
    alpha: alpha in the formula.
    products: Names of the matrix products of a layer that have adapters, joined
      by commas, e.g. "query,value". The names are query, key, value, output,
      gate, up and down.
  """

  # R, columns of a and rows of b; 0: no adapters, all parameters are trained.
  rank: int = limited(0, at_least=0)
  # alpha in the formula: the scale of the adapters, times the rank.
  alpha: float = setting(
    16.0, above=0, below=math.inf, read_if=ReadIf("lora.rank", bool)
  )
  # Which products of a layer have adapters, joined by commas: query, key,
  # value, output, gate, up, down.
  products: str = setting("query,value", read_if=ReadIf("lora.rank", bool))

  def __post_init__(self):
    """Raises ValueError if a field has a wrong type or is out of limits."""
    check_types(self, "lora.")
    check_limits(self, "lora.")

  @property
  def scale(self) -> float:
    """Factor alpha / rank by which the adapters are scaled; needs rank > 0."""
    return self.alpha / self.rank

  @property
  def names(self) -> list[str]:
    """Names of the matrix products with adapters, e.g. ["query", "value"]."""
    return self.products.replace(" ", "").split(",")

  def shapes(
    self, model: Mapping[str, tuple[int, ...]]
  ) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every leaf of the adapters, by path.

    For example, "blocks/attention/query/lora_a" has the shape [layers, inputs,
    rank], and "blocks/attention/query/lora_b" the shape [layers, rank,
    outputs].

    Args:
      model: Shapes of the model's leaves by path. The kernel of a product is at
        "blocks/.../NAME/kernel", [layers, inputs, outputs].

    Raises:
      ValueError: If `products` has a name that the model lacks.
    """
    kernel_shapes = {
      path.removesuffix("/kernel"): shape
      for path, shape in model.items()
      if path.startswith("blocks/") and path.endswith("/kernel")
    }
    path_of_name = {path.split("/")[-1]: path for path in kernel_shapes}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in self.names:
      known("product of lora.products", name, path_of_name)
      path = path_of_name[name]
      layers, inputs, outputs = kernel_shapes[path]
      shapes[f"{path}/{DOWN}"] = (layers, inputs, self.rank)
      shapes[f"{path}/{UP}"] = (layers, self.rank, outputs)
    return shapes
