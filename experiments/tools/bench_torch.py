"""The bench `peers`: rounds of DiLoCo beside PyTorch's, eager and compiled.

Both sides train the same decoder from the same parameters on the same tokens,
in turn in one process with all cores. Before rounds are timed, their losses
must agree. PyTorch does what it does best: fused attention, fused AdamW, no
wait for the host in a round. It is loaded only when something here is called.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dilocox_jax.checks import extra_package
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.plan.schedule.fragments import BLOCKS
from dilocox_jax.training import build, run_text, states
from dilocox_jax.trees import leaves_by_path
from experiments.tools.bench import Ratio

Tensors = dict[str, Any]
SYNC_INTERVAL = 50
# Goals, set beforehand: our seconds over PyTorch's are at most these.
_BOUNDS = {"eager": 1 / 1.25, "compiled": 1 / 1.15}
# Losses of the first steps may differ by so many nats. Later the two runs drift
# apart, because rounding errors grow.
LOSS_BOUND = 1e-3
_COMPARED_STEPS = 60


def _torch() -> Any:
  return extra_package("torch", "the bench peers (make bench-peers)", "peers")


def peer_params(params: Mapping[str, np.ndarray]) -> Tensors:
  """Copies our parameters, one entry a layer, kernels as [outputs, inputs]."""
  copies = {}
  for path, leaf in params.items():
    top, _, rest = path.partition("/")
    layers = {path: leaf}
    if top == BLOCKS:
      layers = {f"{top}/{i}/{rest}": layer for i, layer in enumerate(leaf)}
    for name, layer in layers.items():
      layout = layer.T if path.endswith("/kernel") else layer
      copies[name] = _torch().tensor(np.ascontiguousarray(layout))
  return copies


def peer_loss(
  shape: ModelShape, length: int, device: str = "cpu"
) -> Callable[..., Any]:
  """Returns (parameters, tokens [B, L + 1]) -> loss of the decoder of `tiny`.

  Args:
    shape: Sizes of a model with rotary positions, RMS norms and SwiGLU.
    length: Number of tokens that are predicted in a sequence, L.
    device: Where parameters and tokens are, "cpu" or "cuda".
  """
  torch = _torch()
  functional = torch.nn.functional
  width = shape.head_width
  exponents = torch.arange(0, width, 2, device=device) / width
  positions = torch.arange(length, device=device)
  angles = torch.outer(positions, shape.rope_base**-exponents)
  cos, sin = angles.cos(), angles.sin()

  def norm(x, scale):
    return functional.rms_norm(x, scale.shape, scale, shape.norm_epsilon)

  def rotated(x):  # [B, N, L, K]
    first, second = x.chunk(2, dim=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    return torch.cat(parts, dim=-1).to(x.dtype)

  def layer(params: Tensors, path: str, x):
    def product(name: str, x):
      return functional.linear(x, params[f"{path}/{name}/kernel"])

    def heads(name: str):
      y_BxLxNxK = product(name, y).unflatten(-1, (-1, width))
      return y_BxLxNxK.transpose(1, 2)

    y = norm(x, params[f"{path}/attention/norm/scale"])
    mixed = functional.scaled_dot_product_attention(
      rotated(heads("attention/query")),
      rotated(heads("attention/key")),
      heads("attention/value"),
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


def peer_round(
  config: RunConfig, params: Tensors, rates: list[float], loss: Any
) -> Callable[[Any], np.ndarray]:
  """Returns a round in PyTorch: tokens [M, H, B, L + 1] -> losses [M, H].

  Args:
    config: Config of the run: AdamW inside, SGD outside.
    params: Outer parameters to start from.
    rates: Learning rate of every inner step; the last one stays.
    loss: Loss of `peer_loss`, compiled or not.
  """
  torch, inner, outer = _torch(), config.inner, config.outer
  count = config.mesh.num_replicas

  def copied() -> Tensors:
    return {k: v.clone().requires_grad_() for k, v in params.items()}

  outer_params, replicas = copied(), [copied() for _ in range(count)]
  adam = {"betas": (inner.b1, inner.b2), "weight_decay": inner.weight_decay}
  optimizers = [
    torch.optim.AdamW(list(each.values()), fused=True, **adam)
    for each in replicas
  ]
  nesterov = {"momentum": outer.momentum, "nesterov": outer.nesterov}
  outer_optimizer = torch.optim.SGD(
    list(outer_params.values()), lr=outer.learning_rate, **nesterov
  )
  next_rates = iter([*rates, *[rates[-1]] * 100_000])

  def step(replica: Tensors, optimizer, batch, rate: float):
    optimizer.param_groups[0]["lr"] = rate
    value = loss(replica, batch)
    value.backward()
    if inner.clip_norm:
      leaves = list(replica.values())
      torch.nn.utils.clip_grad_norm_(leaves, inner.clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return value.detach()

  def run(batches) -> np.ndarray:
    own = [next(next_rates) for _ in range(batches.shape[1])]
    losses = [
      [step(replica, optimizer, *each) for each in zip(steps, own, strict=True)]
      for replica, optimizer, steps in zip(
        replicas, optimizers, batches, strict=True
      )
    ]
    with torch.no_grad():
      for name, leaf in outer_params.items():
        leaf.grad = leaf - sum(each[name] for each in replicas) / count
      outer_optimizer.step()
      for replica in replicas:
        for name, leaf in outer_params.items():
          replica[name].copy_(leaf)
    return np.array([torch.stack(each).numpy() for each in losses])

  return run


def peer_ratios() -> list[Ratio]:
  """Returns what is compared, once both sides have trained alike.

  Raises:
    ValueError: If PyTorch is not installed. The message is one line.
    RuntimeError: If PyTorch does not train the same model.
  """
  torch = _torch()
  config = from_mapping(
    {"model": {"preset": "tiny"}, "sync": {"sync_interval": SYNC_INTERVAL}}
  )
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  programs = build.programs(config)
  batches = run_text.streams(config, run_text.corpus(config)).take(
    SYNC_INTERVAL
  )
  params = states.first_params(programs, config.seed)
  # Copies, as rounds reuse the memory of the parameters.
  first = leaves_by_path(jax.tree.map(np.array, params))
  optimizer = jax.jit(programs.steps.optimizer.init)(params)
  state, placed = (
    programs.rounds.init(params, optimizer),
    jax.device_put(batches),
  )

  def ours() -> np.ndarray:
    nonlocal state
    state, (losses, _), _ = programs.rounds.run(state, placed)
    return np.asarray(jax.block_until_ready((state, losses))[1])

  rates = [
    np.asarray(programs.schedule(n)).item()
    for n in range(config.total_steps + 1)
  ]
  tokens, wanted = torch.tensor(batches, dtype=torch.int64), _two_rounds(ours)
  found = []
  # `torch.compile` needs a C++ compiler.
  for mode in ("eager", "compiled") if shutil.which("g++") else ("eager",):
    loss = peer_loss(config.model.shape, config.data.sequence_length)
    if mode == "compiled":
      loss = torch.compile(loss, fullgraph=True, dynamic=False)
    run = peer_round(config, peer_params(first), rates, loss)
    theirs = lambda run=run: run(tokens)  # noqa: E731 - one for each mode.
    apart = abs(_two_rounds(theirs) - wanted)[:, :_COMPARED_STEPS].max()
    if apart > LOSS_BOUND:
      raise RuntimeError(f"PyTorch trains another model: {apart} nats apart")
    name = f"round of H = {SYNC_INTERVAL}, PyTorch {mode}"
    found.append(Ratio(name, ours, theirs, _BOUNDS[mode]))
  return found


def _two_rounds(run: Callable[[], np.ndarray]) -> np.ndarray:
  return np.concatenate([run(), run()], axis=1)
