"""Memory of one device, from a config alone.

What a run keeps between two steps follows exactly from shapes and the division
of the arrays: a device has its share of every copy of the parameters, and of
the factors that low rank keeps. What a step needs beside that is an estimate:
the layers of a stage and the tables stand whole in the compute dtype, and their
gradients in fp32; then comes a share of a gradient on its way into the
optimizer or into an exchange, and what is more of two things that follow each
other: activations that wait for their backward, with the work of one layer and
the logits, or the whole layers that Muon works on. On one GPU with unrolled
layers the narrow values stay, and gradients come as activations go. Tests hold
the sums to what compilers for TPUs and for one GPU need. An evaluation is left
out: it takes the same values and has no gradients, so it needs less than a
step.
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
_PLATFORM = "gpu"  # A laptop needs no such estimate.
# Muon has the gradient and the momentum of a layer whole at the same time. A
# third copy would be 3.3 GiB above a program of 107 billion parameters.
_WHOLE_COPIES = 2
# Share of a device's memory that should be left, as a step's part is estimated
# (tests/experiments/test_fits.py holds the sum to within a tenth).
LEAST_SPARE = 0.1
_STATES = {"adamw": 2.0, "adam": 2.0, "lion": 1.0}


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
  """Memory of one device of a replica (bytes).

  Attributes:
    state: What is kept between steps.
    step: What a step needs beside it, estimated.
    frozen: Parameters that are not trained, once for all replicas of a device.
  """

  state: int
  step: int
  frozen: int = 0

  @property
  def total(self) -> int:
    """All of it."""
    return self.state + self.step + self.frozen


def device_memory(config: RunConfig) -> DeviceMemory:
  """Returns the memory of one device, for replicas on devices of their own.

  Leaves out all that a compiler adds or saves. Optimizers other than Adam,
  Muon, Lion and SGD count as Adam.

  Args:
    config: Config of the run.
  """
  shapes, division = config.trained_shapes, config.division
  state = num_copies(config) * share_bytes(shapes, division)
  factors = factor_bytes(shapes, division, config.exchange.named_codec)
  frozen = 0
  if config.lora.rank:
    whole = config.model.shape.parameter_shapes
    frozen = share_bytes(whole, division)
    # Nobody changes them, so compilers keep the layers in the narrow type too.
    layers = {p: leaf for p, leaf in whole.items() if p.startswith(BLOCKS)}
    frozen += _narrow_bytes(config, layers)
  return DeviceMemory(round(state) + factors, _step_bytes(config), frozen)


def num_copies(config: RunConfig) -> float:
  """Returns how many copies of the parameters a replica keeps, at most.

  Of fragments that are sent in turn only some are in flight at any one time:
  with P = H = 16 and tau = 1 it is one, a sixteenth of a copy.
  """
  inner = 1 + optimizer_copies(config)
  method = config.sync.named
  residual = config.exchange.feedback > 0
  average = config.outer.average_power > 0
  if method.exchanged == "gradient":
    return inner + residual + average
  outer = 1 + average + (config.outer.momentum > 0)
  plan = method.schedule
  sent = -(-plan.overlap_steps * plan.num_fragments // plan.sync_interval)
  return inner + outer + residual + sent / plan.num_fragments


def optimizer_copies(config: RunConfig) -> float:
  """Returns how many copies of the parameters an inner optimizer keeps.

  Muon keeps one copy of the kernels of layers, and Adam's two of the rest.

  Args:
    config: Config of the run.
  """
  if config.inner.optimizer == "sgd":
    return float(config.inner.momentum > 0)
  if config.inner.optimizer != "muon":
    return _STATES.get(config.inner.optimizer, 2.0)
  sizes = {
    path: math.prod(leaf) for path, leaf in config.trained_shapes.items()
  }
  layers = sum(n for path, n in sizes.items() if path.startswith(BLOCKS))
  return 2 - layers / sum(sizes.values())


def share_bytes(shapes: Shapes, division: Division) -> int:
  """Returns a device's share of one copy of some leaves (bytes, fp32).

  Args:
    shapes: Shapes of the leaves by path.
    division: How a replica is divided among its devices.
  """
  return sum(_leaf_bytes(division, *leaf) for leaf in shapes.items())


def _leaf_bytes(division: Division, path: str, shape: tuple[int, ...]) -> int:
  """Returns a device's share of a leaf in fp32 (bytes)."""
  axes = map(division.num_shards, division.spec(path, shape))
  return _FP32_BYTES * math.prod(map(int.__floordiv__, shape, axes))


def factor_bytes(shapes: Shapes, division: Division, codec: Codec) -> int:
  """Returns a device's share of the factors that low rank keeps (bytes).

  Args:
    shapes: Shapes of what is sent, by path.
    division: Division of the replica among its devices.
    codec: What is sent; one without shared factors keeps none.
  """
  found = 0
  for path, sizes in shapes.items():
    leaf = stacked_shape(path, sizes)
    if isinstance(codec, LowRank) and factorizes(leaf, codec.rank):
      layers, _, columns = leaf
      right = layers, columns, codec.rank
      found += _leaf_bytes(division, f"{path}/right", right)
  return found


def _step_bytes(config: RunConfig) -> int:
  """Returns what a step needs beside the state (bytes)."""
  shape, stages = config.model.shape, config.stage_layers
  leaves = {p: math.prod(x) for p, x in config.trained_shapes.items()}
  layers = sum(size for p, size in leaves.items() if p.startswith(BLOCKS))
  tables = sum(leaves.values()) - layers
  per_stage = stages.table.shape[1]
  divided = config.division.divided_tables(shape)
  missing = sum(leaves.get(path, 0) for path in divided)
  missing -= missing // config.mesh.num_data_shards
  held = tables - missing + layers // shape.num_layers * per_stage
  chosen = on_platform(config, _PLATFORM)
  width, gradients = _BYTES[chosen.compute_dtype], held * _FP32_BYTES
  activations = _activation_bytes(config, per_stage)
  at_once = config.division.num_devices * config.inner.accumulate_steps == 1
  if at_once and chosen.remat == "none":
    # Gradients come as activations go; narrow values of all layers stay.
    narrow = _narrow_bytes(config, config.trained_shapes)
    return max(gradients, narrow + activations)
  if config.division.num_devices > 1:
    # Values, and a share on its way, of which one is what compiled programs
    # show. A single device has the values already.
    gradients += held * width
    gradients += share_bytes(config.trained_shapes, config.division)
    if config.lora.rank:
      gradients += _collected_bytes(config)
  whole = _whole_layers_bytes(config, layers // shape.num_layers)
  is_muon = config.inner.optimizer == "muon"
  # An optimizer begins when all activations are gone.
  return gradients + max(activations, is_muon * whole)


def _collected_bytes(config: RunConfig) -> int:
  """Returns the frozen layers that data shards have whole at a time (bytes).

  They are two, of which one is on its way, or all that a backward does not
  collect again.
  """
  whole = config.model.shape.parameter_shapes.items()
  size = sum(math.prod(leaf) for p, leaf in whole if p.startswith(BLOCKS))
  num_layers = config.model.shape.num_layers
  at_once = num_layers if config.mesh.remat == "none" else 2
  width = _BYTES[on_platform(config, _PLATFORM).compute_dtype]
  return size // num_layers * at_once * width


def _narrow_bytes(config: RunConfig, shapes: Shapes) -> int:
  """Returns a device's share of a copy in the compute dtype, if it is one."""
  width = _BYTES[on_platform(config, _PLATFORM).compute_dtype]
  if width == _FP32_BYTES:
    return 0
  return share_bytes(shapes, config.division) * width // _FP32_BYTES


def _whole_layers_bytes(config: RunConfig, layer_size: int) -> int:
  """Returns what Muon's swap of shares for whole layers takes (bytes).

  78 layers on 128 devices make one layer for each of 78 devices, and a layer of
  zeros for each of the others.
  """
  num_devices = config.division.num_devices
  if num_devices == 1:
    return 0
  num_layers = math.ceil(config.model.shape.num_layers / num_devices)
  return _WHOLE_COPIES * _FP32_BYTES * num_layers * layer_size


def _activation_bytes(config: RunConfig, num_layers: int) -> int:
  shape, mesh = config.model.shape, config.mesh
  chosen = on_platform(config, _PLATFORM)
  divisor = mesh.num_data_shards * config.inner.accumulate_steps
  length = config.data.sequence_length
  tokens = config.data.batch_size * length // divisor
  width = _BYTES[chosen.compute_dtype]
  scores = shape.num_heads * length if chosen.attention == "plain" else 0
  remat = mesh.remat if mesh.is_divided else chosen.remat
  values = 3 * shape.model_dim + shape.ff_dim + _product_values(shape)
  one_layer = tokens * (values + scores) * width  # What its backward reads.
  saved = one_layer
  if remat != "none":
    products = _product_values(shape) + scores if remat == "dots" else 0
    saved = tokens * (shape.model_dim + products) * width
  slots = config.pipeline.num_saved_slots
  # Logits and their gradient are in fp32.
  at_once = min(chosen.loss_chunk_tokens or tokens, tokens)
  logits = 2 * at_once * shape.vocab_size * _FP32_BYTES
  work = one_layer if remat == "none" else 2 * one_layer
  return slots * num_layers * saved + work + logits


def _product_values(shape: ModelShape) -> int:
  """Returns a token's results of products in a layer, without the last one."""
  heads = (shape.num_heads + 2 * shape.kv_heads) * shape.head_width
  branches = 2 if shape.activation == "swiglu" else 1
  return shape.model_dim + heads + branches * shape.ff_dim
