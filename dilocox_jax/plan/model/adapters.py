"""Which low-rank adapters stand beside the products of the built-in decoder.

Like the shapes of a model this needs no JAX, so plans and estimates of memory
know adapters too. `models.adapters` trains them.
"""

import dataclasses
import math
from collections.abc import Mapping

from dilocox_jax.checks import check_limits, known, limited
from dilocox_jax.field_facts import ReadIf, setting

DOWN, UP = "lora_a", "lora_b"  # Beside the kernel: [I, R] and [R, O].


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters beside products of the layers; the rest is frozen.

  x @ kernel becomes x @ kernel + (alpha / rank) (x @ a) @ b, with b = 0 first.

  Source: Hu et al., 2021, arXiv 2106.09685.
  """

  # R, columns of a and rows of b; 0: no adapters, all parameters are trained.
  rank: int = limited(0, at_least=0)
  # Scale of the adapters, times the rank.
  alpha: float = setting(
    16.0, above=0, below=math.inf, read_if=ReadIf("lora.rank", bool)
  )
  # Products of a layer: query, key, value, output, gate, up, down.
  products: str = setting("query,value", read_if=ReadIf("lora.rank", bool))

  def __post_init__(self):
    check_limits(self, "lora.")

  @property
  def scale(self) -> float:
    """What the product of an adapter's two matrices is multiplied with."""
    return self.alpha / self.rank

  @property
  def names(self) -> list[str]:
    """Names of the products."""
    return self.products.replace(" ", "").split(",")

  def shapes(
    self, model: Mapping[str, tuple[int, ...]]
  ) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every leaf of the adapters, by path.

    Args:
      model: Shapes of the model's leaves by path, of which the kernels of
        layers are "blocks/.../NAME/kernel" [layers, inputs, outputs].

    Raises:
      ValueError: If the model lacks a product.
    """
    kernels = {
      path.removesuffix("/kernel"): shape
      for path, shape in model.items()
      if path.startswith("blocks/") and path.endswith("/kernel")
    }
    have = {path.split("/")[-1]: path for path in kernels}
    made: dict[str, tuple[int, ...]] = {}
    for name in self.names:
      known("product of lora.products", name, have)
      path = have[name]
      layers, inputs, outputs = kernels[path]
      made[f"{path}/{DOWN}"] = layers, inputs, self.rank
      made[f"{path}/{UP}"] = layers, self.rank, outputs
    return made
