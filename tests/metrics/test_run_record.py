"""What says later what was run, and from which source."""

import json
import platform
import subprocess

import jax
import numpy as np
import pytest

from dilocox_jax import metrics
from dilocox_jax.metrics import run_record

RUN = {"method": "diloco", "num_replicas": 2, "corpus_digest": "9f3a"}


def written(workdir, platform="cpu x 2", continues=False, **start):
  config = {"seed": np.int64(3), "outer": {"betas": (0.9, 0.95)}}
  start |= {"platform": platform, "command": "python -m x"}
  metrics.write_run_record(workdir, config, RUN, start, continues)
  return json.loads((workdir / "run.json").read_text())


def test_the_record_holds_the_config_and_what_ran_it(tmp_path):
  record = written(tmp_path / "runs/a")
  config = json.loads((tmp_path / "runs/a/config.json").read_text())
  assert config == {"seed": 3, "outer": {"betas": [0.9, 0.95]}}
  assert record.items() >= (RUN | {"command": "python -m x"}).items()
  assert record["versions"]["jax"] == jax.__version__
  assert record["versions"]["python"] == platform.python_version()
  (tmp_path / "file").write_text("in the way")
  with pytest.raises(metrics.RecordError, match="file/run") as error:
    written(tmp_path / "file/run")
  assert "\n" not in str(error.value)


def test_a_continued_run_keeps_how_else_it_was_started(tmp_path):
  def started(platform, **changes):
    record = written(tmp_path, platform=platform, **changes)
    assert record["platform"] == platform
    return [start["platform"] for start in record["earlier_starts"]]

  assert started("cpu", continues=True) == []  # Nothing was there before.
  assert started("cpu", continues=True) == []
  assert started("gpu", continues=True) == ["cpu"]
  assert started("tpu", continues=True) == ["cpu", "gpu"]
  assert started("gpu", continues=True) == ["cpu", "tpu"]
  chosen = {"model.compute_dtype": "bfloat16"}
  record = written(tmp_path, "gpu", True, chosen_for_device=chosen)
  assert record["chosen_for_device"] == chosen
  assert record["earlier_starts"][-1]["chosen_for_device"] is None
  (tmp_path / "run.json").write_text("{")
  assert started("cpu", continues=True) == []
  assert started("gpu") == []  # A new run in an old directory.


def test_the_source_revision_is_the_commit_of_this_package(
  tmp_path, monkeypatch
):
  def git(*arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(tmp_path), *who, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()

  def revision(source):
    source.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(run_record, "__file__", str(source))
    return run_record.source_revision()

  source = tmp_path / "dilocox_jax" / "metrics" / "run_record.py"
  assert revision(source) is None  # No checkout.
  source.write_text("")
  git("init", "-q")
  git("add", "-A")
  git("commit", "-q", "-m", "first")
  head = git("rev-parse", "HEAD")
  assert revision(source) == head
  source.write_text("# edited\n")
  assert revision(source) == f"{head}-dirty"
  # A copy that is installed in the checkout of another project.
  installed = tmp_path / "venv/site/dilocox_jax/metrics/run_record.py"
  assert revision(installed) is None
