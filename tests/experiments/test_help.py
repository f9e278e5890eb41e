"""--help of every program: its flags, and examples that can be copied."""

import itertools
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = sorted(
  path.stem
  for path in (ROOT / "experiments").glob("*.py")
  if "command_line.main(" in path.read_text()
)
OF_SWEEPS = {"config", "workdir", "processes"}
FLAGS = {
  "ablate": OF_SWEEPS,
  "convergence": OF_SWEEPS | {"task", "methods"},
  "train": {"config", "workdir", "distributed", "coordinator", "elastic"},
}


def help_of(program):
  command = [sys.executable, "-m", f"experiments.{program}", "--help"]
  return subprocess.run(
    command, cwd=ROOT, capture_output=True, text=True, check=True
  ).stdout


@pytest.mark.parametrize("program", FLAGS)
def test_help_lists_flags_that_shared_modules_define(program):
  listed = re.findall(r"^  --(?:\[no\])?(\w+):", help_of(program), re.M)
  assert FLAGS[program] <= set(listed)


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_example_that_takes_several_lines_is_one_command(program):
  text = (ROOT / "experiments" / f"{program}.py").read_text()
  summary = text.split('"""', 2)[1]
  for line, following in itertools.pairwise(summary.splitlines()):
    is_continued = re.match(r" +--\w", following)
    assert not is_continued or line.endswith(" \\")
