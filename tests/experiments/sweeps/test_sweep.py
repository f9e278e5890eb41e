"""The binary: it trains what is missing, reports on all, and goes on."""

import csv
import textwrap

import pytest

from tests.experiments.programs import run

CONFIG = """
from ml_collections import config_dict
from experiments.configs import default

def get_config():
  base = default.get_config()
  base.total_steps = 6
  base.data.source, base.data.batch_size = "synthetic", 1
  base.data.sequence_length, base.model.preset = 8, "nano"
  base.model.scan_unroll, base.evaluation.num_sequences = 1, 2
  base.evaluation.interval_steps = 3
  return config_dict.ConfigDict({
    "base": base,
    "grid": config_dict.ConfigDict(),
    "seeds": (0,),
    "runs": [
      {"name": "allreduce", "sync.method": "allreduce"},
      {"name": "diloco", "sync.method": "diloco", "sync.sync_interval": 3},
      RUN
    ],
    "baseline": "allreduce",
    "clocks": [{"name": "1gbit", "cluster": "1gbit", "step_s": 0.03}],
  })
"""


def config(tmp_path, more=""):
  path = tmp_path / "mine.py"
  path.write_text(textwrap.dedent(CONFIG).replace("RUN", more))
  return f"--config={path}"


@pytest.mark.slow
def test_a_sweep_keeps_what_is_done_and_trains_the_rest(tmp_path):
  out = tmp_path / "out"
  some = (config(tmp_path), f"--workdir={out}")
  done = run("sweep", *some, "--only=diloco")
  assert done.returncode == 0, done.stderr
  assert "run 1 of 1, diloco, seed 0: loss" in done.stdout
  assert "allreduce (0 of 1 seeds)" in done.stdout
  # A run that diverges is a result, one that fails is tried again.
  more = '{"name": "wild", "inner.learning_rate": 1e38, "inner.clip_norm": 0.0}'
  done = run("sweep", config(tmp_path, more), f"--workdir={out}")
  assert done.returncode == 0, done.stderr
  assert "3 runs, 2 to do" in done.stdout and "wild, seed 0: div" in done.stdout
  with (out / "mine.csv").open(newline="") as file:
    rows = {row["name"]: row for row in csv.DictReader(file)}
  assert set(rows) == {"allreduce", "diloco", "wild"}
  assert rows["wild"]["failure"] and rows["wild"]["loss"] == "nan"
  page = (out / "report.md").read_text()
  assert "| diloco |" in page and "Time on the clock '1gbit'" in page
  assert not list(out.glob("runs/*/checkpoints"))
  again = run("sweep", config(tmp_path, more), f"--workdir={out}")
  assert "3 runs, 0 to do" in again.stdout


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (["--config.gird.x=1"], "did you mean 'grid'"),
    (["--config.base.sync.intervall=3"], "did you mean 'sync_interval'"),
    (["--only=diloo"], "did you mean 'diloco'"),
    (["--config.base.inner.optimizer=addam"], "run 'allreduce': inner."),
    (["--processes=0"], "processes"),
  ],
)
def test_a_mistake_is_one_line_and_nothing_is_made(tmp_path, flags, words):
  out = tmp_path / "out"
  done = run("sweep", config(tmp_path), f"--workdir={out}", *flags)
  assert done.returncode == 2 and words in done.one_line
  assert not out.exists()


@pytest.mark.parametrize(
  ("more", "code", "words"),
  [
    ("", 75, "--max_minutes=0 are over"),
    ('{"name": "x", "data.batch_size": 10**9}', 1, "runs failed, first x"),
  ],
)
def test_what_did_not_end_is_said_and_the_page_is_written(
  tmp_path, more, code, words
):
  out = tmp_path / "out"
  limit = ["--max_minutes=0"] if code == 75 else ["--only=x"]
  done = run("sweep", config(tmp_path, more), f"--workdir={out}", *limit)
  assert done.returncode == code and words in done.stderr
  assert (out / "report.md").exists()
