from typing import Any

import jax
import numpy as np
import pytest

from dilocox_jax.outer.data_parallel import SharedState
from dilocox_jax.outer.round_states import RoundState
from dilocox_jax.training import states
from tests import runs

SYNC = {"warm_start": "single", "warm_start_steps": 3}
PHASES = {"rounds": RoundState, "single": SharedState}
PHASES["data_parallel"] = SharedState


def _programs_and_params(layout):
  config = runs.settings(layout=layout, num_replicas=3, **SYNC)
  programs = runs.programs(config)
  return programs, jax.jit(programs.model.init)(jax.random.key(1))


@pytest.mark.parametrize("layout", ["stacked", "mesh"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_fresh_state_is_what_its_description_says(phase, layout):
  """A checkpoint is read into the description, so the two must agree."""
  programs, params = _programs_and_params(layout)
  fresh = states.fresh(programs, phase, params)
  described = states.abstract(programs, phase)
  assert isinstance(fresh, PHASES[phase])
  assert jax.tree.structure(fresh) == jax.tree.structure(described)
  pairs = zip(jax.tree.leaves(fresh), jax.tree.leaves(described), strict=True)
  for value, description in pairs:
    assert value.shape == description.shape
    assert value.dtype == description.dtype
    assert value.sharding.is_equivalent_to(description.sharding, value.ndim)


def test_the_state_of_rounds_has_every_replica_start_alike():
  programs, params = _programs_and_params("stacked")
  state: Any = states.fresh(programs, "rounds", params)
  runs.assert_same_bits(state.fragments[0].params, params)
  for own, start in zip(
    jax.tree.leaves(state.replica.params), jax.tree.leaves(params), strict=True
  ):
    np.testing.assert_array_equal(own, np.stack(3 * [start]))


@pytest.mark.parametrize("phase", ["single", "data_parallel"])
def test_the_state_before_rounds_is_shared(phase):
  programs, params = _programs_and_params("stacked")
  state: Any = states.fresh(programs, phase, params)
  runs.assert_same_bits(state.params, params)


def test_one_replica_alone_stays_on_one_device():
  programs, params = _programs_and_params("mesh")
  alone = states.fresh(programs, "single", params)
  together = states.fresh(programs, "data_parallel", params)
  for leaf in jax.tree.leaves(alone):
    assert len(leaf.sharding.device_set) == 1
  for leaf in jax.tree.leaves(together):
    assert len(leaf.sharding.device_set) == 3
