import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
  "tool",
  [
    ["ruff", "check", "."],
    ["ruff", "format", "--diff", "."],
    ["pyright", "--pythonpath", sys.executable],
  ],
  ids=["ruff", "format", "pyright"],
)
def test_the_tree_passes(tool):
  result = subprocess.run(
    [sys.executable, "-m", *tool], cwd=ROOT, capture_output=True, text=True
  )
  if result.returncode:
    pytest.fail(result.stdout + result.stderr, pytrace=False)
