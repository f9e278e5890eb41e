"""--help of every program: its flags, and examples that can be copied."""

import itertools
import pathlib
import re
import resource
import subprocess
import sys

import pytest

from tests.experiments.programs import run

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = [
  path
  for folder in ("experiments", "experiments/tools")
  for path in sorted((ROOT / folder).glob("*.py"))
  if "command_line.main(" in path.read_text()
]
FLAGS = {
  "sweep": {"config", "workdir", "processes", "slurm"},
  "train": {"config", "workdir", "distributed", "coordinator"},
}


@pytest.mark.parametrize("program", FLAGS)
def test_help_lists_flags_that_shared_modules_define(program):
  done = run(program, "--help")
  assert done.returncode == 0
  listed = re.findall(r"^  --(?:\[no\])?(\w+):", done.stdout, re.M)
  assert FLAGS[program] <= set(listed)


def test_help_is_there_at_once():
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  command = [sys.executable, "-m", "experiments.compare", "--help"]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  assert "experiments.compare runs/" in done.stdout
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  assert after.ru_utime - before.ru_utime < 2


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_an_example_that_takes_several_lines_is_one_command(program):
  summary = program.read_text().split('"""', 2)[1]
  for line, following in itertools.pairwise(summary.splitlines()):
    is_continued = re.match(r" +--\w", following)
    assert not is_continued or line.endswith(" \\")
