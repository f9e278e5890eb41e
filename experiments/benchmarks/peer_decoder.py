"""The decoder of `models.transformer`, and rounds of DiLoCo, in PyTorch.

The bench `peers` compares our rounds with these, so they are what PyTorch does
best: fused attention, fused AdamW, all cores, no wait for the host in a round.
PyTorch is loaded only when something here is called.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dilocox_jax import files
from dilocox_jax.checks import extra_package, require
from dilocox_jax.config import RunConfig
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.plan.schedule.fragments import BLOCKS

Tensor = Any  # torch.Tensor; PyTorch may not be installed.
Tensors = dict[str, Tensor]


def load_torch() -> Any:
  """Returns the module `torch`.

  Raises:
    ValueError: If it is not installed. The message is one line.
  """
  return extra_package("torch", "the bench peers (make bench-peers)", "peers")


def peer_params(params: Mapping[str, np.ndarray]) -> Tensors:
  """Copies our parameters into the layout that PyTorch multiplies fastest.

  Args:
    params: Parameters by path; those of blocks are stacked [num_layers, ...].

  Returns:
    Parameters by path, with one entry for each layer ("blocks/0/mlp/..."), and
    kernels as in `torch.nn.Linear`: [outputs, inputs].
  """
  torch = load_torch()
  copies = {}
  for path, leaf in params.items():
    top, _, rest = path.partition("/")
    layers = {path: leaf}
    if top == BLOCKS:
      layers = {f"{top}/{i}/{rest}": layer for i, layer in enumerate(leaf)}
    for name, layer in layers.items():
      layout = layer.T if path.endswith("/kernel") else layer
      copies[name] = torch.tensor(np.ascontiguousarray(layout))
  return copies


def peer_loss(shape: ModelShape, length: int) -> Callable[..., Tensor]:
  """Builds the loss of the same decoder, in fp32.

  Args:
    shape: Sizes of a model with rotary positions, RMS norms and SwiGLU.
    length: Number of tokens that are predicted in a sequence, L.

  Returns:
    (parameters as of `peer_params`, int64 tokens [B, L + 1]) -> mean loss in
    nats a token.

  Raises:
    ValueError: If the model has other parts.
  """
  sizes = {"model_dim", "ff_dim", "head_dim", "rope_base", "norm_epsilon"}
  sizes |= {"num_layers", "num_heads", "vocab_size"}
  fields = dataclasses.fields(shape)
  others = [f for f in fields if f.name not in sizes]
  odd = [f.name for f in others if getattr(shape, f.name) != f.default]
  require(not odd, f"the decoder in PyTorch has no {', '.join(odd)}: unset it")
  torch = load_torch()
  functional = torch.nn.functional
  width = shape.head_width
  exponents = torch.arange(0, width, 2) / width
  angles = torch.outer(torch.arange(length), shape.rope_base**-exponents)
  cos, sin = angles.cos(), angles.sin()

  def norm(x: Tensor, scale: Tensor) -> Tensor:
    return functional.rms_norm(x, scale.shape, scale, shape.norm_epsilon)

  def rotated(x: Tensor) -> Tensor:  # [B, N, L, K]
    first, second = x.chunk(2, dim=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    return torch.cat(parts, dim=-1)

  def layer(params: Tensors, path: str, x: Tensor) -> Tensor:
    def product(name: str, x: Tensor) -> Tensor:
      return functional.linear(x, params[f"{path}/{name}/kernel"])

    def heads(name: str) -> Tensor:
      y_BxLxNxK = product(name, y).unflatten(-1, (shape.num_heads, width))
      return y_BxLxNxK.transpose(1, 2)

    y = norm(x, params[f"{path}/attention/norm/scale"])
    mixed = functional.scaled_dot_product_attention(
      rotated(heads("attention/query")),
      rotated(heads("attention/key")),
      heads("attention/value"),
      is_causal=True,
    )
    x = x + product("attention/output", mixed.transpose(1, 2).flatten(2))
    y = norm(x, params[f"{path}/mlp/norm/scale"])
    hidden = functional.silu(product("mlp/gate", y)) * product("mlp/up", y)
    return x + product("mlp/down", hidden)

  def loss(params: Tensors, tokens: Tensor) -> Tensor:
    x = functional.embedding(tokens[:, :-1], params["embed/embedding"])
    for number in range(shape.num_layers):
      x = layer(params, f"{BLOCKS}/{number}", x)
    x = norm(x, params["final_norm/scale"])
    logits = functional.linear(x, params["head/kernel"])
    return functional.cross_entropy(
      logits.flatten(0, 1), tokens[:, 1:].flatten()
    )

  return loss


class PeerRounds:
  """DiLoCo of a config in PyTorch: replicas in turn, in one process."""

  def __init__(
    self,
    config: RunConfig,
    rates: Sequence[float],
    params: Tensors,
    compiled: bool,
  ):
    """Makes the replicas and all optimizers.

    Args:
      config: Config of the run: AdamW inside, SGD outside.
      rates: Learning rate of every inner step; the last one stays.
      params: Outer parameters to start from.
      compiled: Whether `torch.compile` compiles the loss and its gradient.
    """
    torch = load_torch()
    inner, outer = config.inner, config.outer
    self._torch, self._rates, self._step = torch, rates, 0
    self._clip_norm = inner.clip_norm
    loss = peer_loss(config.model.shape, config.data.sequence_length)
    if compiled:
      loss = torch.compile(loss, fullgraph=True, dynamic=False)
    self._loss = loss
    self._outer = {k: v.clone().requires_grad_() for k, v in params.items()}
    self._replicas = [
      {k: v.clone().requires_grad_() for k, v in params.items()}
      for _ in range(config.mesh.num_replicas)
    ]
    self._optimizers = [
      torch.optim.AdamW(
        list(replica.values()),
        betas=(inner.b1, inner.b2),
        weight_decay=inner.weight_decay,
        fused=True,
      )
      for replica in self._replicas
    ]
    self._outer_optimizer = torch.optim.SGD(
      list(self._outer.values()),
      lr=outer.learning_rate,
      momentum=outer.momentum,
      nesterov=outer.nesterov,
      fused=True,
    )

  def run_round(self, batches: Tensor) -> np.ndarray:
    """Runs a round, its outer step included.

    Args:
      batches: Tokens [M, H, B, L + 1], int64.

    Returns:
      Losses [M, H].
    """
    losses = [self._inner_steps(m, steps) for m, steps in enumerate(batches)]
    self._step += batches.shape[1]
    with self._torch.no_grad():
      for name, outer in self._outer.items():
        inner = [replica[name] for replica in self._replicas]
        outer.grad = outer - sum(inner) / len(inner)
      self._outer_optimizer.step()
      for replica in self._replicas:
        for name, outer in self._outer.items():
          replica[name].copy_(outer)
    return self._torch.stack(losses).numpy()

  def _inner_steps(self, number: int, batches: Tensor) -> Tensor:
    replica, optimizer = self._replicas[number], self._optimizers[number]
    leaves, losses = list(replica.values()), []
    for h, batch in enumerate(batches):
      rate = self._rates[min(self._step + h, len(self._rates) - 1)]
      optimizer.param_groups[0]["lr"] = rate
      loss = self._loss(replica, batch)
      loss.backward()
      if self._clip_norm:
        self._torch.nn.utils.clip_grad_norm_(leaves, self._clip_norm)
      optimizer.step()
      optimizer.zero_grad()
      losses.append(loss.detach())
    return self._torch.stack(losses)


def peer_codec(
  name: str, block_size: int, values: Sequence[np.ndarray], compiled: bool
) -> Callable[[], Tensor]:
  """Builds what an all-reduce in few bits computes between two replicas.

  Nothing is sent: values are encoded, decoded and averaged.

  Args:
    name: "float16", or "int8": a scale for each block, round to the nearest.
    block_size: Values that share a scale.
    values: Values of each replica.
    compiled: Whether `torch.compile` compiles both halves.
  """
  torch = load_torch()

  def to_half(x: Tensor) -> tuple[Tensor, ...]:
    return (x.half(),)

  def to_codes(x: Tensor) -> tuple[Tensor, ...]:
    blocks = x.view(-1, block_size)
    scales = (blocks.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (blocks / scales.float()).round().clamp(-127, 127)
    return codes.to(torch.int8), scales

  encode_one = {"float16": to_half, "int8": to_codes}[name]

  def encode(tensors: list[Tensor]) -> list[tuple[Tensor, ...]]:
    return [encode_one(x) for x in tensors]

  def mean(wires: list[tuple[Tensor, ...]]) -> Tensor:
    first, second = (
      math.prod((wire.float() for wire in wires_of_one), start=1)
      for wires_of_one in wires
    )
    return (first + second) / 2

  if compiled:
    encode, mean = torch.compile(encode), torch.compile(mean)
  tensors = [torch.tensor(x) for x in values]
  return lambda: mean(encode(tensors))


def peer_checkpoint(
  state: Mapping[str, np.ndarray], path: pathlib.Path
) -> tuple[Callable[[], None], Callable[[], Tensors]]:
  """Returns functions that save a state to a path, and load it again.

  A save is complete when the disk has it, under its name.
  """
  torch = load_torch()
  tensors = {name: torch.tensor(leaf) for name, leaf in state.items()}

  def save() -> None:
    with files.replaced(path) as file:
      torch.save(tensors, file)

  return save, lambda: torch.load(path, weights_only=True)
