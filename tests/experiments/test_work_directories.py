"""No program writes into a directory that another one, or a user, made."""

import importlib
import re
import shutil
from typing import Any

import pytest

import dilocox_jax as dx
from experiments.configs import default
from experiments.runtime import command_line
from experiments.runtime.command_line import UsageError
from tests import runs
from tests.experiments.given_flags import given
from tests.experiments.programs import run
from tests.report.conftest import write_run

SOURCES = {
  path.stem: path.read_text()
  for folder in (".", "tools")
  for path in (command_line.CONFIGS.parent / folder).glob("*.py")
}
# Program -> whose stamp its directories have.
OWNERS = {
  name: found[1]
  for name, text in SOURCES.items()
  if (found := re.search(r'writable\(values\.workdir, "(\w+)"\)', text))
}


def test_every_program_with_a_work_directory_claims_it():
  own = {name for name, text in SOURCES.items() if "workdir" in text}
  assert set(OWNERS) == own
  assert {name for name in OWNERS if OWNERS[name] != name} == {"launch"}


def foreign(folder, owner):
  """A directory of another program, with the names that all of them have."""
  command_line.writable(str(folder), owner)
  for name in ("report.md", "config.json", "dilocox.py", "train.bin"):
    (folder / name).write_text(f"of {owner}")
  return runs.files(folder)


def assert_refused(folder, owner, program, function, *arguments):
  before = runs.files(folder)
  with pytest.raises(UsageError) as refused:
    function(*arguments)
  line = str(refused.value)
  assert line.startswith(f"--workdir={folder} ") and "\n" not in line
  assert owner in line and program in line
  assert "choose another --workdir" in line
  assert runs.files(folder) == before
  assert not [path for path in folder.iterdir() if path.name[0] == "."]


@pytest.mark.parametrize("program", sorted({*OWNERS.values()}))
def test_no_program_takes_the_directory_of_another_or_of_a_user(
  tmp_path, program
):
  for owner in {*OWNERS.values()} - {program}:
    foreign(tmp_path / owner, owner)
    folder = tmp_path / owner
    claim = (command_line.writable, str(folder), program)
    assert_refused(folder, owner, program, *claim)
    (folder / "made_by.json").unlink()
    assert_refused(folder, "did not make", program, *claim)
  whose = foreign(tmp_path / "own", program)
  command_line.writable(str(tmp_path / "own"), program)
  assert runs.files(tmp_path / "own") == whose


MAINS: dict[str, dict[str, Any]] = {
  "export": {"run": "nowhere", "parts": []},
  "prepare_data": {"tokenizer": "bytes", "source": "", "shuffle_buffer": 0},
  "quickstart": {},
  "simulate": {
    **{"cluster": "1gbit", "run": None, "parts": [], "step_s": 0.1},
    **{"codec_s": 0.0, "transport": "nccl", "methods": "own"},
    **{"memory": None, "tokens": None, "config": default.get_config()},
  },
  "speedup_tables": {"papers": ["dilocox"]},
}


@pytest.mark.parametrize("program", MAINS)
def test_a_program_refuses_before_it_writes(tmp_path, program):
  module = importlib.import_module(f"experiments.{program}")
  foreign(tmp_path / "other", "compare")
  shutil.copytree(command_line.CONFIGS, tmp_path / "user")
  for folder, owner in (
    (tmp_path / "other", "compare"),
    (tmp_path / "user", "did not make"),
  ):
    values = given(workdir=str(folder), **MAINS[program])
    assert_refused(folder, owner, program, module.main, values)


def test_a_sweep_refuses_before_it_writes(tmp_path):
  before = foreign(tmp_path / "other", "compare")
  done = run("sweep", f"--workdir={tmp_path / 'other'}")
  assert done.returncode == 2 and "compare" in done.one_line
  assert runs.files(tmp_path / "other") == before


def test_compare_refuses_the_directory_of_a_run_that_it_reads(tmp_path):
  compare = importlib.import_module("experiments.compare")
  own = write_run(tmp_path / "run")
  values = given(workdir=str(own), runs=[str(own)])
  assert_refused(own, "did not make", "compare", compare.main, values)


def test_a_run_is_trained_in_a_directory_of_runs_only(tmp_path):
  before = foreign(tmp_path / "other", "compare")
  config = runs.settings(total_steps=3)
  with pytest.raises(dx.RefusedError, match="compare, and train would write"):
    dx.train(config=config, workdir=tmp_path / "other")
  assert runs.files(tmp_path / "other") == before
