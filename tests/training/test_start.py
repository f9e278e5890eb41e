import dataclasses
import logging
from typing import Any

import jax
import pytest

from dilocox_jax.training import start, states
from dilocox_jax.training.checkpoint import Checkpoints, RefusedError
from tests import runs


@pytest.fixture(scope="module", name="stopped")
def stopped_fixture(tmp_path_factory):
  """A run that was killed after its checkpoint of step 12."""
  workdir = tmp_path_factory.mktemp("stopped")
  return runs.train(runs.settings(), workdir, until=12)


def _resumed(stopped, config=None, digest=None):
  checkpoints = Checkpoints(stopped.workdir / "checkpoints")
  try:
    return start.resumed_state(
      config or stopped.config,
      stopped.programs,
      checkpoints,
      digest or stopped.corpus.digest,
    )
  finally:
    checkpoints.close()


def test_a_run_goes_on_from_its_newest_checkpoint(stopped, caplog):
  with caplog.at_level(logging.INFO, "dilocox_jax"):
    resumed = _resumed(stopped)
  assert resumed
  state, record = resumed
  runs.assert_same_bits(state, runs.saved(stopped.workdir)[0])
  assert states.TrainingProgress(**record["position"]) == stopped.progress
  assert "continuing at step 12 of 21" in caplog.text


def test_an_empty_directory_has_nothing_to_continue(stopped, tmp_path):
  other = Checkpoints(tmp_path / "checkpoints")
  resumed = start.resumed_state(
    stopped.config, stopped.programs, other, stopped.corpus.digest
  )
  other.close()
  assert resumed is None


def test_another_text_is_another_run(stopped):
  before = runs.files(stopped.workdir)
  with pytest.raises(RefusedError) as error:
    _resumed(stopped, digest="0123456789abcdef")
  expected = f"corpus: {stopped.corpus.digest} -> 0123456789abcdef"
  assert expected in str(error.value)
  assert runs.files(stopped.workdir) == before


def test_the_refusal_names_every_field_that_changes_the_run(stopped):
  config = dataclasses.replace(stopped.config, seed=5, total_steps=30)
  with pytest.raises(RefusedError) as error:
    _resumed(stopped, config)
  assert "seed: 0 -> 5; total_steps: 21 -> 30" in str(error.value)


def test_fields_that_leave_the_run_alone_may_change(stopped):
  free = runs.settings(
    evaluation={"interval_steps": 1},
    checkpoint={"interval_steps": 1, "keep": 5},
  )
  assert _resumed(stopped, free)


def test_where_a_run_was_inherited_from_is_a_part_of_it(stopped):
  other = runs.settings(checkpoint={"init_from": "elsewhere"})
  with pytest.raises(RefusedError, match="checkpoint.init_from: '' -> 'else"):
    _resumed(stopped, other)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_seed_decides_where_a_run_begins(stopped, seed):
  config = dataclasses.replace(stopped.config, seed=seed)
  state: Any = start.first_state(config, stopped.programs, "local")
  expected = jax.jit(stopped.programs.model.init)(jax.random.key(seed))
  runs.assert_same_bits(state.outer.params, expected)
