import dataclasses
import logging
from typing import Any

import jax
import pytest

from dilocox_jax.training import resume, states
from dilocox_jax.training.checkpoint import Checkpoints, RefusedError
from tests import runs


def _resumed(stopped, config=None, digest=None):
  checkpoints = Checkpoints(stopped.workdir / "checkpoints")
  try:
    return resume.resumed_state(
      config or stopped.config,
      stopped.programs,
      checkpoints,
      digest or stopped.data.digest,
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
  resumed = resume.resumed_state(
    stopped.config, stopped.programs, other, stopped.data.digest
  )
  other.close()
  assert resumed is None


def test_a_checkpoint_of_an_older_program_is_refused_in_one_line(
  stopped, tmp_path
):
  state, record = runs.saved(stopped.workdir)
  assert record.pop("in_flight") == [1]
  older = Checkpoints(tmp_path / "checkpoints")
  older.save(12, state, record)
  with pytest.raises(RefusedError, match="take the version of the program"):
    resume.resumed_state(
      stopped.config, stopped.programs, older, stopped.data.digest
    )
  older.close()


def test_another_text_is_another_run(stopped):
  before = runs.files(stopped.workdir)
  with pytest.raises(RefusedError) as error:
    _resumed(stopped, digest="0123456789abcdef")
  expected = f"corpus: {stopped.data.digest} -> 0123456789abcdef"
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


def test_more_replicas_join_where_the_next_round_begins(stopped, caplog):
  """Rounds of three steps: after step 12 rounds 0 to 3 are over."""
  config = runs.settings(num_replicas=4)
  checkpoints = Checkpoints(stopped.workdir / "checkpoints", read_only=True)
  try:
    with caplog.at_level(logging.INFO, "dilocox_jax"):
      found = resume.resumed_state(
        config, runs.programs(config), checkpoints, stopped.data.digest
      )
  finally:
    checkpoints.close()
  assert found and "mesh.num_replicas: 2 -> 4" in caplog.text
  state: Any
  state, record = found
  assert record["controller"]["joined"] == [[2, 0, 3], [3, 0, 3]]
  old, _ = runs.saved(stopped.workdir)
  runs.assert_same_bits(state.fragments[0].params, old.fragments[0].params)
  rows = jax.tree.map(lambda leaf: leaf[:2], state.replica)
  runs.assert_same_bits(rows, old.replica)
