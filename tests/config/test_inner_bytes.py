"""Bytes that devices of a replica wait for, counted by hand."""

import pytest

from dilocox_jax.config import from_mapping
from dilocox_jax.config.inner_bytes import inner_bytes

# Two layers of the model nano: 4 x 16 x 16 + 3 x 16 x 24 values of matrices and
# 2 x 16 of norms each.
LAYERS_SIZE = 2 * (4 * 16 * 16 + 3 * 16 * 24 + 2 * 16)
NANO = {
  "model.preset": "nano",
  "data.batch_size": 8,
  "data.sequence_length": 16,
  "inner.accumulate_steps": 4,
  "mesh.layout": "mesh",
}
SHARDS = {"mesh.num_data_shards": 2}
STAGES = SHARDS | {"mesh.num_stages": 2}
TENSOR = {"mesh.num_tensor_shards": 2}


@pytest.mark.parametrize(
  ("division", "gather", "num_values"),
  [
    # Three micro-batches after the first collect half of the layers twice, and
    # sum half of their gradients.
    (SHARDS, "layer", 3 * 3 * LAYERS_SIZE / 2),
    (STAGES, "layer", 3 * 3 * LAYERS_SIZE / 4),
    (STAGES, "stage", 0),
    # Two devices sum a stream of 8 x 16 tokens four times in each of two
    # layers. Each receives a half of it twice.
    (TENSOR, "layer", 8 * 16 * 16 * 4 * 2),
    (TENSOR | {"mesh.remat": "full"}, "layer", 8 * 16 * 16 * 6 * 2),
  ],
)
def test_values_that_a_device_waits_for(division, gather, num_values):
  config = from_mapping(NANO | division)
  assert inner_bytes(config, gather, value_bytes=2) == 2 * num_values
