"""Short runs of the nano model, each replica divided among devices."""

from typing import Any

import jax
import numpy as np
import pytest

from dilocox_jax.config import from_mapping, to_plan
from dilocox_jax.plan.schedule.methods import METHODS
from dilocox_jax.training import states
from experiments.configs import default, overlap_loco
from tests import runs
from tests.tiers import slow

SAME_LOSS = 1e-4
ROUNDS = 5
INTERVAL = 2
SMALL = 16 * 16  # Norms, and products of factors; what is larger is divided.
DIVIDED = {"layout": "mesh", "num_data_shards": 2, "num_stages": 2}
FILES = {  # Methods as the experiments have them, with their codecs.
  **dict.fromkeys(("allreduce", "cocktail_sgd", "diloco", "dilocox"), {}),
  **dict.fromkeys(("eager", "muloco", "open_diloco", "sparse_loco"), {}),
  "delayed": {"overlap_steps": 1},
  "overlap_loco": {"num_fragments": 2},
  "streaming_diloco": {"num_fragments": 2, "overlap_steps": 1},
}


def config_of(name, mesh):
  """An experiment's config with a model and rounds for a test."""
  file = overlap_loco if name == "overlap_loco" else default
  values = file.get_config().to_dict()
  values["sync"]["method"] = name
  values["total_steps"] = ROUNDS * INTERVAL + 1
  values["model"] |= {"preset": "nano", "scan_unroll": 1}
  values["data"] |= {
    "source": "synthetic",
    "batch_size": 4,
    "sequence_length": 8,
  }
  values["inner"] |= {"warmup_steps": 0, "accumulate_steps": 2}
  values["mesh"] |= mesh
  values["sync"] |= {"steps_per_dispatch": INTERVAL, **FILES[name]}
  if values["sync"]["method"] not in ("allreduce", "cocktail_sgd"):
    values["sync"]["sync_interval"] = INTERVAL
  return from_mapping(values)


def losses(config):
  """Losses of every replica and step of five rounds, and the last state."""
  programs = runs.programs(config)
  plan = to_plan.run_plan(config)
  phase = plan.phase(0)
  found = []
  params = states.first_params(programs, config.seed)
  state: Any = states.fresh(programs, phase, params)
  tokens = np.random.default_rng(0)
  step = 0
  for _ in range(ROUNDS):
    segment = plan.segment(step)
    step = segment.stop
    shape = (
      config.mesh.num_replicas,
      segment.num_steps,
      config.data.batch_size,
      config.data.sequence_length + 1,
    )
    batches = tokens.integers(0, 256, shape, np.int32)
    if phase == "rounds":
      state, seen, _ = programs.rounds.run(state, batches)  # pyright: ignore
    else:
      state, seen = programs.steps.steps(state, batches)  # pyright: ignore
    found.append(np.asarray(seen.loss))
  return np.concatenate(found, axis=1), state


@pytest.mark.parametrize(
  "name", ["diloco", *slow(*(name for name in FILES if name != "diloco"))]
)
def test_two_replicas_of_four_devices_train_as_two_stacked_ones(name):
  assert set(FILES) == set(METHODS)
  expected, _ = losses(config_of(name, {}))
  found, state = losses(config_of(name, DIVIDED))
  np.testing.assert_allclose(found, expected, rtol=0, atol=SAME_LOSS)
  assert np.ptp(expected) > 100 * SAME_LOSS  # It trains.
  whole = [
    jax.tree_util.keystr(path)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    if leaf.size > SMALL and leaf.sharding.is_fully_replicated
  ]
  assert not whole
