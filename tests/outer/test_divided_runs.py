"""A replica of several devices trains as one device would."""

import importlib
from typing import Any

import jax
import numpy as np
import pytest

from dilocox_jax.config import from_mapping, to_plan
from dilocox_jax.plan.schedule.methods import METHODS
from dilocox_jax.training import states
from tests import runs

SAME_LOSS = 1e-4
ROUNDS, INTERVAL = 5, 2
BATCH_SIZE, SEQUENCE_LENGTH = 4, 8

# Config files of the experiments, with their codecs.
METHOD_FILES = (
  "allreduce",
  "cocktail_sgd",
  "delayed",
  "diloco",
  "dilocox",
  "eager",
  "muloco",
  "open_diloco",
  "overlap_loco",
  "sparse_loco",
  "streaming_diloco",
)
SMALL = 16 * 16  # Norms, and products of factors; what is larger is divided.
QUICK = ("diloco",)
DIVIDED = {"layout": "mesh", "num_data_shards": 2, "num_stages": 2}


def config_of(name, mesh, **model):
  """An experiment's config with a model and rounds for a test."""
  file = importlib.import_module(f"experiments.configs.{name}")
  values = file.get_config().to_dict()
  values["total_steps"] = ROUNDS * INTERVAL + 1
  values["model"] |= {"preset": "nano", "scan_unroll": 1, **model}
  values["data"] |= {
    "source": "synthetic",
    "batch_size": BATCH_SIZE,
    "sequence_length": SEQUENCE_LENGTH,
  }
  values["inner"] |= {"warmup_steps": 0, "accumulate_steps": 2}
  values["mesh"] |= mesh
  values["sync"]["steps_per_dispatch"] = INTERVAL
  if values["sync"]["method"] not in ("allreduce", "cocktail_sgd"):
    values["sync"]["sync_interval"] = INTERVAL
  if name == "streaming_diloco":
    values["sync"] |= {"num_fragments": 2, "overlap_steps": 1}
  if name == "overlap_loco":
    values["sync"]["num_fragments"] = 2
  if name == "delayed":
    values["sync"]["overlap_steps"] = 1
  return from_mapping(values)


def losses(config):
  """Losses of every replica and step of five rounds."""
  programs, plan = runs.programs(config), to_plan.run_plan(config)
  phase, found = plan.phase(0), []
  params = states.first_params(programs, phase, config.seed)
  state: Any = states.fresh(programs, phase, params)
  tokens = np.random.default_rng(0)
  step = 0
  for _ in range(ROUNDS):
    segment = plan.segment(step)
    step = segment.stop
    shape = (config.mesh.num_replicas, segment.num_steps, BATCH_SIZE)
    batches = tokens.integers(0, 256, (*shape, SEQUENCE_LENGTH + 1), np.int32)
    if phase == "rounds":
      state, seen, _ = programs.rounds.run(state, batches)
    else:
      state, seen = programs.steps.steps(state, batches)
    found.append(np.asarray(seen.loss))
  return np.concatenate(found, axis=1), state


@pytest.mark.parametrize(
  "name", ["allreduce", pytest.param("dilocox", marks=pytest.mark.slow)]
)
def test_one_replica_of_two_devices_trains_as_a_stacked_one(name):
  alone = {"num_replicas": 1}
  expected, _ = losses(config_of(name, alone))
  stages = {"layout": "mesh", "num_stages": 2}
  found, _ = losses(config_of(name, alone | stages))
  np.testing.assert_allclose(found, expected, rtol=0, atol=SAME_LOSS)


def test_every_named_method_has_a_config_file_here():
  named = {config_of(name, {}).sync.method for name in METHOD_FILES}
  assert named == set(METHODS)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in METHOD_FILES
  ],
)
def test_two_replicas_of_four_devices_train_as_two_stacked_ones(name):
  expected, _ = losses(config_of(name, {}))
  found, state = losses(config_of(name, DIVIDED))
  assert expected.shape == (2, ROUNDS * INTERVAL)
  np.testing.assert_allclose(found, expected, rtol=0, atol=SAME_LOSS)
  assert np.ptp(expected) > 100 * SAME_LOSS  # It trains.
  whole = [
    jax.tree_util.keystr(path)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    if leaf.size > SMALL and leaf.sharding.is_fully_replicated
  ]
  assert not whole
