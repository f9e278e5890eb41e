"""Computes the memory of one device from a config.

The state that a run keeps between two steps is exact. It follows from the
shapes of the parameters and from how they are divided among devices: a device
has its share of every copy of the parameters, and of the factors that the
low-rank codec keeps between exchanges.

The memory that a step needs in addition is an estimate. It is the sum of:

- the gradients of a stage's layers and of the tables, in fp32,
- the larger of two things that are not needed at the same time: the activations
  that wait for their backward, with the work of one layer and the logits; or
  the whole layers on which Muon works,
- only if a replica has several devices: the layers of a stage and the tables,
  whole, in the compute dtype; and the device's share of a gradient on its way
  into the optimizer or into an exchange.

The sum differs for a replica on one device that keeps all activations
(remat "none") and does not accumulate gradients. Such a step keeps a copy of
all parameters in the compute dtype, and allocates gradients while it frees
activations.

Tests compare the sums with the memory that compilers for TPUs and for one GPU
need. An evaluation needs less than a step, because it has no gradients. So it
is left out.
"""

import dataclasses
import math

from dilocox_jax.codecs.base import Codec
from dilocox_jax.codecs.low_rank import LowRank, factorizes
from dilocox_jax.config import RunConfig
from dilocox_jax.config.platforms import on_platform
from dilocox_jax.plan.model.division import Division
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.plan.schedule.fragments import BLOCKS, Shapes, stacked_shape

_FP32_BYTES = 4
_BYTES = {"float32": 4, "bfloat16": 2}
# The estimate is for accelerators. Fields that the config leaves to the devices
# (`config.platforms`) have their values for a GPU.
_PLATFORM = "gpu"
# Muon has the gradient and the momentum of a layer whole at the same time. With
# a third copy the estimate would be 3.3 GiB above the memory that a compiled
# program of 107 billion parameters needs.
_MUON_COPIES = 2
# Share of a device's memory that should stay free, because the memory of a step
# is an estimate (tests/experiments/test_fits.py holds it to within a tenth).
LEAST_SPARE = 0.1
# Number of copies of the parameters that an inner optimizer keeps.
_OPTIMIZER_COPIES = {"adamw": 2.0, "adam": 2.0, "lion": 1.0}


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
  """Memory of one device of a replica (bytes).

  Attributes:
    state: Size of the state that is kept between steps.
    step: Memory that a step needs in addition, estimated.
    frozen: Size of the parameters that are not trained. All replicas of a
      device share one copy.
  """

  state: int
  step: int
  frozen: int = 0

  @property
  def total(self) -> int:
    """The sum of state, step and frozen parameters (bytes)."""
    return self.state + self.step + self.frozen


def device_memory(
  config: RunConfig, device_bytes: float = math.inf
) -> DeviceMemory:
  """Returns the memory of one device that works for a single replica.

  The estimate ignores everything that a compiler adds or saves. Optimizers
  other than Adam, Muon, Lion and SGD count as Adam.

  Args:
    config: Config of the run.
    device_bytes: Memory of a device (bytes), from which `mesh.gather="auto"`
      follows (`chosen_gather`).
  """
  return _memory(config, chosen_gather(config, device_bytes))


def chosen_gather(config: RunConfig, device_bytes: float = math.inf) -> str:
  """Returns when the data shards of a pipeline stage collect its layers.

  To collect all layers of a stage once a step sends fewer bytes. So "auto"
  means "stage" if the run then leaves enough memory to spare, else "layer".

  Args:
    config: Config of the run.
    device_bytes: Memory of a device (bytes); infinity if it is not known.

  Returns:
    "stage" or "layer".
  """
  if config.mesh.gather != "auto":
    return config.mesh.gather
  needed_bytes = _memory(config, "stage").total
  if needed_bytes <= (1 - LEAST_SPARE) * device_bytes:
    return "stage"
  return "layer"


def _memory(config: RunConfig, gather: str) -> DeviceMemory:
  """Returns the memory of a device.

  Args:
    config: Config of the run.
    gather: When data shards collect layers of their stage: "stage" or "layer".
  """
  shapes = config.trained_shapes
  division = config.division
  state = num_copies(config) * share_bytes(shapes, division)
  factors = factor_bytes(shapes, division, config.exchange.named_codec)
  frozen = 0
  if config.lora.rank:
    frozen_shapes = config.model.shape.parameter_shapes
    frozen = share_bytes(frozen_shapes, division)
    # No step changes the frozen layers, so compilers also keep a copy of them
    # in the compute dtype.
    layer_shapes = {
      path: shape
      for path, shape in frozen_shapes.items()
      if path.startswith(BLOCKS)
    }
    frozen += _narrow_bytes(config, layer_shapes)
  return DeviceMemory(
    state=round(state) + factors,
    step=_step_bytes(config, gather),
    frozen=frozen,
  )


def num_copies(config: RunConfig) -> float:
  """Returns how many copies of the trained parameters a replica keeps, at most.

  The copies are: the parameters, the state of the inner optimizer, the residual
  of error feedback, the average of the parameters, the outer parameters, the
  outer momentum, and the pseudo-gradients in flight. If fragments are sent in
  turn, only some are in flight at any time. Example: with P = H = 16 and
  tau = 1 one fragment is in flight, a sixteenth of a copy.

  Args:
    config: Config of the run.
  """
  copies = 1 + optimizer_copies(config)
  if config.exchange.feedback > 0:
    copies += 1  # The residual.
  if config.outer.average_power > 0:
    copies += 1  # The average of the parameters.
  method = config.sync.named
  if method.exchanged == "gradient":
    return copies
  copies += 1  # The outer parameters.
  if config.outer.momentum > 0:
    copies += 1
  schedule = method.schedule
  num_in_flight = math.ceil(
    schedule.overlap_steps * schedule.num_fragments / schedule.sync_interval
  )
  return copies + num_in_flight / schedule.num_fragments


def optimizer_copies(config: RunConfig) -> float:
  """Returns how many copies of the parameters an inner optimizer keeps.

  Muon keeps one copy of the layers, and two copies of all other leaves, as Adam
  does. The result is the mean over all trained parameters. The norms of layers
  are small and count like kernels. SGD keeps one copy if it has momentum.

  Args:
    config: Config of the run.
  """
  if config.inner.optimizer == "sgd":
    return 1.0 if config.inner.momentum > 0 else 0.0
  if config.inner.optimizer != "muon":
    return _OPTIMIZER_COPIES.get(config.inner.optimizer, 2.0)
  layers_size, other_size = _trained_sizes(config)
  return 2 - layers_size / (layers_size + other_size)


def _trained_sizes(config: RunConfig) -> tuple[int, int]:
  """Returns the numbers of trained parameters inside and outside of layers."""
  layers_size = 0
  other_size = 0
  for path, shape in config.trained_shapes.items():
    if path.startswith(BLOCKS):
      layers_size += math.prod(shape)
    else:
      other_size += math.prod(shape)
  return layers_size, other_size


def share_bytes(shapes: Shapes, division: Division) -> int:
  """Returns a device's share of one copy of some leaves (bytes, fp32).

  Args:
    shapes: Shapes of the leaves by path.
    division: How a replica is divided among its devices.
  """
  return sum(
    _leaf_bytes(division, path, shape) for path, shape in shapes.items()
  )


def _leaf_bytes(division: Division, path: str, shape: tuple[int, ...]) -> int:
  """Returns a device's share of a leaf in fp32 (bytes).

  Args:
    division: How a replica is divided among its devices.
    path: Path of the leaf.
    shape: Shape of the leaf in one replica.
  """
  share = 1
  for size, axis in zip(shape, division.spec(path, shape), strict=False):
    share *= size // division.num_shards(axis)
  return _FP32_BYTES * share


def factor_bytes(shapes: Shapes, division: Division, codec: Codec) -> int:
  """Returns a device's share of the right factors of low rank (bytes).

  A replica keeps the right factors of an exchange, from which the next exchange
  starts.

  Args:
    shapes: Shapes of the exchanged leaves, by path.
    division: How a replica is divided among its devices.
    codec: Codec of the exchange. Codecs other than low rank keep no factors.
  """
  if not isinstance(codec, LowRank):
    return 0
  total = 0
  for path, shape in shapes.items():
    leaf_shape = stacked_shape(path, shape)
    if factorizes(leaf_shape, codec.rank):
      num_layers, _, num_columns = leaf_shape
      right_shape = (num_layers, num_columns, codec.rank)
      total += _leaf_bytes(division, f"{path}/right", right_shape)
  return total


def _step_bytes(config: RunConfig, gather: str) -> int:
  """Returns the memory that a step needs in addition to the state (bytes).

  Args:
    config: Config of the run.
    gather: As in `_memory`.
  """
  shape = config.model.shape
  layers_size, tables_size = _trained_sizes(config)
  layer_size = layers_size // shape.num_layers
  layers_per_stage = config.stage_layers.table.shape[1]
  # A device holds the layers of its stage and the tables. Of tables that are
  # divided over the vocabulary it holds one shard.
  divided_size = sum(
    math.prod(config.trained_shapes[path])
    for path in config.division.divided_tables(shape)
    if path in config.trained_shapes
  )
  other_shards_size = divided_size - divided_size // config.mesh.num_data_shards
  held_size = tables_size - other_shards_size + layer_size * layers_per_stage
  gradients = held_size * _FP32_BYTES
  activations = _activation_bytes(config, layers_per_stage)
  computation = on_platform(config, _PLATFORM)
  num_devices = config.division.num_devices
  is_one_backward = num_devices == 1 and config.inner.accumulate_steps == 1
  if is_one_backward and computation.remat == "none":
    # Gradients are allocated while activations are freed. The values in the
    # compute dtype of all layers stay.
    narrow = _narrow_bytes(config, config.trained_shapes)
    return max(gradients, narrow + activations)
  total = gradients
  if num_devices > 1:
    # The whole values, and one share of a gradient on its way, as compiled
    # programs show. A single device has the whole values anyway.
    total += held_size * _BYTES[computation.compute_dtype]
    total += share_bytes(config.trained_shapes, config.division)
    if config.lora.rank:
      total += _gathered_bytes(config)
  # The optimizer starts after all activations are freed.
  if config.inner.optimizer == "muon":
    whole_layers = _whole_layers_bytes(config, layer_size)
    return total + max(activations, whole_layers)
  return total + activations


def _gathered_bytes(config: RunConfig) -> int:
  """Returns the size of the frozen layers that a device holds whole (bytes).

  Data shards gather a layer from each other before they compute it. With remat
  a device holds two layers at a time: the layer that it computes, and the next
  layer, which is on its way. Without remat it holds all layers, because the
  backward does not gather them again.
  """
  layers_size = sum(
    math.prod(shape)
    for path, shape in config.model.shape.parameter_shapes.items()
    if path.startswith(BLOCKS)
  )
  num_layers = config.model.shape.num_layers
  num_held = 2
  if config.mesh.remat == "none":
    num_held = num_layers
  value_bytes = _BYTES[on_platform(config, _PLATFORM).compute_dtype]
  return layers_size // num_layers * num_held * value_bytes


def _narrow_bytes(config: RunConfig, shapes: Shapes) -> int:
  """Returns a device's share of a copy in the compute dtype (bytes).

  The result is 0 if the compute dtype is float32, because no copy is needed.

  Args:
    config: Config of the run.
    shapes: Shapes of the copied leaves, by path.
  """
  value_bytes = _BYTES[on_platform(config, _PLATFORM).compute_dtype]
  if value_bytes == _FP32_BYTES:
    return 0
  return share_bytes(shapes, config.division) * value_bytes // _FP32_BYTES


def _whole_layers_bytes(config: RunConfig, layer_size: int) -> int:
  """Returns the memory of the whole layers on which Muon works (bytes).

  The result is 0 for a replica on one device, which has whole layers anyway.

  The devices of a replica swap their shares for whole layers. Example: of 78
  layers on 128 devices, 78 devices get one layer each, and the other 50 devices
  get a layer of zeros.

  Args:
    config: Config of the run.
    layer_size: Parameters of one layer.
  """
  num_devices = config.division.num_devices
  if num_devices == 1:
    return 0
  num_layers = math.ceil(config.model.shape.num_layers / num_devices)
  return _MUON_COPIES * _FP32_BYTES * num_layers * layer_size


def _activation_bytes(config: RunConfig, num_layers: int) -> int:
  """Returns the memory of activations, logits and the work of a layer (bytes).

  The activations are the values that layers save in the forward for their
  backward. The work of a layer are all values that one layer's backward reads.

  Args:
    config: Config of the run.
    num_layers: Number of layers of a stage.
  """
  shape = config.model.shape
  mesh = config.mesh
  computation = on_platform(config, _PLATFORM)
  length = config.data.sequence_length
  divisor = mesh.num_data_shards * config.inner.accumulate_steps
  tokens = config.data.batch_size * length // divisor
  value_bytes = _BYTES[computation.compute_dtype]
  remat = mesh.remat if mesh.is_divided else computation.remat
  attention_scores = 0
  if computation.attention == "plain":
    attention_scores = shape.num_heads * length
  # The values for each token that the backward of a layer reads.
  layer_values = (
    3 * shape.model_dim
    + shape.ff_dim
    + _matmul_output_values(shape)
    + attention_scores
  )
  layer_bytes = tokens * layer_values * value_bytes
  # The values for each token that a layer saves for its backward.
  if remat == "none":
    saved_values = layer_values
  elif remat == "dots":
    saved_values = (
      shape.model_dim + _matmul_output_values(shape) + attention_scores
    )
  else:
    saved_values = shape.model_dim
  saved_bytes = tokens * saved_values * value_bytes
  work_bytes = layer_bytes
  if remat != "none":
    work_bytes *= 2  # The forward of the layer is computed again.
  # Logits and their gradient are in fp32.
  chunk_tokens = min(computation.loss_chunk_tokens or tokens, tokens)
  logits_bytes = 2 * chunk_tokens * shape.vocab_size * _FP32_BYTES
  num_saved = config.pipeline.num_saved_slots * num_layers
  return num_saved * saved_bytes + work_bytes + logits_bytes


def _matmul_output_values(shape: ModelShape) -> int:
  """Returns how many matmul outputs a layer computes for each token.

  The output of the layer's last matmul is not counted, because no backward
  reads it.
  """
  head_values = (shape.num_heads + 2 * shape.kv_heads) * shape.head_width
  num_branches = 2 if shape.activation == "swiglu" else 1
  return shape.model_dim + head_values + num_branches * shape.ff_dim
