"""Memory of one device, from a config alone.

What a run keeps between two steps follows exactly from shapes and the division
of the arrays: a device has its share of every copy of the parameters. What a
step needs beside that is an estimate: the layers of a stage and the tables
stand whole in fp32, and so do their gradients; then come the activations that
wait for their backward, the work of one layer, and the logits.
"""

import dataclasses
import math

from dilocox_jax.config import RunConfig
from dilocox_jax.config.platforms import on_platform
from dilocox_jax.plan.model.division import Division
from dilocox_jax.plan.model.shapes import ModelShape, parameter_shapes
from dilocox_jax.plan.pipeline.timetable import timetable
from dilocox_jax.plan.schedule.fragments import BLOCKS

_FP32_BYTES = 4
_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_STATES = {"adamw": 2.0, "adam": 2.0, "sgd": 0.0, "lion": 1.0}


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
  """Memory of one device of a replica (bytes).

  Attributes:
    state: What is kept between steps.
    step: What a step needs beside it, estimated.
  """

  state: int
  step: int

  @property
  def total(self) -> int:
    """All of it."""
    return self.state + self.step


def device_memory(config: RunConfig) -> DeviceMemory:
  """Returns the memory of one device, for replicas on devices of their own.

  Leaves out the state of a low-rank codec, which is small, and all that a
  compiler adds or saves. Optimizers other than Adam, Muon, Lion and SGD count
  as Adam.

  Args:
    config: Config of the run.
  """
  share = share_bytes(config.model.shape, config.division)
  return DeviceMemory(round(num_copies(config) * share), step_bytes(config))


def num_copies(config: RunConfig) -> float:
  """Returns how many copies of the parameters a replica keeps."""
  inner = 1 + _optimizer_copies(config)
  method = config.sync.named
  residual = config.exchange.error_feedback * (
    _BYTES[config.exchange.feedback_dtype] / _FP32_BYTES
  )
  if method.exchanged == "gradient":
    return inner + residual
  outer = 1 + (config.outer.momentum > 0)
  return inner + outer + residual + method.schedule.depth


def _optimizer_copies(config: RunConfig) -> float:
  """Returns the copies of an inner optimizer's state.

  Muon keeps one copy of the kernels of layers, and Adam's two of the rest.
  """
  if config.inner.optimizer != "muon":
    return _STATES.get(config.inner.optimizer, 2.0)
  sizes = {
    path: math.prod(leaf)
    for path, leaf in parameter_shapes(config.model.shape).items()
  }
  layers = sum(n for path, n in sizes.items() if path.startswith(BLOCKS))
  return 2 - layers / sum(sizes.values())


def share_bytes(shape: ModelShape, division: Division) -> int:
  """Returns a device's share of one copy of the parameters (bytes, fp32)."""
  return _FP32_BYTES * sum(
    math.prod(
      size // division.num_shards(axes)
      for size, axes in zip(leaf, division.spec(path, leaf), strict=True)
    )
    for path, leaf in parameter_shapes(shape).items()
  )


def step_bytes(config: RunConfig) -> int:
  """Returns what a step needs beside the state (bytes)."""
  shape, stages = config.model.shape, config.stage_layers
  leaves = {p: math.prod(x) for p, x in parameter_shapes(shape).items()}
  layers = sum(size for p, size in leaves.items() if p.startswith(BLOCKS))
  tables = sum(leaves.values()) - layers
  per_stage = stages.table[0].size
  held = tables + layers // shape.num_layers * per_stage
  # Values and gradients. A single device has the values already.
  copies = 2 if config.mesh.is_divided else 1
  return _FP32_BYTES * copies * held + _activation_bytes(config, per_stage)


def _activation_bytes(config: RunConfig, num_layers: int) -> int:
  config = on_platform(config, "gpu")  # A laptop needs no such estimate.
  shape, mesh, model = config.model.shape, config.mesh, config.model
  divisor = mesh.num_data_shards * config.inner.accumulate_steps
  length = config.data.sequence_length
  tokens = config.data.batch_size * length // divisor
  width = _BYTES[model.compute_dtype]
  scores = shape.num_heads * length if model.attention == "plain" else 0
  one_layer = tokens * (_layer_values(shape) + scores) * width
  saved = num_layers * tokens * shape.model_dim * width
  if (mesh.remat if mesh.num_stages > 1 else model.remat) != "full":
    saved = num_layers * one_layer
  slots = timetable(config.pipeline).num_saved_slots
  # Logits and their gradient are in fp32.
  at_once = min(model.loss_chunk_tokens or tokens, tokens)
  logits = 2 * at_once * shape.vocab_size * _FP32_BYTES
  return slots * saved + 2 * one_layer + logits


def _layer_values(shape: ModelShape) -> int:
  """Returns the values of one layer that a token's backward reads."""
  heads = (shape.num_heads + 2 * shape.kv_heads) * shape.head_width
  branches = 3 if shape.activation == "swiglu" else 2
  experts = max(shape.num_experts, 1)
  return 4 * shape.model_dim + heads + branches * experts * shape.ff_dim
