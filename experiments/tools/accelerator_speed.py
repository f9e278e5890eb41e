"""How fast inner steps and codecs are on a device, and what they need.

A figure is a dict that says what was measured, with its goal where one was set
beforehand. Each size of `Sizes` runs on any device, tiny ones in tests.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

import dilocox_jax as dx
from dilocox_jax.api.device_memory import device_memory
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.plan.model.shapes import ModelShape
from experiments.tools import bench_inner, bench_programs, bench_torch, timing

Figures = Iterator[dict[str, Any]]
_FEW_STEPS = 10
_GOAL_MFU, _GOAL_OVER_TORCH, _GOAL_MEMORY = 0.45, 1.0, 0.07


@dataclasses.dataclass(frozen=True)
class Sizes:
  """What is measured.

  Attributes:
    models: For each name the sizes of a model of rotary positions, RMS norms
      and SwiGLU, and its batch of sequences.
    length: Tokens of a sequence.
    rounds: Fields of the config of rounds.
    trained: Sizes of the model that is trained at the end.
    values: Values of each array that codecs work on.
    repeats: Measurements of each figure.
    most_steps: Steps that are trained at the end, if there is time.
  """

  models: Mapping[str, tuple[Mapping[str, Any], int]]
  length: int
  rounds: Mapping[str, Any]
  trained: Mapping[str, Any]
  values: tuple[int, ...]
  repeats: int
  most_steps: int


_LLAMA = {"preset": "llama_150m"}
FULL = Sizes(
  {
    "150M": (_LLAMA, 16),
    "300M": (_LLAMA | {"num_layers": 24}, 16),
    "1B": ({"preset": "llama_1_1b"}, 4),
  },
  1024,
  {
    "model.preset": "llama_150m",
    "sync.sync_interval": 16,
    "data.batch_size": 16,
    "data.sequence_length": 1024,
  },
  {"preset": "small", "num_layers": 11},
  bench_programs.VALUES,
  5,
  2000,
)
TINY = Sizes(
  {"tiny": ({"preset": "tiny"}, 2)},
  128,
  {"model.preset": "nano", "sync.sync_interval": 4, "data.batch_size": 2},
  {"preset": "nano"},
  (2, 64, 256),
  3,
  _FEW_STEPS,
)


def config_of(sizes: Sizes, name: str) -> RunConfig:
  """Returns the config of inner steps of one of the models."""
  model, batch = sizes.models[name]
  return from_mapping(
    {
      "model": model,
      "data.batch_size": batch,
      "data.sequence_length": sizes.length,
      "mesh.num_replicas": 1,
      "sync.method": "allreduce",
    }
  )


def inner_steps(sizes: Sizes) -> Figures:
  """Yields tokens a second, utilisation and memory of each model.

  Args:
    sizes: What is measured.
  """
  for name in sizes.models:
    config = config_of(sizes, name)
    values = bench_inner.measure_steps(config, sizes.repeats)
    yield {"figure": f"inner step {name}", "goal_mfu": _GOAL_MFU, **values}
    needed = device_memory(config).total
    parts = values["argument_bytes"], values["temporary_bytes"]
    compiled = sum(part or 0 for part in parts)
    yield {
      "figure": f"memory {name}",
      "estimated_bytes": needed,
      "compiled_bytes": compiled,
      "estimate_over_compiled": needed / max(compiled, 1),
      "goal_error": _GOAL_MEMORY,
    }
    jax.clear_caches()


def torch_steps(sizes: Sizes, ours: Mapping[str, float]) -> Figures:
  """Yields PyTorch's tokens a second for the same models and batches.

  Args:
    sizes: What is measured.
    ours: Our tokens a second by the name of the model.
  """
  for name in sizes.models:
    config = config_of(sizes, name)
    rate = config.tokens_per_replica_step / _torch_step_s(config, sizes.repeats)
    yield {
      "figure": f"PyTorch, compiled, {name}",
      "tokens_per_s": rate,
      "ours_over_theirs": ours[name] / rate,
      "goal": _GOAL_OVER_TORCH,
    }


def _torch_step_s(config: RunConfig, repeats: int) -> float:
  """Seconds of one step of PyTorch: bf16, flash attention, fused AdamW."""
  torch = bench_torch.torch()
  device = "cuda" if torch.cuda.is_available() else "cpu"
  shape, data = config.model.shape, config.data
  params = _torch_params(shape, device)
  optimizer = torch.optim.AdamW(list(params.values()), fused=device == "cuda")
  loss = bench_torch.peer_loss(shape, data.sequence_length, device)
  if device == "cuda":
    loss = torch.compile(loss, dynamic=False)
  tokens = torch.randint(
    shape.vocab_size, (data.batch_size, data.sequence_length + 1), device=device
  )

  def steps() -> None:
    for _ in range(bench_inner.STEPS):
      with torch.autocast(device, torch.bfloat16):
        value = loss(params, tokens)
      value.backward()
      torch.nn.utils.clip_grad_norm_(list(params.values()), 1.0)
      optimizer.step()
      optimizer.zero_grad()
    value.item()

  steps()  # Compiles.
  step_s = statistics.median(timing.seconds(steps) for _ in range(repeats))
  return step_s / bench_inner.STEPS


def _torch_params(shape: ModelShape, device: str) -> dict[str, Any]:
  """Draws parameters on the device; matrices at a usual scale, norms at 1."""
  leaves = {
    path: np.broadcast_to(np.float32(1), size)
    for path, size in shape.parameter_shapes.items()
  }
  params = bench_torch.peer_params(leaves)
  for name, leaf in params.items():
    drawn = leaf.to(device)
    if leaf.ndim > 1:
      drawn.normal_(std=0.02)
    params[name] = drawn.requires_grad_()
  return params


def ratios(sizes: Sizes) -> Figures:
  """Yields rounds over their steps, and codecs over a copy of the values.

  Args:
    sizes: What is measured.
  """
  for ratio in (
    *bench_programs.round_ratios(sizes.rounds),
    *bench_programs.codec_ratios(sizes.values),
  ):
    yield {"figure": ratio.name, **timing.measure_ratio(ratio, sizes.repeats)}


def trained(sizes: Sizes, deadline: float) -> Figures:
  """Yields losses of `overlap_loco` and AllReduce, as far as time allows.

  Args:
    sizes: The model.
    deadline: Time of the monotonic clock by which both should have ended.
  """
  num_steps = _FEW_STEPS
  if sizes.most_steps > num_steps:
    few_s = timing.seconds(lambda: _trained_loss(sizes, "allreduce", num_steps))
    steps = (deadline - time.monotonic()) / 2 / few_s * num_steps
    num_steps = int(np.clip(steps, num_steps, sizes.most_steps))
  for method in ("allreduce", "overlap_loco"):
    started = time.monotonic()
    loss = _trained_loss(sizes, method, num_steps)
    yield {
      "figure": f"{method} for {num_steps} steps",
      "loss": loss,
      "seconds": time.monotonic() - started,
    }


def _trained_loss(sizes: Sizes, method: str, num_steps: int) -> float:
  changes = {"sync.method": method, "total_steps": num_steps}
  config = from_mapping({"model": sizes.trained, **changes})
  with tempfile.TemporaryDirectory() as folder:
    return dx.train(config=config, workdir=folder).metrics.validation_loss
