"""The adviser on a terminal: its table, its page and its configs."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from dilocox_jax.config import from_mapping


def run_advise(*flags):
  return subprocess.run(
    [sys.executable, "-m", "experiments.advise", *flags],
    capture_output=True,
    text=True,
    check=False,
  )


def config_of(path):
  spec: Any = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return from_mapping(module.get_config().to_dict())


@pytest.fixture(scope="module", name="written")
def written_fixture(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("advice")
  done = run_advise(
    "--cluster=100mbit",
    "--step_s=0.03",
    "--explain",
    f"--workdir={workdir}",
    "--config.model.preset=tiny",
    "--config.inner.learning_rate=0.003",
  )
  assert done.returncode == 0, done.stderr
  return done.stdout, workdir


def test_the_page_and_the_terminal_agree(written):
  text, workdir = written
  page = (workdir / "report.md").read_text()
  numbers = json.loads((workdir / "advice.json").read_text())["proposals"]
  assert (workdir / "figures" / "pareto.png").is_file()
  assert "times as fast as the config as given (diloco H=30)" in page
  assert "the best" in text and "cocktail_sgd" in text
  assert f"{numbers[0]['tokens_per_s']:,.0f}" in page


def test_a_proposed_config_is_what_was_priced(written):
  _, workdir = written
  best = json.loads((workdir / "advice.json").read_text())["proposals"][0]
  config = config_of(workdir / f"{best['changes']['sync.method']}.py")
  assert config.inner.learning_rate == 0.003
  for path, value in best["changes"].items():
    section, field = path.split(".")
    assert getattr(getattr(config, section), field) == value


@pytest.mark.slow
def test_a_proposed_config_has_the_mesh_that_was_priced(tmp_path):
  done = run_advise(
    "--cluster=1gbit",
    "--step_s=1",
    f"--workdir={tmp_path}",
    "--config.model.preset=tiny",
    "--config.mesh.layout=mesh",
    "--config.mesh.num_stages=2",
    "--config.inner.optimizer=sgd",
    "--config.inner.momentum=0.9",
  )
  assert done.returncode == 0, done.stderr
  paths = list(tmp_path.glob("*.py"))
  assert paths
  for path in paths:
    config = config_of(path)
    assert f"mesh {config.mesh.num_stages}x1" in path.read_text()


@pytest.mark.slow
def test_a_proposed_config_trains(written, tmp_path):
  _, workdir = written
  best = json.loads((workdir / "advice.json").read_text())["proposals"][0]
  path = workdir / f"{best['changes']['sync.method']}.py"
  done = subprocess.run(
    [
      *(sys.executable, "-m", "experiments.train", f"--config={path}"),
      *(f"--workdir={tmp_path}", "--config.total_steps=60"),
      *("--config.model.preset=nano", "--config.data.source=synthetic"),
    ],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
  ("flag", "said"),
  [
    ("--max_gap=nan", "--max_gap=nan must be a number of at least 0"),
    ("--tokens=-5", "--tokens=-5.0 must be a number of at least 0"),
    ("--tokens=0", "--tokens=0.0 must be above 0"),
    ("--step_s=0", "step_s=0.0 must be seconds, more than 0"),
    ("--memory=-80 GB", "--memory and --send must be above 0"),
  ],
)
def test_limits_that_are_no_limits_are_one_line(tmp_path, flag, said):
  done = run_advise("--cluster=1gbit", f"--workdir={tmp_path}", flag)
  assert (done.returncode, done.stderr) == (2, f"error: {said}\n")


def test_limits_that_nothing_keeps_are_one_line(tmp_path):
  done = run_advise(
    "--cluster=1gbit",
    "--step_s=0.03",
    f"--workdir={tmp_path}",
    "--memory=1 MB",
  )
  assert done.returncode == 1
  assert done.stderr.count("\n") == 1
  assert done.stderr.startswith("error: no setting keeps all limits; of the")
