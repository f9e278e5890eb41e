"""The notebook runs from its first cell to its last."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

NOTEBOOK = pathlib.Path(__file__).parents[2] / "examples" / "own_loop.ipynb"


def cells(kind):
  """The texts of the cells of a kind, in order."""
  notebook = json.loads(NOTEBOOK.read_text())
  return [
    "".join(cell["source"])
    for cell in notebook["cells"]
    if cell["cell_type"] == kind
  ]


def test_the_links_of_the_notebook_lead_somewhere():
  text = "\n".join(cells("markdown"))
  links = re.findall(r"\]\(([^)]+)\)", text)
  assert links
  for link in links:
    assert (NOTEBOOK.parent / link).exists(), link


@pytest.mark.slow
def test_the_notebook_runs_and_diloco_learns_nearly_as_much(tmp_path):
  program = tmp_path / "own_loop.py"
  program.write_text("\n\n".join(cells("code")))
  environment = os.environ | {"MPLBACKEND": "Agg"}
  root = str(NOTEBOOK.parents[1])
  environment["PYTHONPATH"] = os.pathsep.join(
    [root, environment.get("PYTHONPATH", "")]
  )
  done = subprocess.run(
    [sys.executable, program], capture_output=True, text=True, env=environment
  )
  assert done.returncode == 0, done.stderr
  losses = re.findall(r"loss of the last steps: ([\d.]+)", done.stdout)
  every_step, diloco, streaming = map(float, losses)
  assert every_step < 2.0  # A guess from 128 characters has 4.85.
  assert diloco < every_step + 0.3 and streaming < every_step + 0.5
