"""The guide's own loop goes on from its checkpoint in a new process."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = ROOT / "docs/guides/own_checkpoint.py"
GUIDE = ROOT / "docs/guides/own_training_loop.md"


def run(folder, num_steps):
  done = subprocess.run(
    [sys.executable, str(PROGRAM), str(folder), str(num_steps)],
    capture_output=True,
    text=True,
    check=False,
    cwd=ROOT,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout


def test_what_is_restored_on_a_mesh_ends_with_the_same_bits(tmp_path):
  whole = run(tmp_path / "whole", 12)
  assert "going on" not in whole
  run(tmp_path / "cut", 10)
  resumed = run(tmp_path / "cut", 12)
  assert resumed.startswith("going on from step 10\n")
  (last,) = re.findall(r"^outer weights .*$", whole, re.MULTILINE)
  assert last in resumed and "[0.0, " not in last


def test_the_guide_shows_this_program():
  assert "literalinclude} own_checkpoint.py" in GUIDE.read_text()
