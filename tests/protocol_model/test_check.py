"""The model's files agree with each other; Spin itself runs by `make model`."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.protocol_model import check

SOURCE = check.SOURCE.read_text()
HEADER = SOURCE[: SOURCE.index("*/")]
PAGE = (check.ROOT / "docs/how_it_works/mailbox_model.md").read_text()
# Macros that the source derives from others.
DERIVED = {"LOSS", "HOLDS_MESSAGES"}
COMPLETE = """
State-vector 128 byte, depth reached 219, errors: 0
   116715 states, stored (175072 visited)
    1.000\tequivalent memory usage for states
  189.218\ttotal actual memory usage
"""


def run_check(*arguments, path=None):
  """Runs the program with another PATH."""
  return subprocess.run(
    [sys.executable, "-m", "tests.protocol_model.check", *arguments],
    cwd=check.ROOT,
    env={"PATH": str(path)},
    capture_output=True,
    text=True,
  )


def names_of(macros):
  return {macro.partition("=")[0] for macro in macros}


def conditions():
  """Returns the macros on which a part of the source depends."""
  lines = re.findall(r"^#(?:if|ifdef|ifndef|elif)\b.*", SOURCE, re.MULTILINE)
  words = set(re.findall(r"\b[A-Z][A-Z_]*\b", " ".join(lines)))
  return words - DERIVED


def rows(first_cell):
  """Returns the cells of the page's rows that begin with this text."""
  lines = re.findall(rf"^\| {first_cell} \|.*$", PAGE, re.MULTILINE)
  return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_each_macro_of_the_source_is_used_and_explained():
  used = set()
  for model in check.MODELS:
    used |= names_of(model.macros)
  used |= {fault.macro for fault in check.FAULTS}
  assert used == conditions()
  for macro in used:
    assert re.search(rf"\b{macro}\b", HEADER), macro
    assert f"`{macro}`" in PAGE, macro


@pytest.mark.parametrize("model", check.MODELS, ids=lambda model: model.name)
def test_the_page_has_a_row_for_each_model(model):
  ((_, macros, cycles, *figures),) = rows(model.name)
  assert macros == ", ".join(f"`{macro}`" for macro in model.macros)
  assert (cycles == "yes") == model.searches_cycles
  assert len(figures) == 4


@pytest.mark.parametrize("fault", check.FAULTS, ids=lambda fault: fault.macro)
def test_the_page_has_a_row_for_each_fault(fault):
  ((_, model, *_),) = rows(f"`{fault.macro}`")
  assert model == fault.model
  assert check.faulty_model(fault).macros[-1] == fault.macro


def test_a_complete_search_is_read():
  assert check.parsed_search(COMPLETE) == check.Search(
    has_error=False,
    is_complete=True,
    num_states=116715,
    memory_mb=189.218,
    error="",
  )


@pytest.mark.parametrize(
  "text",
  [
    "Warning: Search not completed\n" + COMPLETE,
    "error: max search depth too small\n" + COMPLETE,
    "Killed\n",
  ],
)
def test_a_search_that_is_not_complete_shows_nothing(text):
  search = check.parsed_search(text)
  assert not search.has_error and not search.is_complete
  assert search.error == "the search is not complete"


def test_an_error_is_read():
  text = "pan:1: assertion violated (a == b) (at depth 9)\n" + COMPLETE
  search = check.parsed_search(text.replace("errors: 0", "errors: 1"))
  assert search.has_error
  assert search.error == "assertion violated (a == b) (at depth 9)"


def test_a_missing_program_is_named_with_its_package(tmp_path):
  ended = run_check(path=tmp_path)
  assert ended.returncode == 2 and ended.stdout == ""
  (line,) = ended.stderr.splitlines()
  assert line.startswith("error: spin is missing")
  assert line.endswith("on Debian: apt install spin")


def test_an_unknown_name_is_refused(tmp_path):
  for program in check.PROGRAMS:
    pathlib.Path(tmp_path, program).write_text("#!/bin/sh\n")
    pathlib.Path(tmp_path, program).chmod(0o755)
  ended = run_check("--only=plane", path=tmp_path)
  assert ended.returncode == 2
  (line,) = ended.stderr.splitlines()
  assert line.startswith("error: there is no model or fault plane: take one")


def test_make_model_runs_the_program():
  command = ["make", "--no-print-directory", "--dry-run", "model"]
  command += ["PYTHON=python3"]
  # A make that runs these tests would hand its own options down.
  environ = {
    name: value for name, value in os.environ.items() if "MAKE" not in name
  }
  text = subprocess.check_output(
    command, cwd=check.ROOT, env=environ, text=True
  )
  assert text == "python3 -m tests.protocol_model.check\n"
