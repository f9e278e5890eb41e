"""Where a run begins: anew, from its own checkpoint, or from another run."""

import dataclasses
import json
import logging
import shutil
from typing import Any

import jax
import numpy as np
import optax
import pytest

from dilocox_jax.api.runs import load
from dilocox_jax.training import evaluation, resume, start, states
from dilocox_jax.training.checkpoint import Checkpoints, RefusedError
from tests import damage, runs


@pytest.mark.parametrize("seed", [0, 1])
def test_the_seed_decides_where_a_run_begins(stopped, seed):
  config = dataclasses.replace(stopped.config, seed=seed)
  state: Any = start.first_state(config, stopped.programs, "rounds", runs.TINY)
  expected = jax.jit(stopped.programs.model.init)(jax.random.key(seed))
  runs.assert_same_bits(state.fragments[0].params, expected)


# What a run left that was killed, and who may overwrite it.


def check(stopped, workdir, config=None, digest=None):
  values = (config or stopped.config).to_mapping()
  resume.check_nothing_is_lost(values, workdir, digest or stopped.data.digest)


@pytest.fixture(name="unsaved")
def unsaved_fixture(stopped, tmp_path):
  """What a run leaves that is killed during its first save."""
  for name in ("config.json", "run.json", "metrics.jsonl"):
    shutil.copy(stopped.workdir / name, tmp_path / name)
  (tmp_path / "checkpoints" / "6.orbax-checkpoint-tmp").mkdir(parents=True)
  return tmp_path


def test_what_would_lose_nothing_may_begin(stopped, unsaved, tmp_path, caplog):
  with caplog.at_level(logging.INFO, "dilocox_jax"):
    check(stopped, unsaved)
  assert "starting again at step 0" in caplog.text
  (unsaved / "run.json").unlink()  # Killed while it was about to be written.
  check(stopped, unsaved)
  free = tmp_path / "free"
  (free / "checkpoints").mkdir(parents=True)
  (free / "notes.txt").write_text("mine")
  check(stopped, free)
  # A run with checkpoints is left to those who read them.
  other = dataclasses.replace(stopped.config, seed=5)
  check(stopped, stopped.workdir, other)


CHANGES = {
  "checkpoints are gone": lambda w: shutil.rmtree(w / "checkpoints"),
  "its checkpoints are": lambda w: (w / "report.md").touch(),
  "config.json cannot be": lambda w: (w / "config.json").write_text("[1]"),
  "config.json cannot": lambda w: (w / "config.json").unlink(),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_run_that_would_be_overwritten_is_refused(stopped, unsaved, reason):
  CHANGES[reason](unsaved)
  before = runs.files(unsaved)
  with pytest.raises(RefusedError, match="take another --workdir") as error:
    check(stopped, unsaved)
  assert reason in str(error.value) and "\n" not in str(error.value)
  assert runs.files(unsaved) == before


def test_another_run_that_saved_nothing_is_not_overwritten(stopped, unsaved):
  other = dataclasses.replace(stopped.config, seed=5)
  with pytest.raises(RefusedError, match=r"other settings \(seed: 0 -> 5\)"):
    check(stopped, unsaved, other)
  with pytest.raises(RefusedError, match="other settings .corpus: .* -> 0123"):
    check(stopped, unsaved, digest="0123")


# A run that goes on.


def resumed(stopped, config=None, digest=None, programs=None) -> Any:
  checkpoints = Checkpoints(stopped.workdir / "checkpoints", read_only=True)
  try:
    return resume.resumed_state(
      (config or stopped.config).to_mapping(),
      programs or stopped.programs,
      checkpoints,
      digest or stopped.data.digest,
      runs.TINY,
    )
  finally:
    checkpoints.close()


def test_a_run_goes_on_from_its_newest_checkpoint(stopped, caplog):
  free = runs.settings(
    evaluation={"interval_steps": 1}, checkpoint={"interval_steps": 1}
  )  # Fields that leave the run alone.
  with caplog.at_level(logging.INFO, "dilocox_jax"):
    state, record = resumed(stopped, free)
  runs.assert_same_bits(state, runs.saved(stopped.workdir)[0])
  assert states.TrainingProgress(**record["position"]) == stopped.progress
  assert "continuing at step 12 of 21" in caplog.text


@pytest.mark.parametrize(
  ("changes", "digest", "says"),
  [
    ({}, "0123456789abcdef", "corpus: .* -> 0123456789abcdef"),
    ({"inner": {"learning_rate": 0.1}}, None, "inner.learning_rate: .* -> 0.1"),
    ({"total_steps": 30, "rule": "reset"}, None, "rule: .*; total_steps: 21 "),
    ({"num_replicas": 3}, None, "num_replicas: 2 -> 3.*init_from"),
  ],
)
def test_another_run_is_named_by_what_differs(stopped, changes, digest, says):
  before = runs.files(stopped.workdir)
  with pytest.raises(RefusedError, match=says) as error:
    resumed(stopped, runs.settings(**changes), digest)
  assert "\n" not in str(error.value)
  assert runs.files(stopped.workdir) == before


# A run that inherits from another one (checkpoint.init_from).


def inherited(source, phase="rounds", **changes) -> Any:
  given = {"init_from": str(source)}
  config = runs.settings(num_replicas=3, checkpoint=given, **changes)
  return start.first_state(
    config, runs.programs(config, runs.TINY), phase, runs.TINY
  )


@pytest.mark.parametrize("layout", ["stacked", "mesh"])
def test_a_new_run_keeps_outer_parameters_and_momentum_alone(
  finished, tmp_path, layout, caplog
):
  source = finished[0]
  state = inherited(source, layout=layout)
  old = runs.saved(source)[0]
  outer = state.fragments[0]
  kept = old.fragments[0]
  runs.assert_same_bits(outer.params, kept.params)
  copies = jax.tree.map(lambda leaf: np.stack(3 * [leaf]), kept.params)
  runs.assert_same_bits(state.replica.params, copies)
  runs.assert_same_bits(outer.optimizer, kept.optimizer)
  assert optax.tree.norm(outer.optimizer) > 0
  fresh = (outer.in_flight, outer.exchange, state.replica.optimizer)
  assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(fresh))
  assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
  config = runs.settings(num_replicas=3, layout=layout)
  new = runs.trainer(config, tmp_path, overrides=runs.TINY)
  seen, _ = evaluation.losses(new.programs, state, new.data.validation)
  (final,) = runs.rows(source, "final")
  for name in ("outer_loss", "mean_loss", "replica_loss"):
    np.testing.assert_allclose(seen[name], final[name], rtol=1e-6)


def test_an_outer_optimizer_that_does_not_fit_starts_fresh_with_a_warning(
  finished, caplog
):
  state = inherited(finished[0], outer={"optimizer": "adam"})
  assert "does not fit" in caplog.text
  moments = jax.tree.leaves(state.fragments[0].optimizer)
  assert not any(np.asarray(x).any() for x in moments)
  old, _ = runs.saved(finished[0])
  runs.assert_same_bits(state.fragments[0].params, old.fragments[0].params)
  warm = inherited(finished[0], "data_parallel", warm_start_steps=3)
  runs.assert_same_bits(warm.params, old.fragments[0].params)


def test_outer_optimizers_of_single_replicas_are_not_taken_over(
  tmp_path, caplog
):
  # Each pair of replicas has a mean of its own, so outer states differ.
  pairs = {"num_replicas": 4, "exchange": {"collective": "pairs"}}
  source = runs.settings(**pairs)
  runs.train(source, tmp_path, until=6, overrides=runs.TINY)
  moments = runs.saved(tmp_path)[0].fragments[0].optimizer
  assert optax.tree.norm(moments) > 0
  given = {"init_from": str(tmp_path)}
  config = runs.settings(**pairs, checkpoint=given)
  programs = runs.programs(config, runs.TINY)
  state: Any = start.first_state(config, programs, "rounds", runs.TINY)
  assert "does not fit" in caplog.text
  assert optax.tree.norm(state.fragments[0].optimizer) == 0


@pytest.mark.slow
def test_personal_outer_parameters_are_averaged(tmp_path):
  runs.train(
    runs.settings(method="eager"), tmp_path, until=6, overrides=runs.TINY
  )
  old = runs.saved(tmp_path)[0].fragments[0].params
  new = inherited(tmp_path).fragments[0].params
  means = jax.tree.map(lambda leaf: np.asarray(leaf).mean(axis=0), old)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-9),
    new,
    means,
  )


def test_what_cannot_be_inherited_is_refused(finished, tmp_path):
  source = finished[0]
  with pytest.raises(RefusedError, match="is not a run directory"):
    inherited(tmp_path / "nowhere")
  shutil.copy(source / "config.json", tmp_path)
  with pytest.raises(RefusedError, match="has no checkpoints"):
    inherited(tmp_path)
  (tmp_path / "checkpoints").mkdir()
  with pytest.raises(RefusedError, match="another shape.*ff_dim=24"):
    inherited(tmp_path, model={"ff_dim": 32})
  # Programs that load a run have no checkpoint.init_from.
  with pytest.raises(RefusedError, match=f"^{tmp_path} has no whole check"):
    inherited(tmp_path)
  (tmp_path / "config.json").write_text(json.dumps({"sync": {"method": "x"}}))
  with pytest.raises(RefusedError, match="config.json is not a run's config"):
    inherited(tmp_path)


def test_a_config_beside_the_checkpoints_of_another_run_is_refused(
  finished, tmp_path
):
  shutil.copytree(finished[0] / "checkpoints", tmp_path / "checkpoints")
  path = tmp_path / "config.json"
  whole = json.loads((finished[0] / "config.json").read_text())

  def refused(config, said):
    path.write_text(json.dumps(config))
    with pytest.raises(RefusedError, match=said) as error:
      start.saved_outer_params(tmp_path, runs.TINY)
    assert "\n" not in str(error.value)

  refused(whole | {"seed": 5}, "is not the config of .* seed: 0 -> 5")
  less = {name: x for name, x in whole["inner"].items() if name != "optimizer"}
  refused(whole | {"inner": less}, "it lacks inner.optimizer: it is damaged")
  path.write_text(json.dumps(whole))
  assert start.saved_outer_params(tmp_path, runs.TINY)


def test_a_damaged_config_of_a_run_is_one_line_or_a_config(finished, tmp_path):
  whole = json.loads((finished[0] / "config.json").read_text())
  shutil.copytree(finished[0], tmp_path / "a")
  path = tmp_path / "a" / "config.json"
  values = (10**30, "line\nbreak")
  for what, text in damage.in_fields(whole, values):
    path.write_text(text)
    damage.outcome(what, lambda: load(tmp_path / "a").config)
  for what, content in damage.in_bytes(json.dumps(whole).encode()):
    path.write_bytes(content)
    damage.outcome(what, lambda: load(tmp_path / "a").config)
