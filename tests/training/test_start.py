import dataclasses
import json
import logging
import shutil
from typing import Any

import jax
import pytest

from dilocox_jax.training import start
from dilocox_jax.training.checkpoint import RefusedError
from tests import runs


@pytest.mark.parametrize("seed", [0, 1])
def test_the_seed_decides_where_a_run_begins(stopped, seed):
  config = dataclasses.replace(stopped.config, seed=seed)
  state: Any = start.first_state(config, stopped.programs, "rounds")
  expected = jax.jit(stopped.programs.model.init)(jax.random.key(seed))
  runs.assert_same_bits(state.fragments[0].params, expected)


def _check(stopped, workdir, config=None, digest=None):
  start.check_nothing_is_lost(
    config or stopped.config, workdir, digest or stopped.data.digest
  )


@pytest.fixture(name="unsaved")
def unsaved_fixture(stopped, tmp_path):
  """What a run leaves that is killed during its first save."""
  for name in ("config.json", "run.json", "metrics.jsonl"):
    shutil.copy(stopped.workdir / name, tmp_path / name)
  (tmp_path / "checkpoints" / "6.orbax-checkpoint-tmp").mkdir(parents=True)
  lines = (stopped.workdir / "timing.jsonl").read_text().splitlines()
  first = next(i for i, line in enumerate(lines) if "checkpoint" in line)
  (tmp_path / "timing.jsonl").write_text("\n".join(lines[: first + 1]) + "\n")
  return tmp_path


def test_a_directory_without_a_run_may_be_used(stopped, tmp_path):
  (tmp_path / ".train.lock").touch()
  (tmp_path / "notes.txt").write_text("mine")
  (tmp_path / "checkpoints").mkdir()
  _check(stopped, tmp_path)


def test_a_run_killed_before_its_first_save_may_start_again(
  stopped, unsaved, caplog
):
  with caplog.at_level(logging.INFO, "dilocox_jax"):
    _check(stopped, unsaved)
  assert "starting again at step 0" in caplog.text
  (unsaved / "run.json").unlink()  # Killed while it was about to be written.
  _check(stopped, unsaved)


def test_a_field_newer_than_the_run_had_its_default(stopped, unsaved):
  saved = json.loads((unsaved / "config.json").read_text())
  del saved["exchange"]["kind"]
  (unsaved / "config.json").write_text(json.dumps(saved))
  _check(stopped, unsaved)
  del saved["seed"]
  (unsaved / "config.json").write_text(json.dumps(saved))
  other = dataclasses.replace(stopped.config, seed=stopped.config.seed + 5)
  with pytest.raises(RefusedError, match="seed: 0 -> "):
    _check(stopped, unsaved, other)


def test_a_run_with_checkpoints_is_left_to_those_who_read_them(stopped):
  other = dataclasses.replace(stopped.config, seed=5)
  _check(stopped, stopped.workdir, other)


@pytest.mark.parametrize(
  "change, reason",
  [
    (lambda w: shutil.rmtree(w / "checkpoints"), "its checkpoints are gone"),
    (lambda w: (w / "report.md").touch(), "its checkpoints are gone"),
    (
      lambda w: (w / "timing.jsonl").write_text(
        2 * '{"event": "checkpoint", "step": 6}\n'
      ),
      "its checkpoints are gone",
    ),
    (lambda w: (w / "timing.jsonl").write_text("[\n"), "timing.jsonl cannot"),
    (lambda w: (w / "config.json").write_text("{"), "config.json cannot be"),
    (lambda w: (w / "config.json").write_text("[1]"), "config.json cannot be"),
    (lambda w: (w / "config.json").unlink(), "config.json cannot be read"),
  ],
)
def test_a_run_that_would_be_overwritten_is_refused(
  stopped, unsaved, change, reason
):
  change(unsaved)
  before = runs.files(unsaved)
  with pytest.raises(RefusedError, match="take another --workdir") as error:
    _check(stopped, unsaved)
  assert reason in str(error.value) and "\n" not in str(error.value)
  assert runs.files(unsaved) == before


def test_another_run_that_saved_nothing_is_not_overwritten(stopped, unsaved):
  other = dataclasses.replace(stopped.config, seed=5)
  with pytest.raises(RefusedError, match=r"other settings \(seed: 0 -> 5\)"):
    _check(stopped, unsaved, other)
  with pytest.raises(RefusedError, match="other settings .corpus: .* -> 0123"):
    _check(stopped, unsaved, digest="0123")
