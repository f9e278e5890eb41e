"""The adviser on a terminal: its table, its page and its configs."""

import dataclasses
import importlib.util
import itertools
import json
import subprocess
import sys
from typing import Any

import pytest

from dilocox_jax.api import advice as api
from dilocox_jax.api.candidates import families
from dilocox_jax.config import RunConfig, from_mapping
from experiments.runtime.command_line import UsageError
from experiments.simulation import advice as page
from tests import runs


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


@pytest.fixture(scope="module", name="found")
def found_fixture():
  """What is found among a few settings."""

  def few(config):
    return itertools.islice(families(config), 0, 99, 33)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(api, "families", few)
    return api.advise(RunConfig(), "100mbit", step_s=0.03)


@pytest.mark.parametrize("is_edited", [True, False])
def test_an_answer_takes_the_place_of_the_one_before_and_of_no_other_file(
  found, tmp_path, monkeypatch, is_edited
):
  monkeypatch.setattr(page, "picture", lambda *_: [])
  proposals = [
    [dataclasses.replace(p, against=why) for p in found.proposals]
    for why in ("", "too slow")
  ]
  every, none = (dataclasses.replace(found, proposals=p) for p in proposals)

  def write(answer):
    page.write_advice(answer, RunConfig(), "100mbit", 1e9, tmp_path)
    return sorted(path.name for path in tmp_path.glob("*.py"))

  (tmp_path / "z_mine.py").write_text("mine")
  *names, _ = first = write(every)
  assert names and write(none) == ["z_mine.py"] and write(every) == first
  if not is_edited:
    write(none)
  with (tmp_path / names[-1]).open("a") as file:
    file.write("# My own.\n")
  before = runs.files(tmp_path)
  for answer in (none, every):
    with pytest.raises(UsageError, match=f"{names[-1]} is not as advise wrote"):
      write(answer)
    assert runs.files(tmp_path) == before


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
