"""The decoder as PyTorch users write it, to compare the time of a step.

For models with rotary positions, RMS norms and SwiGLU it computes the same
function of the same parameters as this project's decoder, with PyTorch's fused
attention. PyTorch is loaded only when a function is called.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dilocox_jax.checks import extra_package
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.plan.schedule.fragments import BLOCKS

Tensors = dict[str, Any]


def torch() -> Any:
  """Imports and returns PyTorch; raises ValueError if it is not installed."""
  return extra_package("torch", "a comparison with PyTorch", "peers")


def peer_params(params: Mapping[str, np.ndarray]) -> Tensors:
  """Copies this project's parameters, arrays by path, to PyTorch's tensors.

  An array of all layers becomes one tensor for each layer, e.g.
  "blocks/0/mlp/up/kernel" and "blocks/1/mlp/up/kernel". Kernels become
  [outputs, inputs].
  """
  copies = {}
  for path, leaf in params.items():
    top, _, path_in_layer = path.partition("/")
    layers = {path: leaf}
    if top == BLOCKS:
      layers = {
        f"{top}/{i}/{path_in_layer}": layer for i, layer in enumerate(leaf)
      }
    for name, layer in layers.items():
      layout = layer.T if path.endswith("/kernel") else layer
      copies[name] = torch().tensor(np.ascontiguousarray(layout))
  return copies


def peer_loss(
  shape: ModelShape, length: int, device: str = "cpu"
) -> Callable[..., Any]:
  """Returns the loss function of the decoder in PyTorch.

  Args:
    shape: Sizes of a model with rotary positions, RMS norms and SwiGLU.
    length: Number of tokens that are predicted in a sequence, L.
    device: Where parameters and tokens are, "cpu" or "cuda".

  Returns:
    A function (parameters, tokens [B, L + 1]) -> mean cross-entropy (nats a
    token).
  """
  library = torch()
  functional = library.nn.functional
  width = shape.head_width
  exponents = library.arange(0, width, 2, device=device) / width
  positions = library.arange(length, device=device)
  angles = library.outer(positions, shape.rope_base**-exponents)
  cos = angles.cos()
  sin = angles.sin()

  def norm(x, scale):
    return functional.rms_norm(x, scale.shape, scale, shape.norm_epsilon)

  def rotated(x):  # [B, N, L, K]
    first, second = x.chunk(2, dim=-1)
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    halves = [rotated_first, rotated_second]
    return library.cat(halves, dim=-1).to(x.dtype)

  def layer(params: Tensors, path: str, x):
    def product(name: str, x):
      return functional.linear(x, params[f"{path}/{name}/kernel"])

    def heads(name: str, y):
      y_BxLxNxK = product(name, y).unflatten(-1, (-1, width))
      return y_BxLxNxK.transpose(1, 2)

    y = norm(x, params[f"{path}/attention/norm/scale"])
    mixed = functional.scaled_dot_product_attention(
      rotated(heads("attention/query", y)),
      rotated(heads("attention/key", y)),
      heads("attention/value", y),
      is_causal=True,
      enable_gqa=shape.kv_heads < shape.num_heads,
    )
    x = x + product("attention/output", mixed.transpose(1, 2).flatten(2))
    y = norm(x, params[f"{path}/mlp/norm/scale"])
    hidden = functional.silu(product("mlp/gate", y)) * product("mlp/up", y)
    return x + product("mlp/down", hidden)

  def loss(params: Tensors, tokens):
    x = functional.embedding(tokens[:, :-1], params["embed/embedding"])
    for number in range(shape.num_layers):
      x = layer(params, f"{BLOCKS}/{number}", x)
    x = norm(x, params["final_norm/scale"])
    logits = functional.linear(x, params["head/kernel"]).flatten(0, 1)
    return functional.cross_entropy(logits, tokens[:, 1:].flatten())

  return loss
