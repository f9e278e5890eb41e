"""Files of earlier versions become the two tables, without losing a digit."""

import json

import pandas
import pytest

from experiments.sweeps.finished import Rows
from experiments.sweeps.tables import read_runs
from tests.experiments.programs import run

SWEEP = {
  "name": "diloco 4x4",
  "seed": "3",
  "digest": "0123456789ab",
  "corpus": "94ff7b8a2cc36d33",
  "overrides": json.dumps(
    {
      "inner.optimizer": "muon",
      "inner.warmup_steps": 7,
      "mesh.num_replicas": 4,
      "seed": 3,
      "sync.method": "diloco",
      "sync.sync_interval": 25,
      "total_steps": 2000,
    }
  ),
  "total_steps": "2000",
  "tokens": "8192000",
  "sent_bytes": "411464160",
  "loss": "1.1234567890123457",
  "mean_loss": "1.25",
  "best_loss": "1.0625",
  "judge_loss": "nan",
  "wall_s": "9.5",
  "platform": "cpu",
  "python": "3.11.7",
  "jax": "0.10.2",
  "revision": "1499ea0",
  "cores": "2",
  "failure": "",
}
POINT = {
  "digest": "0123456789ab",
  "corpus": "94ff7b8a2cc36d33",
  "step": "2000",
  "tokens": "8192000",
  "sent_bytes": "411464160",
  "loss": "0.30000000000000004",
  "flushed": "True",
}
ABLATION = {
  "run": "allreduce, muon",
  "seed": "0",
  "source_revision": "55132eb",
  "cores": "1",
  "step": "1000",
  "tokens": "1024000",
  "sent_bytes": "3428868000",
  "outer_loss": "1.4531104564666748",
}
GPU = {
  "task": "allreduce b8",
  "method": "allreduce",
  "num_replicas": "2",
  "batch_size": "4",
  "sync_interval": "1",
  "num_fragments": "1",
  "codec": "float32",
  "collective": "all_reduce",
  "stage": "results 2",
  "inner_rate": "0.003",
  "outer_rate": "",
  "seed": "1000",
  "steps": "2000",
  "loss_choose": "1.1569597721099854",
  "loss_judge": "1.2388432025909424",
  "newest_loss_choose": "1.1765081882476807",
  "newest_loss_judge": "1.2569551467895508",
  "sent_bytes": "6857736000",
  "device": "NVIDIA H200",
}


@pytest.fixture(scope="module", name="path")
def path_fixture(tmp_path_factory):
  """Path of runs.csv that four old files became, converted twice."""
  folder = tmp_path_factory.mktemp("old")
  files = {
    "replicas_main.csv": [SWEEP],
    "replicas_main_curves.csv": [POINT],
    "ablate_long_curves.csv": [
      ABLATION,
      ABLATION | {"step": "2000", "outer_loss": "1.335006833076477"},
    ],
    "replicas_gpu.csv": [GPU],
  }
  for name, lines in files.items():
    pandas.DataFrame(lines).to_csv(folder / name, index=False)
  path = folder / "new" / "runs.csv"
  old = [folder / name for name in files]
  for _ in range(2):
    done = run("sweeps.convert", *old, f"--runs={path}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"3 runs, 3 evaluations: {path}\n"
  return path


def test_a_run_of_a_sweep_has_its_config_in_columns(path):
  rows = Rows(path, "replicas_main")
  (row,) = rows.runs.values()
  assert (row.setting, row.seed, row.steps) == ("diloco 4x4", 3, 2000)
  assert row.loss == 1.1234567890123457 and row.replica_mean_loss == 1.25
  assert (row.revision, row.seconds, row.cores) == ("1499ea0", 9.5, 2)
  assert row.config["num_replicas"] == 4
  assert row.config["inner.warmup_steps"] == 7
  (point,) = rows.evaluations(row)
  assert point.loss == 0.30000000000000004 and point.flushed
  ((_, overrides),) = rows.settings
  assert json.loads(SWEEP["overrides"]).items() <= overrides.items()


def test_what_is_not_known_of_older_runs_stays_empty(path):
  runs = read_runs(path).set_index("study")
  ablation = runs.loc["ablate_long"]
  assert (ablation["method"], ablation["steps"]) == ("allreduce", 2000)
  assert ablation["loss"] == 1.335006833076477
  assert pandas.isna(ablation["num_replicas"])
  gpu = runs.loc["replicas_gpu_results_2"]
  assert gpu["loss_newest"] == 1.1765081882476807
  assert gpu["judge_loss"] == 1.2388432025909424
  assert pandas.isna(gpu["outer_rate"]) and gpu["platform"] == "NVIDIA H200"


def test_another_file_is_named_in_one_line(path):
  done = run("sweeps.convert", path, f"--runs={path.parent}/other.csv")
  assert done.returncode == 2
  assert "is no file of finished runs: leave it out" in done.one_line
