"""A replica trains the same model however its devices divide it."""

import itertools

import numpy as np
import pytest

from dilocox_jax.config import from_mapping
from tests.outer.test_whole_runs import losses

NUM_DEVICES = 8
SAME_LOSS = 1e-5
# Replicas x stages x data shards x tensor shards.
ALL = [
  division
  for division in itertools.product((1, 2, 4, 8), repeat=4)
  if np.prod(division) == NUM_DEVICES
]
FAST = [(1, 2, 2, 2), (2, 1, 2, 2)]
# Without stages, with stages that divide layers, and all three at once.
OF_CODECS = [(2, 1, 2, 2), (2, 2, 1, 2), (1, 2, 2, 2)]


def config_of(method, num_replicas, mesh):
  codecs = {"overlap_loco": {"feedback": 1.0}}
  return from_mapping(
    {
      "total_steps": 11,
      "model": {
        "preset": "nano",
        "num_heads": 8,
        "num_kv_heads": 8,
        "num_layers": 8,
        "scan_unroll": 1,
        "compute_dtype": "float32",
      },
      "data": {
        "source": "synthetic",
        "batch_size": 16,
        "sequence_length": 8,
      },
      "inner": {"warmup_steps": 0, "accumulate_steps": 2, "clip_norm": 0.5},
      "sync": {"method": method, "sync_interval": 2},
      "exchange": codecs.get(method, {}),
      "mesh": {"num_replicas": num_replicas, **mesh},
    }
  )


def assert_trains_as_stacked(method, division):
  num_replicas, num_stages, num_data_shards, num_tensor_shards = division
  mesh = {
    "layout": "mesh",
    "num_stages": num_stages,
    "num_data_shards": num_data_shards,
    "num_tensor_shards": num_tensor_shards,
  }
  expected, _ = losses(config_of(method, num_replicas, {}))
  found, _ = losses(config_of(method, num_replicas, mesh))
  np.testing.assert_allclose(found, expected, rtol=0, atol=SAME_LOSS)
  assert np.ptp(expected) > 100 * SAME_LOSS  # The model learns.


def name_of(division):
  return "x".join(map(str, division))


@pytest.mark.parametrize(
  "division",
  [
    pytest.param(
      division,
      marks=() if division in FAST else pytest.mark.slow,
      id=name_of(division),
    )
    for division in ALL
  ],
)
def test_a_replica_trains_the_same_however_it_is_divided(division):
  assert_trains_as_stacked("diloco", division)


@pytest.mark.slow
@pytest.mark.parametrize("division", OF_CODECS, ids=name_of)
@pytest.mark.parametrize("method", ["overlap_loco", "dilocox", "muloco"])
def test_codecs_and_muon_are_the_same_however_a_replica_is_divided(
  method, division
):
  assert_trains_as_stacked(method, division)
