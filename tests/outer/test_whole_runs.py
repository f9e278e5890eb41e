"""Short runs of the nano model, divided, through codecs and resumed."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from dilocox_jax.config import from_mapping, to_plan
from dilocox_jax.config.sections import ExchangeConfig
from dilocox_jax.outer.data_parallel import SharedState
from dilocox_jax.plan.schedule.methods import METHODS
from dilocox_jax.training import states
from experiments.configs import default, overlap_loco
from tests import runs
from tests.outer import nano
from tests.outer.problem import assert_rounded_alike

SAME_LOSS = 1e-4
ROUNDS, INTERVAL = 5, 2
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
  programs, plan = runs.programs(config), to_plan.run_plan(config)
  phase, found = plan.phase(0), []
  params = states.first_params(programs, config.seed)
  state: Any = states.fresh(programs, phase, params)
  tokens, step = np.random.default_rng(0), 0
  for _ in range(ROUNDS):
    segment = plan.segment(step)
    step = segment.stop
    shape = (config.mesh.num_replicas, segment.num_steps, 4, 8 + 1)
    batches = tokens.integers(0, 256, shape, np.int32)
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


@pytest.mark.parametrize(
  "name",
  ["diloco"]
  + [pytest.param(n, marks=pytest.mark.slow) for n in FILES if n != "diloco"],
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


LOW_RANK = ExchangeConfig("low_rank(rank=2)+int(bits=8)", feedback=1.0)
COCKTAIL = ExchangeConfig(
  "random_mask(fraction=0.5)+top_k(fraction=0.5,indices=bitmap)+int",
  feedback=1.0,
)


def first_exchange(state):
  is_shared = isinstance(state, SharedState)
  return state.exchange if is_shared else state.fragments[0].exchange


@pytest.mark.slow
@pytest.mark.parametrize(
  ("method", "exchange", "sync"),
  [
    ("dilocox", LOW_RANK, {}),
    (
      "cocktail_sgd",
      COCKTAIL,
      {"sync_interval": None, "steps_per_dispatch": 3},
    ),
  ],
)
def test_a_killed_run_goes_on_with_what_it_owes(
  method, exchange, sync, tmp_path
):
  config = dataclasses.replace(
    runs.settings(total_steps=12, method=method, **sync), exchange=exchange
  )
  runs.train(config, tmp_path / "whole")
  runs.train(config, tmp_path / "killed", until=9)
  cut, _ = runs.saved(tmp_path / "killed")
  owed = jax.tree.leaves(first_exchange(cut).residual)
  assert any(np.asarray(leaf, np.float32).any() for leaf in owed)
  runs.train(config, tmp_path / "killed")
  ends = [runs.saved(tmp_path / name)[0] for name in ("whole", "killed")]
  runs.assert_same_bits(*ends)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2])
def test_two_messages_have_the_same_bits_from_a_thread(num_stages):
  plain = nano.config(
    num_steps=14,
    num_replicas=2,
    layout="mesh",
    model={"num_layers": 4},
    method="dilocox",
    rule="continue",
    sync_interval=4,
  ).to_mapping()
  plain["exchange"] |= {"codec": "low_rank(rank=2)+int(bits=4)"}
  plain["mesh"] |= {"num_stages": num_stages}
  results = {}
  for dispatch in ("round", "thread"):
    plain["mesh"]["exchange_dispatch"] = dispatch
    programs, state, metrics = nano.train(from_mapping(plain))
    assert bool(programs.rounds.thread) == (dispatch == "thread")
    results[dispatch] = jax.device_get((metrics, programs.rounds.flush(state)))
  assert_rounded_alike(results["thread"], results["round"])
