"""The binary that trains: its help, its configs, and what it leaves behind."""

import importlib
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from dilocox_jax.config import from_mapping
from dilocox_jax.plan.schedule.methods import METHODS
from experiments.runtime import file_lock
from tests import runs

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = sorted(
  path.stem
  for path in (ROOT / "experiments" / "configs").glob("*.py")
  if path.stem not in ("__init__", "compiled", "default", "papers")
  and not path.stem.startswith(("ablate_", "convergence_"))
)
# Another reading of one method, as settings of the general one.
READINGS = {"cocktail_params": "delayed"}


def _train(*arguments, cwd=ROOT):
  done = _tried(*arguments, cwd=cwd)
  assert done.returncode == 0, done.stderr
  return done


def _tried(*arguments, cwd=ROOT):
  return subprocess.run(
    [sys.executable, "-m", "experiments.train", *arguments],
    capture_output=True,
    text=True,
    check=False,
    cwd=cwd,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
  )


def test_help_explains_from_any_directory_and_starts_no_jax(tmp_path):
  """A module named jax that cannot be imported stands in the way."""
  (tmp_path / "jax.py").write_text("raise RuntimeError('jax was loaded')\n")
  done = _train("--help", cwd=tmp_path)
  for part in ("--config", "--workdir", "profile", "continues the run"):
    assert part in done.stdout
  assert sorted(path.name for path in tmp_path.iterdir()) == ["jax.py"]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_file_is_named_after_its_method(name):
  module = importlib.import_module(f"experiments.configs.{name}")
  config = from_mapping(module.get_config().to_dict())
  assert config.sync.method == READINGS.get(name, name)
  assert config.sync.named.exchanged in ("gradient", "pseudo_gradient")
  assert module.__doc__ and f"configs/{name}.py" in module.__doc__
  for word in ("Source:", "Claim", "Cost:", "--workdir"):
    assert word in module.__doc__


def test_every_method_has_a_config_file():
  assert CONFIGS == sorted({*METHODS, *READINGS})


@pytest.fixture(scope="module", name="stacked")
def stacked_fixture(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("stacked")
  done = _train(*runs.SMALL_FLAGS, f"--workdir={workdir}", "--profile")
  return workdir, done


def test_a_run_leaves_what_explains_it(stacked):
  workdir, done = stacked
  for name in (
    *("config.json", "run.json", "metrics.jsonl", "timing.jsonl"),
    *("report.md", "tensorboard", "figures", "checkpoints"),
  ):
    assert (workdir / name).exists(), name
  assert f"report: {workdir / 'report.md'}" in done.stdout
  assert "diloco" in done.stdout and "Traceback" not in done.stderr


def test_a_profile_holds_the_devices_work(stacked):
  traces = list((stacked[0] / "profile").rglob("*.xplane.pb"))
  assert len(traces) == 1 and traces[0].stat().st_size > 10_000


@pytest.mark.slow
def test_replicas_on_devices_of_their_own_learn_the_same(stacked, tmp_path):
  """The command line makes as many CPU devices as there are replicas."""
  _train(
    *runs.SMALL_FLAGS, f"--workdir={tmp_path}", "--config.mesh.layout=mesh"
  )
  (stack,), (spread,) = (runs.rows(w, "final") for w in (stacked[0], tmp_path))
  for view in ("outer_loss", "mean_loss", "replica_loss"):
    np.testing.assert_allclose(spread[view], stack[view], rtol=0, atol=1e-4)
  assert spread["total_sent_bytes"] == stack["total_sent_bytes"] > 0


def test_a_directory_has_one_run_at_a_time(tmp_path):
  with file_lock.held(tmp_path / ".train.lock", ""):
    refused = _tried(*runs.SMALL_FLAGS, f"--workdir={tmp_path}")
  assert refused.returncode == 75  # The same command goes on later.
  assert refused.stderr.startswith("error: another run is at work in --workdir")
  assert refused.stderr.count("\n") == 1
  found = {each.name for each in tmp_path.iterdir()}
  assert found == {".train.lock", "made_by.json"}


def test_text_files_are_found_by_globs_of_which_each_replica_reads_one(
  tmp_path,
):
  texts = tmp_path / "texts"
  (texts / "more").mkdir(parents=True)
  for number in range(30):
    folder = texts / "more" if number % 2 else texts
    lines = [f"{number} {line} and so on\n" for line in range(60)]
    (folder / f"{number}.txt").write_text("".join(lines))
  _train(
    *runs.SMALL_FLAGS,
    f"--workdir={tmp_path / 'run'}",
    "--config.data.source=text_files",
    f"--config.data.glob={texts}/*.txt;{texts}/more/**/*.txt",
    "--config.data.mix=own",
    "--config.data.validation_fraction=0.3",
  )
  record = (tmp_path / "run" / "run.json").read_text()
  assert '"text_files"' in record
  losses = [row["loss"] for row in runs.rows(tmp_path / "run", "round")]
  assert len(losses) == 4 and losses[-1] < losses[0]
