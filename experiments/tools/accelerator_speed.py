"""Measures speed, memory and losses on a device, for the accelerator check.

A *figure* is a dict with the name of a measurement and its results. It also has
the goal, if one was set before the measurement.
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
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.config.device_memory import device_memory
from dilocox_jax.plan.model.shapes import ModelShape
from experiments.tools import bench_inner, bench_programs, bench_torch, timing

Figures = Iterator[dict[str, Any]]
_FEW_STEPS = 10  # Steps that are timed, and the fewest that are trained.
_GOAL_MFU = 0.45  # Utilization of the device's peak (model FLOPs).
_GOAL_OVER_TORCH = 1.0  # Our tokens a second divided by PyTorch's.
_GOAL_MEMORY = 0.07  # Relative error of the estimated memory.


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The sizes with which everything is measured.

  Attributes:
    models: For each name, the fields of `config.model` and the number of
      sequences in a batch. The models have rotary positions, RMS norms and
      SwiGLU.
    length: Number of tokens that are predicted in a sequence.
    rounds: Fields of the config of the timed rounds, by dotted names.
    trained: Fields of `config.model` of the model that is trained for its loss.
    values: Shape [layers, rows, columns] of the array that codecs encode.
    repeats: Number of measurements of each time and ratio.
    most_steps: Largest number of steps for which a model is trained.
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
  models={
    "150M": (_LLAMA, 16),
    "300M": (_LLAMA | {"num_layers": 24}, 16),
    "1B": ({"preset": "llama_1_1b"}, 4),
  },
  length=1024,
  rounds={
    "model.preset": "llama_150m",
    "sync.sync_interval": 16,
    "data.batch_size": 16,
    "data.sequence_length": 1024,
  },
  trained={"preset": "small", "num_layers": 11},
  values=bench_programs.VALUES,
  repeats=5,
  most_steps=2000,
)
TINY = Sizes(
  models={"tiny": ({"preset": "tiny"}, 2)},
  length=128,
  rounds={
    "model.preset": "nano",
    "sync.sync_interval": 4,
    "data.batch_size": 2,
  },
  trained={"preset": "nano"},
  values=(2, 64, 256),
  repeats=3,
  most_steps=_FEW_STEPS,
)


def config_of(sizes: Sizes, name: str) -> RunConfig:
  """Returns the config with which a model's inner steps are measured.

  `name` is the name of the model in `sizes.models`.
  """
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
  """Yields two results for each model: speed of inner steps, and memory.

  The memory is given as this project estimates it and as the compiler counts
  it.
  """
  for name in sizes.models:
    config = config_of(sizes, name)
    values = bench_inner.measure_steps(config, sizes.repeats)
    yield {"figure": f"inner step {name}", "goal_mfu": _GOAL_MFU, **values}
    estimated_bytes = device_memory(config).total
    argument_bytes = values["argument_bytes"] or 0
    temporary_bytes = values["temporary_bytes"] or 0
    compiled_bytes = argument_bytes + temporary_bytes
    yield {
      "figure": f"memory {name}",
      "estimated_bytes": estimated_bytes,
      "compiled_bytes": compiled_bytes,
      "estimate_over_compiled": estimated_bytes / max(compiled_bytes, 1),
      "goal_error": _GOAL_MEMORY,
    }
    jax.clear_caches()


def torch_steps(sizes: Sizes, ours: Mapping[str, float]) -> Figures:
  """Measures PyTorch on the same models, and yields a result for each.

  `ours` has this project's tokens a second for each model, by name. Raises
  ValueError if PyTorch is not installed.
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
  """Returns the median time of one step of PyTorch (seconds).

  PyTorch computes in bf16, with its own attention. On a GPU the loss is
  compiled, and AdamW is fused.
  """
  torch = bench_torch.torch()
  device = "cuda" if torch.cuda.is_available() else "cpu"
  shape = config.model.shape
  data = config.data
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
    value.item()  # Waits for the device.

  steps()  # Compiles.
  step_s = statistics.median(timing.seconds(steps) for _ in range(repeats))
  return step_s / bench_inner.STEPS


def _torch_params(shape: ModelShape, device: str) -> dict[str, Any]:
  """Draws the parameters of a model, as PyTorch's tensors on a device.

  Matrices are drawn from N(0, 0.02^2). The scales of norms are 1.
  """
  leaves = {
    path: np.broadcast_to(np.float32(1), size)
    for path, size in shape.parameter_shapes.items()
  }
  params = bench_torch.peer_params(leaves)
  for name, leaf in params.items():
    leaf_on_device = leaf.to(device)
    if leaf.ndim > 1:
      leaf_on_device.normal_(std=0.02)
    params[name] = leaf_on_device.requires_grad_()
  return params


def ratios(sizes: Sizes) -> Figures:
  """Yields a result for each comparison of the benches `round` and `codecs`."""
  for ratio in (
    *bench_programs.round_ratios(sizes.rounds),
    *bench_programs.codec_ratios(sizes.values),
  ):
    yield {"figure": ratio.name, **timing.measure_ratio(ratio, sizes.repeats)}


def trained(sizes: Sizes, deadline: float) -> Figures:
  """Trains AllReduce and `overlap_loco`, and yields their validation losses.

  Both take equally many steps: as many as should fit before the deadline
  (seconds of the monotonic clock), but at least 10 and at most
  `sizes.most_steps`.
  """
  num_steps = _FEW_STEPS
  if sizes.most_steps > num_steps:
    few_steps_s = timing.seconds(
      lambda: _trained_loss(sizes, "allreduce", _FEW_STEPS)
    )
    # `few_steps_s` includes compiling, so fewer steps are taken than would fit.
    time_of_each_s = (deadline - time.monotonic()) / 2
    affordable_steps = time_of_each_s / few_steps_s * _FEW_STEPS
    num_steps = int(np.clip(affordable_steps, _FEW_STEPS, sizes.most_steps))
  for method in ("allreduce", "overlap_loco"):
    start = time.monotonic()
    loss = _trained_loss(sizes, method, num_steps)
    yield {
      "figure": f"{method} for {num_steps} steps",
      "loss": loss,
      "seconds": time.monotonic() - start,
    }


def _trained_loss(sizes: Sizes, method: str, num_steps: int) -> float:
  """Trains a run, and returns its validation loss (nats a token)."""
  changes = {"sync.method": method, "total_steps": num_steps}
  config = from_mapping({"model": sizes.trained, **changes})
  with tempfile.TemporaryDirectory() as folder:
    return dx.train(config=config, workdir=folder).metrics.validation_loss
