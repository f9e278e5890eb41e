"""From a run to a checkpoint of another library, and back into a run."""

import subprocess
import sys
from typing import Any

import pytest

from dilocox_jax.training import start
from dilocox_jax.training.checkpoint import RefusedError
from tests import runs

pytest.importorskip("safetensors", reason="needs the extra `weights`")


def export(run, workdir):
  return subprocess.run(
    [
      *(sys.executable, "-m", "experiments.export"),
      *(f"--run={run}", f"--workdir={workdir}"),
    ],
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.fixture(scope="module", name="folders")
def folders_fixture(tmp_path_factory):
  run, exported = (tmp_path_factory.mktemp(name) for name in ("run", "out"))
  runs.train(runs.settings(), run, until=6)
  done = export(run, exported)
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("llama, 12,624 parameters")
  return run, exported


@pytest.mark.slow
def test_a_run_starts_from_what_another_one_exported(folders):
  run, exported = folders
  config = runs.settings(
    num_replicas=3, checkpoint={"init_from": str(exported)}
  )
  state: Any = start.first_state(config, runs.programs(config), "rounds")
  old, _ = runs.saved(run)
  runs.assert_same_bits(state.fragments[0].params, old.fragments[0].params)


@pytest.mark.slow
def test_another_model_says_what_to_set(folders):
  source = {"init_from": str(folders[1])}
  config = runs.settings(model={"ff_dim": 32}, checkpoint=source)
  with pytest.raises(RefusedError, match="set --config.model.ff_dim=24$"):
    start.first_state(config, runs.programs(config), "rounds")


def test_what_cannot_be_exported_is_one_line(tmp_path):
  done = export(tmp_path, tmp_path / "out")
  assert done.returncode == 2
  assert done.stderr.startswith(f"error: {tmp_path} is not a run directory")
  assert len(done.stderr.splitlines()) == 1
