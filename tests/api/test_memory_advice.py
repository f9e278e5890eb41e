"""The field that `fits` names is the cheapest one that helps."""

import pytest

from dilocox_jax.api.memory_advice import memory_advice
from dilocox_jax.config import from_mapping

LLAMA_7B = {
  "model.preset": "llama_7b",
  "data.batch_size": 8,
  "data.sequence_length": 4096,
  "sync.method": "diloco",
  "mesh.layout": "mesh",
}
SHARDS = {"mesh.num_data_shards": 8}
STAGES = {
  "mesh.num_stages": 2,
  "mesh.num_data_shards": 4,
  "inner.accumulate_steps": 2,
  "mesh.gather": "stage",
  "mesh.remat": "full",
}
ONE_ROW_IN_ALL = {"mesh.num_tensor_shards": 2, "data.batch_size": 1}


@pytest.mark.parametrize(
  ("division", "memory_bytes", "field"),
  [
    (SHARDS, 30e9, "mesh.remat='full'"),
    (STAGES, 40e9, "mesh.gather='layer'"),
    (SHARDS | {"mesh.remat": "full"}, 20e9, "mesh.num_tensor_shards=2"),
    (ONE_ROW_IN_ALL | {"mesh.remat": "full"}, 60e9, "mesh.num_tensor_shards=4"),
  ],
)
def test_the_first_field_that_helps_is_named(division, memory_bytes, field):
  config = from_mapping(LLAMA_7B | division)
  assert memory_advice(config, memory_bytes).startswith(f"{field} needs ")


def test_without_a_field_that_helps_enough_the_best_one_is_named():
  config = from_mapping(LLAMA_7B | SHARDS)
  words = memory_advice(config, 1e9)
  assert words.startswith("mesh.num_") and " needs " in words
