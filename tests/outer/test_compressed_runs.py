"""Whole runs with compressed exchanges, on the nano model."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from dilocox_jax.config.sections import ExchangeConfig
from dilocox_jax.outer.data_parallel import SharedState
from tests import runs
from tests.aggregators.problem import close
from tests.outer import nano

INTERVAL, ROUNDS = 4, 3
LOW_RANK = ExchangeConfig("low_rank(rank=2)+int(bits=8)", feedback=1.0)
COCKTAIL = ExchangeConfig(
  "random_mask(fraction=0.5)+top_k(fraction=0.5,indices=bitmap)+int",
  feedback=1.0,
)


@dataclasses.dataclass(frozen=True)
class Case:
  """A method with its exchange, and how far the two layouts may come apart.

  The layouts sum in different orders. With fp16 a last bit may then be another,
  2^-10 of a pseudo-gradient of 0.03. A code may turn into the next, or another
  value be among the largest, which is an error of its own.
  """

  exchange: ExchangeConfig
  sync: dict
  same: float


CASES = {
  "open_diloco": Case(
    ExchangeConfig("float16"),
    {"sync_interval": INTERVAL},
    5e-5,
  ),
  "streaming_diloco": Case(
    ExchangeConfig("e3m0"),
    {"sync_interval": INTERVAL, "num_fragments": 2, "overlap_steps": 1},
    1e-3,
  ),
  "dilocox": Case(LOW_RANK, {"sync_interval": INTERVAL}, 1e-3),
  "cocktail_sgd": Case(COCKTAIL, {}, 1e-3),
}
# Rounds of many leaves compile for long; one kind of each is quick enough.
BY_TIME = [
  pytest.param(name, marks=() if name == "open_diloco" else pytest.mark.slow)
  for name in CASES
]


@functools.cache
def trained(name, layout):
  """(programs, state on the host, losses [M, steps]) of a run."""
  case = CASES[name]
  config = nano.config(
    num_steps=INTERVAL * ROUNDS,
    num_replicas=2,
    layout=layout,
    method=name,
    inner={"learning_rate": 1e-2},
    **case.sync,
  )
  config = dataclasses.replace(config, exchange=case.exchange)
  _, state, metrics = nano.train(config)
  return state, metrics


def outer_params(state):
  """The parameters that all replicas share."""
  if isinstance(state, SharedState):
    return state.params
  return [fragment.params for fragment in state.fragments]


def exchange_state(state):
  """The state of the first fragment's exchange."""
  if isinstance(state, SharedState):
    return state.exchange
  return state.fragments[0].exchange


@pytest.mark.parametrize(
  "name",
  [
    "open_diloco",
    pytest.param("streaming_diloco", marks=pytest.mark.slow),
    pytest.param("dilocox", marks=pytest.mark.slow),
    pytest.param("cocktail_sgd", marks=pytest.mark.slow),
  ],
)
def test_a_model_learns_through_a_compressed_exchange(name):
  _, seen = trained(name, "stacked")
  losses = np.asarray(seen.loss).mean(axis=0)
  assert np.isfinite(losses).all()
  assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", BY_TIME)
def test_both_layouts_train_alike(name):
  stacked, seen = trained(name, "stacked")
  on_mesh, seen_on_mesh = trained(name, "mesh")
  same = CASES[name].same
  np.testing.assert_allclose(seen_on_mesh.loss, seen.loss, rtol=0, atol=same)
  close(outer_params(on_mesh), outer_params(stacked), same)


@pytest.mark.parametrize("name", BY_TIME)
def test_replicas_on_a_mesh_keep_one_codec_state_and_residuals_of_their_own(
  name,
):
  state = exchange_state(trained(name, "mesh")[0])
  # Where transfers overlap, the last one is still on its way.
  arrived = {"cocktail_sgd": INTERVAL * ROUNDS, "open_diloco": ROUNDS}
  assert state.codec.count == arrived.get(name, ROUNDS - 1)
  for leaf in jax.tree.leaves(state.codec):
    first, second = [np.asarray(x.data) for x in leaf.addressable_shards]
    assert first.tobytes() == second.tobytes()
  if CASES[name].exchange.feedback:
    for leaf in jax.tree.leaves(state.residual):
      assert leaf.shape[0] == 2
      assert (leaf[0] != leaf[1]).any()
  else:
    assert state.residual is None


@pytest.mark.parametrize(
  ("method", "exchange", "dtype"),
  [
    pytest.param("dilocox", LOW_RANK, "int8", marks=pytest.mark.slow),
    pytest.param("cocktail_sgd", COCKTAIL, "bfloat16", marks=pytest.mark.slow),
  ],
)
def test_a_killed_run_goes_on_with_what_it_owes(
  method, exchange, dtype, tmp_path
):
  sync = (
    {}
    if method == "dilocox"
    else {"sync_interval": None, "steps_per_dispatch": 3}
  )
  config = dataclasses.replace(
    runs.settings(total_steps=12, method=method, **sync),
    exchange=dataclasses.replace(exchange, residual_dtype=dtype),
  )
  runs.train(config, tmp_path / "whole")
  runs.train(config, tmp_path / "killed", until=9)
  cut, _ = runs.saved(tmp_path / "killed")
  assert any(
    np.asarray(leaf, np.float32).any()
    for leaf in jax.tree.leaves(exchange_state(cut).residual)
  )
  runs.train(config, tmp_path / "killed")
  (whole, _), (resumed, _) = (
    runs.saved(tmp_path / name) for name in ("whole", "killed")
  )
  runs.assert_same_bits(resumed, whole)
