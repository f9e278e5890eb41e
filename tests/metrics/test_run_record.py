import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from dilocox_jax import metrics
from dilocox_jax.metrics import run_record


def _write(workdir, **changes):
  fields = {
    "config": {"seed": np.int64(3), "outer": {"betas": (0.9, 0.95)}},
    "method": "diloco",
    "num_replicas": 2,
    "parameter_count": 871_168,
    "corpus_name": "stdlib",
    "corpus_digest": "9f3a",
    "held_out_digest": "51d0",
    "platform": "cpu x 2",
  }
  metrics.write_run_record(workdir, **(fields | changes))


def test_a_record_says_what_is_timed_if_there_is_a_clock(tmp_path):
  for clock, expected in (("cluster 1gbit", "cluster 1gbit"), ("", None)):
    _write(tmp_path, clock=clock)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record.get("clock") == expected


def test_the_record_holds_the_config_and_what_ran_it(tmp_path):
  _write(tmp_path / "runs/a")
  config = json.loads((tmp_path / "runs/a/config.json").read_text())
  record = json.loads((tmp_path / "runs/a/run.json").read_text())
  assert config == {"seed": 3, "outer": {"betas": [0.9, 0.95]}}
  assert record["corpus_digest"] == "9f3a"
  assert record["held_out_digest"] == "51d0"
  assert record["parameter_count"] == 871_168
  assert record["versions"]["jax"] == jax.__version__
  assert record["versions"]["python"] == platform.python_version()


def test_a_continued_run_keeps_how_else_it_was_started(tmp_path):
  def started(platform, **changes):
    _write(tmp_path, platform=platform, **changes)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["platform"] == platform
    return [start["platform"] for start in record["earlier_starts"]]

  assert started("cpu", continues=True) == []  # Nothing was there before.
  assert started("cpu", continues=True) == []
  assert started("gpu", continues=True) == ["cpu"]
  assert started("tpu", continues=True) == ["cpu", "gpu"]
  assert started("gpu", continues=True) == ["cpu", "tpu"]
  (tmp_path / "run.json").write_text("{")
  assert started("cpu", continues=True) == []
  assert started("gpu") == []  # A new run in an old directory.


def test_a_run_that_moves_to_another_device_keeps_what_was_chosen(tmp_path):
  dtype = "model.compute_dtype"
  _write(tmp_path, chosen={dtype: "float32"})
  _write(tmp_path, chosen={dtype: "bfloat16"}, continues=True)
  record = json.loads((tmp_path / "run.json").read_text())
  assert record["chosen_for_device"] == {dtype: "bfloat16"}
  (before,) = record["earlier_starts"]
  assert before["chosen_for_device"] == {dtype: "float32"}


@pytest.fixture(name="checkout")
def checkout_fixture(tmp_path):
  """A copy of the package in a repository of its own, with one commit."""
  if shutil.which("git") is None:
    pytest.skip("needs git")
  source = Path(run_record.__file__).parents[1]
  target = tmp_path / "project/dilocox_jax"
  ignore = shutil.ignore_patterns("__pycache__")
  shutil.copytree(source / "metrics", target / "metrics", ignore=ignore)
  for name in ("checks.py", "files.py"):
    shutil.copy(source / name, target)
  (target / "__init__.py").write_text("")
  _git(target.parent, "init", "-q")
  _git(target.parent, "add", "-A")
  _git(target.parent, "commit", "-q", "-m", "first")
  return target.parent


def _git(directory, *arguments):
  who = ["-c", "user.name=a", "-c", "user.email=a@b"]
  command = ["git", "-C", str(directory), *who, *arguments]
  done = subprocess.run(command, check=True, capture_output=True, text=True)
  return done.stdout.strip()


def _revision(directory):
  code = (
    "import dilocox_jax.metrics.run_record as r; print(r.source_revision())"
  )
  done = subprocess.run(
    [sys.executable, "-B", "-c", code],
    check=True,
    capture_output=True,
    text=True,
    env={**os.environ, "PYTHONPATH": str(directory)},
    cwd=directory,
  )
  return done.stdout.strip()


def test_the_source_revision_is_the_commit_and_says_when_it_was_edited(
  checkout,
):
  head = _git(checkout, "rev-parse", "HEAD")
  assert _revision(checkout) == head
  (checkout / "dilocox_jax/__init__.py").write_text("# edited\n")
  assert _revision(checkout) == f"{head}-dirty"


def test_a_copy_installed_in_a_foreign_checkout_has_no_revision(checkout):
  site = checkout / "venv/site"
  shutil.copytree(checkout / "dilocox_jax", site / "dilocox_jax")
  assert _revision(site) == "None"


def test_a_work_directory_that_cannot_be_written_is_one_line(tmp_path):
  (tmp_path / "file").write_text("in the way")
  with pytest.raises(metrics.RecordError) as error:
    _write(tmp_path / "file/run")
  assert "file/run" in str(error.value) and "\n" not in str(error.value)
