"""The binary of convergence sweeps: what it runs, keeps, reports, refuses."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments import convergence
from experiments.sweeps.required_runs import RequiredRuns
from experiments.sweeps.results import Results
from experiments.sweeps.run_maker import KeptRuns
from experiments.sweeps.sweep_spec import sweep
from tests.experiments.sweeps import fakes as sweeps

CONFIG = """
from ml_collections import config_dict

from tests.experiments.sweeps import fakes as sweeps


def get_config(names="dilocox_continue,allreduce,diloco,ours_1gbit"):
  values = sweeps.values({changed})
  values["methods"] = [
    m | {few} for m in values["methods"] if m["name"] in names.split(",")
  ]
  values["claims"], values["gaps"] = (), {{}}
  for each in values["equal_time"]:
    each["methods"] = names.split(",")
    each["reference"] = each["methods"][0]
  # Lists of mappings stay what they are where they are set as fields.
  apart = {{k: values.pop(k) for k in ("methods", "clusters", "equal_time")}}
  config = config_dict.ConfigDict(values)
  for name, value in apart.items():
    config[name] = value
  config.lock()
  return config
"""
DEADLINE_S = 180
ROOT = pathlib.Path(__file__).parents[2]
SMALL = "convergence_small"


def command(tmp_path, *arguments, few="{}", changed="", names=""):
  config = tmp_path / "nano.py"
  config.write_text(CONFIG.format(few=few, changed=changed))
  return [
    *(sys.executable, "-m", "experiments.convergence"),
    f"--config={config}{names}",
    f"--workdir={tmp_path / 'work'}",
    f"--results={tmp_path / 'kept.csv'}",
    *arguments,
  ]


def run(*arguments, **options):
  return subprocess.run(
    command(*arguments, **options), capture_output=True, text=True, check=False
  )


@pytest.mark.parametrize(
  "arguments, hint",
  [
    (("--task=tune",), "--task"),
    (("--methods=dilocoo",), "did you mean 'diloco'?"),
    (("--config.base.total_stepz=3",), "did you mean 'total_steps'?"),
    (("--config.sedes=3",), "did you mean 'seeds'?"),
    (("--config.seeds=(1000,)",), "tuned on flatter"),
    (("--config.base.inner.b2=x",), "b2"),
  ],
)
def test_a_mistake_is_one_line_before_anything_runs(arguments, hint, tmp_path):
  done = run(tmp_path, *arguments)
  assert done.returncode == 2, done.stderr
  (line,) = done.stderr.splitlines()
  assert line.startswith("error: ") and hint in line
  assert not (tmp_path / "work").exists()
  assert not (tmp_path / "kept.csv").exists()


def test_a_report_on_no_lines_is_refused_and_writes_nothing(tmp_path):
  done = run(tmp_path, "--task=report")
  assert done.returncode == 2 and "does not exist yet" in done.stderr
  assert not list(tmp_path.glob("kept*"))


@pytest.mark.slow
def test_lines_are_written_in_the_work_directory_unless_told(tmp_path):
  """A fresh clone begins with what is committed, and leaves it as it is."""
  results = ROOT / "docs/results"
  before = {p.name: p.read_bytes() for p in results.glob("*.*")}
  asked = command(tmp_path, "--task=tune_inner", "--methods=diloco")
  asked = [a for a in asked if not a.startswith(("--config", "--results"))]
  small = f"--config=experiments/configs/{SMALL}.py"
  # On another text every line would be made again: none of it in no time.
  text = ["--max_minutes=0"]
  done = subprocess.run(
    [*asked, small, *text], capture_output=True, text=True, check=False
  )
  assert "tune_inner: 6 runs, " in done.stdout, done.stderr
  assert {p.name: p.read_bytes() for p in results.glob("*.*")} == before
  work = tmp_path / "work"
  started = {name: before[name] for name in before if name.startswith(SMALL)}
  copied = {p.name: p.read_bytes() for p in work.glob(f"{SMALL}*")}
  assert copied == started


def test_only_a_config_of_ours_begins_with_committed_lines(tmp_path):
  ours = "experiments/configs/convergence_gpu.py:chinchilla_35m,2"
  name, start = convergence._name_and_start(ours)
  assert name == "convergence_gpu_chinchilla_35m_2"
  assert start == ROOT / "docs/results" / f"{name}.csv"
  other = str(tmp_path / "convergence_small.py")
  assert convergence._name_and_start(other) == ("convergence_small", None)


def test_results_that_tuning_has_not_prepared_are_refused(tmp_path):
  done = run(tmp_path, "--task=results")
  assert done.returncode == 1
  assert "run --task=tune_inner" in done.stderr
  assert (tmp_path / "work" / "report.md").exists()


@pytest.mark.slow
def test_a_report_needs_the_kept_lines_and_nothing_else(tmp_path, monkeypatch):
  sweeps.stand_in(monkeypatch)
  found = sweep(sweeps.values())
  plan = RequiredRuns(found)
  runs = KeptRuns(
    Results(tmp_path / "kept.csv", found.base), tmp_path / "a", False
  )
  plan.loss_of = runs.loss
  sweeps.make_all(plan, runs)
  kept = (tmp_path / "kept.csv").read_bytes()
  done = run(tmp_path, "--task=report", "--config.target_loss=3.0")
  assert done.returncode == 0, done.stderr
  assert (tmp_path / "kept.csv").read_bytes() == kept
  page = (tmp_path / "work" / "report.md").read_text()
  for text in (done.stdout, page):
    assert "At equal time on the clock '1gbit'" in text
    assert "to loss 3" in text and "not reached" not in text
  assert f"Corpus digest `{sweeps.TEXT}`" in page
  assert " seeds)" not in page and "cpu x 1, Python" in page


FEW, SHORT = "{'refine': ()}", "seeds=(0,)"


def lines(tmp_path):
  path = tmp_path / "kept.csv"
  return path.read_text().splitlines()[1:] if path.exists() else []


@pytest.mark.slow
def test_a_sweep_that_was_killed_goes_on_where_it_was(tmp_path):
  """Killed with -9, children too, once two of its runs have ended."""
  options = {"few": FEW, "changed": SHORT, "names": ":diloco"}
  rates = "--config.tuning.inner_learning_rates=(1e-3,3e-3)"
  asked = command(tmp_path, rates, **options)
  process = subprocess.Popen(
    asked, stdout=subprocess.DEVNULL, start_new_session=True
  )
  give_up = time.monotonic() + DEADLINE_S
  while len(lines(tmp_path)) < 2:
    assert process.poll() is None and time.monotonic() < give_up
    time.sleep(0.05)
  os.killpg(process.pid, signal.SIGKILL)
  process.wait()
  before = lines(tmp_path)
  done = subprocess.run(asked, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  after = lines(tmp_path)
  assert after[: len(before)] == before
  assert len(after) == 3 and len({x.split(",")[3] for x in after}) == 3
  again = subprocess.run(asked, capture_output=True, text=True, check=False)
  assert again.returncode == 0 and lines(tmp_path) == after


@pytest.mark.slow
def test_a_slice_stops_in_time_and_says_that_it_goes_on(tmp_path):
  done = run(tmp_path, "--max_minutes=0", names=":diloco", few=FEW)
  assert done.returncode == 75 and "the same command goes on" in done.stderr
