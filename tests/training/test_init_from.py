import json
import logging
import shutil
from typing import Any

import jax
import numpy as np
import optax
import pytest

from dilocox_jax.training import evaluation, start
from dilocox_jax.training.checkpoint import RefusedError
from tests import runs


@pytest.fixture(scope="module", name="source")
def source_fixture(tmp_path_factory):
  """A finished run of two replicas."""
  workdir = tmp_path_factory.mktemp("source")
  runs.train(runs.settings(), workdir)
  return workdir


def _settings(source, **changes):
  return runs.settings(
    **{
      "num_replicas": 3,
      "checkpoint": {"init_from": str(source)},
      **changes,
    }
  )


def _inherited(source, phase="rounds", **changes) -> Any:
  config = _settings(source, **changes)
  return start.state_from_run(config, runs.programs(config), phase, source)


def test_more_replicas_start_where_the_outer_parameters_stood(source):
  state = _inherited(source)
  old, _ = runs.saved(source)
  runs.assert_same_bits(state.fragments[0].params, old.fragments[0].params)
  for own, outer in zip(
    jax.tree.leaves(state.replica.params),
    jax.tree.leaves(old.fragments[0].params),
    strict=True,
  ):
    np.testing.assert_array_equal(own, np.stack(3 * [outer]), strict=True)


def test_the_outer_momentum_is_kept_and_all_else_is_fresh(source):
  state = _inherited(source)
  old, _ = runs.saved(source)
  runs.assert_same_bits(
    state.fragments[0].optimizer, old.fragments[0].optimizer
  )
  kept = optax.tree.norm(state.fragments[0].optimizer)
  assert kept > 0, "the source had no momentum to keep"
  outer = state.fragments[0]
  fresh = (outer.in_flight, outer.exchange, state.replica.optimizer)
  assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(fresh))


@pytest.mark.parametrize("layout", ["stacked", "mesh"])
def test_the_new_run_begins_at_the_loss_at_which_the_old_one_ended(
  source, tmp_path, layout
):
  new = runs.trainer(_settings(source, layout=layout), tmp_path)
  state = start.state_from_run(new.config, new.programs, "rounds", source)
  seen = evaluation.losses(new.programs, state, new.data.validation)
  (final,) = runs.rows(source, "final")
  for name in ("outer_loss", "mean_loss", "replica_loss"):
    np.testing.assert_allclose(seen[name], final[name], rtol=1e-6)


@pytest.mark.slow
def test_the_new_run_trains_and_goes_on_from_its_own_checkpoints(
  source, tmp_path
):
  before = runs.files(source)
  config = _settings(source)
  runs.train(config, tmp_path / "whole")
  runs.train(config, tmp_path / "parts", until=9)
  runs.train(config, tmp_path / "parts")
  assert runs.metrics_text(tmp_path / "parts") == runs.metrics_text(
    tmp_path / "whole"
  )
  row = runs.rows(tmp_path / "whole", "round")[0]
  assert row["step"] == 3 and len(row["loss_per_replica"]) == 3
  assert row["loss"] < runs.rows(source, "round")[0]["loss"]
  assert runs.files(source) == before


def test_an_outer_optimizer_that_does_not_fit_starts_fresh_with_a_warning(
  source, caplog
):
  with caplog.at_level(logging.WARNING, "dilocox_jax"):
    state = _inherited(source, outer={"optimizer": "adam"})
  assert "does not fit" in caplog.text and str(source) in caplog.text
  assert not any(
    np.asarray(x).any() for x in jax.tree.leaves(state.fragments[0].optimizer)
  )
  old, _ = runs.saved(source)
  runs.assert_same_bits(state.fragments[0].params, old.fragments[0].params)


def test_one_that_fits_is_kept_without_a_word(source, caplog):
  _inherited(source)
  assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_warm_start_begins_with_the_outer_parameters_too(source):
  state = _inherited(source, "single", warm_start="single", warm_start_steps=3)
  old, _ = runs.saved(source)
  runs.assert_same_bits(state.params, old.fragments[0].params)


@pytest.mark.slow
def test_personal_outer_parameters_are_averaged(tmp_path, caplog):
  runs.train(runs.settings(method="eager"), tmp_path, until=6)
  old, _ = runs.saved(tmp_path)
  state = _inherited(tmp_path)
  for new, personal in zip(
    jax.tree.leaves(state.fragments[0].params),
    jax.tree.leaves(old.fragments[0].params),
    strict=True,
  ):
    mean = np.asarray(personal).mean(axis=0)
    np.testing.assert_allclose(new, mean, rtol=1e-6, atol=1e-9)
  assert "does not fit" in caplog.text


@pytest.mark.slow
def test_a_run_over_many_devices_is_read_on_one(source, tmp_path, monkeypatch):
  runs.train(runs.settings(layout="mesh"), tmp_path, until=6)
  old, _ = runs.saved(tmp_path)
  one = jax.devices()[:1]
  config = _settings(tmp_path)
  programs = runs.programs(config)
  monkeypatch.setattr(jax, "devices", lambda: one)
  state: Any = start.state_from_run(config, programs, "rounds", tmp_path)
  runs.assert_same_bits(state.fragments[0].params, old.fragments[0].params)


def test_another_model_is_refused(source):
  with pytest.raises(RefusedError, match="model of another shape") as error:
    _inherited(source, model={"ff_dim": 32})
  assert str(source) in str(error.value) and "ff_dim=24" in str(error.value)


def test_a_directory_without_a_run_is_refused(source, tmp_path):
  with pytest.raises(RefusedError, match="is not a run directory"):
    _inherited(tmp_path / "nowhere")
  shutil.copy(source / "config.json", tmp_path)
  with pytest.raises(RefusedError, match="has no checkpoints"):
    _inherited(tmp_path)
  (tmp_path / "checkpoints").mkdir()
  with pytest.raises(RefusedError, match="has no whole checkpoint"):
    _inherited(tmp_path)
  (tmp_path / "config.json").write_text(json.dumps({"sync": {"method": "x"}}))
  with pytest.raises(RefusedError, match="config.json is not a run's config"):
    _inherited(tmp_path)


def test_a_checkpoint_is_read_with_its_own_number_of_replicas(source, tmp_path):
  # A run that goes on with more replicas has a new config before its next save.
  workdir = tmp_path / "resumed"
  shutil.copytree(source, workdir)
  config = json.loads((workdir / "config.json").read_text())
  config["mesh"]["num_replicas"] = 4
  (workdir / "config.json").write_text(json.dumps(config))
  expected = start.saved_outer_params(source)
  runs.assert_same_bits(start.saved_outer_params(workdir), expected)
