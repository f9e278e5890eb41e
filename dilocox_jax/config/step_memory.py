"""Estimates the memory that an inner step needs in addition to the state.

There are three estimates:

- One device holds a whole replica: all gradients in fp32, and the activations
  that are saved for the backward.
- Data and tensor shards, no pipeline stages: a device holds its part of the
  gradients, and collects layers one by one from the data shards.
- Pipeline stages: the data shards of a stage collect all its layers once a step
  (`mesh.gather="stage"`), or one layer at a time ("layer").
"""

import dataclasses
import math

from dilocox_jax.config.platforms import Computation, on_platform
from dilocox_jax.config.run import RunConfig
from dilocox_jax.plan.model.division import DATA_AXIS, Division
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.plan.schedule.fragments import BLOCKS, Shapes

FP32_BYTES = 4
_BYTES = {"float32": 4, "bfloat16": 2}
# Muon holds a whole layer twice at the same time: its gradient and its
# momentum. With a third copy, the estimate would be 3.3 GiB above what a
# compiled program of 107 billion parameters needs.
_MUON_COPIES = 2
# Data shards that divide the vocabulary collect the residual streams of all
# shards (`inner.vocabulary`). Compiled programs have three copies at a time:
# the streams, their norm and a gradient.
_ROWS_COPIES = 3
# Number of whole layers that a device holds if it collects one layer at a time:
# the layer that it computes, and the next one, which is being collected.
_LAYERS_AT_A_TIME = 2


def step_bytes(config: RunConfig, gather: str, platform: str = "gpu") -> int:
  """Returns the bytes that a step of one replica needs on one device.

  The state between steps is not counted.

  Args:
    config: Config of the run.
    gather: When data shards collect layers: "stage" (once a step) or "layer"
      (one at a time). Only read if there are several stages.
    platform: Kind of the accelerators, "gpu" or "tpu", for fields that the
      config leaves to the devices.
  """
  computation = on_platform(config, platform)
  if config.mesh.num_stages > 1:
    return _bytes_of_stage(config, computation, gather)
  if config.mesh.is_divided:
    return _bytes_of_shard(config, computation)
  return _bytes_of_one_device(config, computation)


def share_bytes(shapes: Shapes, division: Division) -> int:
  """Returns the bytes that one device holds of some leaves, in fp32.

  `shapes` has the shapes of the leaves in a whole replica, by path.
  """
  return sum(
    leaf_bytes(division, path, shape) for path, shape in shapes.items()
  )


def leaf_bytes(division: Division, path: str, shape: tuple[int, ...]) -> int:
  """Returns the bytes that one device holds of a leaf, in fp32.

  `shape` is the shape of the leaf in a whole replica.
  """
  return FP32_BYTES * division.share_size(path, shape)


def narrow_bytes(shapes: Shapes, division: Division, compute_dtype: str) -> int:
  """Returns the bytes of a device's copies of leaves in the compute dtype.

  Args:
    shapes: Shapes of the copied leaves in one replica, by path.
    division: How a replica is divided among its devices.
    compute_dtype: "bfloat16" or "float32". With "float32" nothing is copied,
      and the result is 0.
  """
  value_bytes = _BYTES[compute_dtype]
  if value_bytes == FP32_BYTES:
    return 0
  return share_bytes(shapes, division) * value_bytes // FP32_BYTES


def trained_sizes(config: RunConfig) -> tuple[int, int]:
  """Returns how many parameters are trained in layers, and outside of them."""
  return sizes_by_place(config.trained_shapes)


def sizes_by_place(shapes: Shapes) -> tuple[int, int]:
  """Returns how many values are in layers, and how many are elsewhere.

  The path of a leaf in layers begins with "blocks".
  """
  layers_size = 0
  other_size = 0
  for path, shape in shapes.items():
    if path.startswith(BLOCKS):
      layers_size += math.prod(shape)
    else:
      other_size += math.prod(shape)
  return layers_size, other_size


def _bytes_of_one_device(config: RunConfig, computation: Computation) -> int:
  """Returns the bytes of a step on a device that holds a whole replica."""
  gradients = FP32_BYTES * sum(trained_sizes(config))
  activations = _activations(
    config, computation, num_layers=config.model.shape.num_layers
  )
  total = activations.saved + activations.layer + activations.logits
  is_one_backward = config.inner.accumulate_steps == 1
  if is_one_backward and computation.remat == "none":
    # Gradients are allocated while activations are freed. The copies of all
    # layers in the compute dtype stay in memory.
    narrow = narrow_bytes(
      config.trained_shapes, config.division, computation.compute_dtype
    )
    return max(gradients, narrow + total)
  return gradients + total


def _bytes_of_shard(config: RunConfig, computation: Computation) -> int:
  """Returns the bytes of a step on a data or tensor shard, without stages."""
  num_layers = config.model.shape.num_layers
  activations = _activations(config, computation, num_layers)
  num_whole_layers = _LAYERS_AT_A_TIME
  if not config.lora.rank:
    # The gradient of a whole layer, before the data shards sum and divide it.
    num_whole_layers += 1
  if config.mesh.remat == "none":
    # The backward does not collect the layers again.
    num_whole_layers += num_layers
  layers = num_whole_layers * _whole_layer_bytes(config, computation)
  # The layers are done when the logits are computed.
  backward = activations.saved + max(
    layers + activations.layer, activations.logits
  )
  tables = 0
  if config.mesh.num_data_shards > 1:
    # Some tables are not divided by tokens. A shard collects all rows of such a
    # table, and computes the gradient of all rows.
    tables = 2 * FP32_BYTES * _collected_tables_size(config)
  gradients = share_bytes(config.trained_shapes, config.division)
  if config.inner.accumulate_steps > 1:
    gradients *= 2  # The sum, and the gradient of one micro-batch.
  return gradients + _or_muon(config, tables + backward)


def _bytes_of_stage(
  config: RunConfig, computation: Computation, gather: str
) -> int:
  """Returns the bytes of a step on a device of a pipeline stage.

  `gather` is "stage" (layers are collected once a step) or "layer" (one by
  one).
  """
  mesh = config.mesh
  # Number of layers of the longest stage.
  layers_per_stage = config.stage_layers.table.shape[1]
  # Names in "size" are numbers of values, not of bytes.
  layers_size, other_size = trained_sizes(config)
  stage_size = layers_size // config.model.shape.num_layers * layers_per_stage
  stage_size //= mesh.num_tensor_shards
  # A device holds the leaves outside of layers. Of a table that is divided over
  # the vocabulary it holds only one shard.
  divided_size = _divided_tables_size(config)
  tables_size = other_size - divided_size
  tables_size += divided_size // mesh.num_data_shards
  value_bytes = _BYTES[computation.compute_dtype]
  # Compiled programs hold one more share of the gradient, on its way into the
  # optimizer or an exchange.
  share = share_bytes(config.trained_shapes, config.division)
  activations = _activations(config, computation, layers_per_stage)
  if gather == "stage":
    held_size = stage_size + tables_size
    work = activations.layer + activations.logits
  else:
    held_size = stage_size // mesh.num_data_shards + tables_size
    num_whole_layers = _LAYERS_AT_A_TIME + 1  # And the gradient of a layer.
    layers = num_whole_layers * _whole_layer_bytes(config, computation)
    # The last stage computes the logits before it collects a layer.
    work = max(activations.layer + layers, activations.logits)
  if gather == "layer" and config.division.layers_on_stages:
    # Gradients are summed layer by layer, and the sum already is this share.
    share = 0
  # The sum of the gradient is in fp32, and a copy of the parameters is in the
  # compute dtype.
  held = held_size * (FP32_BYTES + value_bytes)
  # Muon swaps the share for whole layers, so in its update the share is free.
  return held + _or_muon(config, share + activations.saved + work)


def _or_muon(config: RunConfig, backward_bytes: int) -> int:
  """Returns the larger memory: of the backward, or of Muon's update (bytes).

  Muon updates when the backward's memory is free again. Then each device holds
  whole layers: 78 layers on 128 devices are one layer a device. With other
  optimizers the result is `backward_bytes`.
  """
  if config.inner.optimizer != "muon":
    return backward_bytes
  num_all = config.model.shape.num_layers
  layer_size = trained_sizes(config)[0] // num_all
  num_layers = math.ceil(num_all / config.division.num_devices)
  whole_layers = _MUON_COPIES * FP32_BYTES * num_layers * layer_size
  return max(backward_bytes, whole_layers)


def _whole_layer_bytes(config: RunConfig, computation: Computation) -> int:
  """Returns the bytes of one layer after a device has collected it.

  The device collects the layer's parts from all data shards, in the compute
  dtype. If tensor shards divide the layer, it collects its shard's part only.
  """
  shape = config.model.shape
  layers_size, _ = sizes_by_place(shape.parameter_shapes)
  layer_size = layers_size // shape.num_layers
  held_size = layer_size // config.mesh.num_tensor_shards
  return held_size * _BYTES[computation.compute_dtype]


def _divided_tables_size(config: RunConfig) -> int:
  """Returns how many trained values data shards divide by token.

  They are those of the embedding, of the head, of both or of none.
  """
  return sum(
    math.prod(config.trained_shapes[path])
    for path in config.division.divided_tables(config.model.shape)
    if path in config.trained_shapes
  )


def _collected_tables_size(config: RunConfig) -> int:
  """Returns how many values outside of layers a data shard collects.

  An embedding or a head that data shards divide by token is not among them.
  """
  division = config.division
  divided = division.divided_tables(config.model.shape)
  size = 0
  for path, leaf in config.model.shape.parameter_shapes.items():
    axes = {axis for names in division.spec(path, leaf) for axis in names}
    is_collected = path not in divided and DATA_AXIS in axes
    if is_collected and not path.startswith(BLOCKS):
      size += math.prod(leaf)
  return size


@dataclasses.dataclass(frozen=True)
class _Activations:
  """Memory of the values that a step computes (bytes).

  Attributes:
    saved: What the forward of all layers saves for the backward, for every
      micro-batch that waits for its backward.
    layer: What the backward of one layer reads; twice as much if the backward
      computes a part of the forward again.
    logits: Logits of a chunk of tokens and their gradient, in fp32. If data
      shards divide the vocabulary, also the residual streams of all shards'
      tokens.
  """

  saved: int
  layer: int
  logits: int


def _activations(
  config: RunConfig, computation: Computation, num_layers: int
) -> _Activations:
  """Returns the memory of the values that a step computes on a device.

  `num_layers` is the number of layers that the device computes.
  """
  shape = config.model.shape
  mesh = config.mesh
  length = config.data.sequence_length
  divisor = mesh.num_data_shards * config.inner.accumulate_steps
  tokens = config.data.batch_size * length // divisor
  remat = mesh.remat if mesh.is_divided else computation.remat
  attention_scores = 0
  if computation.attention == "plain":
    attention_scores = shape.num_heads * length
  # Tensor shards divide heads and the feed-forward. Each of them has the whole
  # stream of its tokens.
  inner_values = _inner_values(shape) + attention_scores
  product_values = shape.model_dim + inner_values // mesh.num_tensor_shards
  # The values for each token that the backward of a layer reads: the outputs
  # of matrix products, three vectors as wide as the stream, and the activation
  # inside the feed-forward.
  layer_values = (
    3 * shape.model_dim
    + shape.ff_dim // mesh.num_tensor_shards
    + product_values
  )
  # The values for each token that a layer saves for its backward.
  if remat == "none":
    saved_values = layer_values
  elif remat == "dots":
    saved_values = shape.model_dim + product_values
  else:
    saved_values = shape.model_dim
  value_bytes = _BYTES[computation.compute_dtype]
  work_bytes = tokens * layer_values * value_bytes
  if remat != "none":
    work_bytes *= 2  # The forward of the layer is computed again.
  num_saved = config.pipeline.num_saved_slots * num_layers
  if mesh.num_stages == 1:
    num_saved = num_layers  # One micro-batch at a time.
  chunk_tokens = min(computation.loss_chunk_tokens or tokens, tokens)
  logits_size = chunk_tokens * shape.vocab_size // mesh.num_tensor_shards
  logits_bytes = 2 * logits_size * FP32_BYTES  # Logits and their gradient.
  if config.division.divided_tables(shape):
    rows_of_all_shards = mesh.num_data_shards * chunk_tokens * shape.model_dim
    logits_bytes += _ROWS_COPIES * rows_of_all_shards * value_bytes
  return _Activations(
    saved=num_saved * tokens * saved_values * value_bytes,
    layer=work_bytes,
    logits=logits_bytes,
  )


def _inner_values(shape: ModelShape) -> int:
  """Returns how many values inside a layer are computed for each token.

  They are queries, keys, values, and the outputs of the feed-forward's first
  matrix products. No backward reads the outputs of the last products.
  """
  head_values = (shape.num_heads + 2 * shape.kv_heads) * shape.head_width
  num_branches = 2 if shape.activation == "swiglu" else 1
  return head_values + num_branches * shape.ff_dim
