"""A model outside the package: tokens see the mean of those before them."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dilocox_jax.models.transformer import Model
from dilocox_jax.plan.choices import Lazy
from dilocox_jax.plan.model.presets import register_model
from dilocox_jax.plan.model.shapes import ModelShape, parameter_shapes


@dataclasses.dataclass(frozen=True)
class RunningMeanShape(ModelShape):
  """Sizes of the model; heads and the MLP have no part in it."""

  builder: ClassVar[Lazy] = "tests.extensions.running_mean:build_model"

  def block_shapes(self) -> dict[str, tuple[int, ...]]:
    """Returns the two matrices of a layer."""
    square = (self.model_dim, self.model_dim)
    return {"mean/kernel": square, "own/kernel": square}


def build_model(
  shape: ModelShape, *, dtype: Any = jnp.float32, **layers: Any
) -> Model:
  """Builds the model's functions; allocates nothing."""
  del layers  # Ways to run the layers, such as `unroll`.

  def init(key):
    params: dict[str, Any] = {}
    for path, leaf in parameter_shapes(shape).items():
      key, used = jax.random.split(key)
      scale = 1 / math.sqrt(shape.model_dim)
      values = scale * jax.random.normal(used, leaf, jnp.float32)
      *above, name = path.split("/")
      part = params
      for folder in above:
        part = part.setdefault(folder, {})
      part[name] = values
    params["final_norm"]["scale"] = jnp.ones((shape.model_dim,))
    return params

  def embed(params, tokens):
    return params["embed"]["embedding"][tokens.reshape(-1)].astype(dtype)

  def block(layer, x, length, multiply=None):
    assert multiply is None, "this model has no pipeline"
    rows = x.reshape(-1, length, x.shape[-1])
    count = jnp.arange(1, length + 1, dtype=x.dtype)[None, :, None]
    mean = (jnp.cumsum(rows, axis=1) / count).reshape(x.shape)
    mixed = mean @ layer["mean"]["kernel"] + x @ layer["own"]["kernel"]
    return x + jnp.tanh(mixed)

  def logits(params, x):
    return (x * params["final_norm"]["scale"][None]) @ params["head"]["kernel"]

  def apply(params, tokens):
    def layer(x, leaves):
      return block(leaves, x, tokens.shape[1]), None

    x, _ = jax.lax.scan(layer, embed(params, tokens), params["blocks"])
    return logits(params, x).reshape(*tokens.shape, -1)

  return Model(shape, init, apply, embed, block, logits)


def register() -> None:
  """Makes "running_mean" a name for `model.preset`."""
  register_model("running_mean", RunningMeanShape(2, 16, 2, 24, 256))
