"""The binary of convergence sweeps: what it runs, keeps, reports, refuses."""

import math
import os
import signal
import subprocess
import sys
import time
import types
from typing import Any

import pytest

from experiments import convergence
from experiments.sweeps.required_runs import RequiredRuns
from experiments.sweeps.results import Results
from experiments.sweeps.runs import RunMaker
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
  assert done.returncode == 2 and "there is no" in done.stderr
  assert not list(tmp_path.glob("kept*"))


def test_one_method_that_cannot_go_on_stops_no_other():
  plan = sweeps.plan()

  def only_diloco_works(planned):
    is_diloco = planned.method == "diloco"
    return sweeps.loss_of(planned) if is_diloco else math.nan

  methods = plan.sweep.methods
  planned, lacking = convergence._planned(
    plan, "results", methods, only_diloco_works
  )
  assert {each.method for each in planned} == {"diloco"}
  assert len(lacking) == len(methods) - 1


def test_a_method_that_no_setting_trains_is_told_at_the_end():
  """Also one that is in no contest, of which the last task says nothing."""
  contest = {
    "clock": "1gbit",
    "reference": "dilocox_continue",
    "methods": ("allreduce", "dilocox_continue"),
  }
  plan = sweeps.plan(equal_time=[contest])
  runs = types.SimpleNamespace(
    loss=lambda each: (
      math.nan if each.method == "diloco" else sweeps.loss_of(each)
    ),
    missing=lambda planned: [],
    elsewhere=lambda planned: 0,
    make=lambda *_: ([], False),
  )
  asked: Any = types.SimpleNamespace(
    max_minutes=None, task="all", methods=[], processes=1
  )
  (why,) = convergence._make_tasks(asked, plan, runs).lacking
  assert "'diloco' diverged" in why


def test_results_that_tuning_has_not_prepared_are_refused(tmp_path):
  done = run(tmp_path, "--task=results")
  assert done.returncode == 1
  assert "run --task=tune_inner" in done.stderr
  assert (tmp_path / "work" / "report.md").exists()


def test_a_report_needs_the_kept_lines_and_nothing_else(tmp_path, monkeypatch):
  sweeps.stand_in(monkeypatch)
  found = sweep(sweeps.values())
  plan = RequiredRuns(found)
  runs = RunMaker(
    Results(tmp_path / "kept.csv", found.base), tmp_path / "a", False
  )
  sweeps.make_all(plan, runs)
  kept = (tmp_path / "kept.csv").read_bytes()
  done = run(tmp_path, "--task=report", "--config.target_loss=3.0")
  assert done.returncode == 0, done.stderr
  assert (tmp_path / "kept.csv").read_bytes() == kept
  page = (tmp_path / "work" / "report.md").read_text()
  for text in (done.stdout, page):
    assert "At equal time on the clock '1gbit'" in text
    assert "to loss 3 (h)" in text and "not reached" not in text
  assert f"Corpus digest `{sweeps.TEXT}`" in page
  assert "allreduce (" not in page and "cpu x 1, Python" in page


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
