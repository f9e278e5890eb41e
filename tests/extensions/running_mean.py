"""A model outside the package: tokens see the mean of those before them.

Its layers can be divided among pipeline stages.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

import dilocox_jax as dx


def build_model(shape: dx.ModelShape, *, dtype=jnp.float32, **how) -> dx.Model:
  """Builds the model's functions; allocates nothing."""
  del how  # Ways to run the layers, such as `unroll`.

  def init(key):
    params: dict[str, Any] = {}
    for path, leaf in dx.parameter_shapes(shape).items():
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

  # A pipeline splits the gradient of every product that goes through multiply.
  def block(layer, x, length, multiply=lambda path, x, kernel: x @ kernel):
    rows = x.reshape(-1, length, x.shape[-1])
    count = jnp.arange(1, length + 1, dtype=x.dtype)[None, :, None]
    mean = (jnp.cumsum(rows, axis=1) / count).reshape(x.shape)
    mixed = multiply("mean/mixing", mean, layer["mean"]["mixing"])
    mixed += multiply("own/mixing", x, layer["own"]["mixing"])
    return x + jnp.tanh(mixed)

  def logits(params, x):
    return (x * params["final_norm"]["scale"][None]) @ params["head"]["kernel"]

  def apply(params, tokens):
    def layer(x, leaves):
      return block(leaves, x, tokens.shape[1]), None

    x, _ = jax.lax.scan(layer, embed(params, tokens), params["blocks"])
    return logits(params, x).reshape(*tokens.shape, -1)

  return dx.Model(shape, init, apply, embed, block, logits)


@dataclasses.dataclass(frozen=True)
class RunningMeanShape(dx.ModelShape):
  """Sizes of the model; heads and the MLP have no part in it."""

  builder = build_model

  def block_shapes(self) -> dict[str, tuple[int, ...]]:
    """Returns the two matrices of a layer."""
    square = (self.model_dim, self.model_dim)
    return {"mean/mixing": square, "own/mixing": square}


def register() -> None:
  """Makes "running_mean" a name for `model.preset`."""
  dx.register_model("running_mean", RunningMeanShape(2, 16, 2, 24, 256))
