"""What `python -m experiments` says, and a program without its packages."""

import pathlib
import subprocess
import sys

import pytest

from experiments import __main__ as listing

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Runs a module as `python -m` does, while a package is not found.
WITHOUT_ABSL = """
import importlib.util, runpy, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = (
  lambda name, *where: None if name == "absl" else find_spec(name, *where)
)
sys.argv = [sys.argv[1], "--help"]
{}
"""


def test_every_program_is_listed_with_a_line():
  text = listing.listing()
  for name in ("train", "sweep", "quickstart", "bench", "links"):
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
    assert line.endswith(".")
  assert "Programs: python -m experiments.NAME --help" in text
  assert "simulation_page" not in text  # It is a module, and no program.
  # Other programs start these as processes. They have no --help.
  assert "link_collectives" not in text and "mailbox_events" not in text
  lines = [line for line in text.splitlines() if line.startswith("  ")]
  assert all(len(line.split(maxsplit=1)) == 2 for line in lines)


@pytest.mark.parametrize(
  ("first_argument", "code"), [("-m", 2), ("program.py", 1)]
)
def test_a_missing_extra_is_named_by_every_program(first_argument, code):
  start = WITHOUT_ABSL.format("import experiments.make_secret")
  result = subprocess.run(
    [sys.executable, "-c", start, first_argument],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  says = (
    "the programs in experiments need absl: pip install -e '.[experiments]', "
    "or make install"
  )
  assert result.returncode == code
  assert result.stderr.splitlines()[-1].partition(": ")[2] == says
  if code == 2:
    assert result.stderr == f"error: {says}\n"
