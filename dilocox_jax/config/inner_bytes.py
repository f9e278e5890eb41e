"""Computes the bytes for which the devices of a replica wait in an inner step.

The layers and gradients of the first micro-batch travel while devices compute,
so their bytes do not count. These bytes count:

- If data shards collect one layer at a time, each micro-batch after the first
  collects every layer twice (forward and backward) and sums the gradient of
  every layer once.
- Tensor shards sum the residual stream twice in the forward of a layer and
  twice in the backward. With `mesh.remat="full"` the forward runs twice.
  Source: Shoeybi et al. 2019, arXiv 1909.08053, section 3.
"""

from dilocox_jax.config.run import RunConfig
from dilocox_jax.config.step_memory import sizes_by_place

_PASSES_OF_A_MICRO_BATCH = 3  # Two collections of a layer, and one sum.
_SUMS_OF_A_LAYER = 4
_SUMS_OF_A_SECOND_FORWARD = 2


def inner_bytes(config: RunConfig, gather: str, value_bytes: int) -> float:
  """Returns the bytes that a device receives and waits for in a step.

  They come from other devices of the replica. Once a step, each layer and its
  gradient travel while devices compute. These bytes do not count.

  Args:
    config: Config of the run.
    gather: When data shards collect layers: "stage" (once a step) or "layer"
      (one at a time). Only read if there are several stages.
    value_bytes: Size of a value in the compute dtype (bytes).
  """
  return value_bytes * (
    _collected_values(config, gather) + _summed_values(config)
  )


def _collected_values(config: RunConfig, gather: str) -> float:
  """Returns how many values a device receives for micro-batches 2, 3, ...

  They are parameters of layers, and gradients summed over data shards.
  """
  mesh = config.mesh
  if mesh.num_stages > 1 and gather == "stage":
    return 0.0
  layers_size, _ = sizes_by_place(config.model.shape.parameter_shapes)
  held_size = layers_size / mesh.num_stages / mesh.num_tensor_shards
  other_share = 1 - 1 / mesh.num_data_shards
  num_more = config.inner.accumulate_steps - 1
  return num_more * _PASSES_OF_A_MICRO_BATCH * held_size * other_share


def _summed_values(config: RunConfig) -> float:
  """Returns how many values a device receives in a step from tensor shards.

  To sum n values over T shards, a ring sends each shard 2 n (T - 1) / T values.
  """
  mesh = config.mesh
  num_sums = _SUMS_OF_A_LAYER
  if mesh.remat == "full":
    num_sums += _SUMS_OF_A_SECOND_FORWARD
  num_layers = config.model.shape.num_layers / mesh.num_stages
  tokens = config.tokens_per_replica_step / mesh.num_data_shards
  stream_size = tokens * config.model.shape.model_dim
  other_share = 1 - 1 / mesh.num_tensor_shards
  return 2 * other_share * stream_size * num_sums * num_layers
