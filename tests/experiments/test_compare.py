"""Run directories side by side, from the command line to the page."""

import json
import pathlib
import subprocess
import sys
import time

import pytest

from tests.report.conftest import write_run

ROOT = pathlib.Path(__file__).resolve().parents[2]


def compare(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "experiments.compare", *map(str, arguments)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )


def test_runs_make_a_table_and_a_page(tmp_path):
  runs = [
    write_run(tmp_path / "a", method="allreduce"),
    write_run(tmp_path / "b", floor=2.0),
  ]
  done = compare(*runs, f"--workdir={tmp_path / 'out'}")
  assert done.returncode == 0, done.stderr
  assert "diloco" in done.stdout and "28.6x" in done.stdout
  lines = done.stdout.splitlines()
  assert max(map(len, lines[:-1])) <= 80
  page = tmp_path / "out" / "report.md"
  assert lines[-1] == f"comparison: {page}"
  assert f"python -m experiments.compare {runs[0]} {runs[1]}" in (
    page.read_text()
  )
  data = json.loads((page.parent / "comparison.json").read_text())
  assert [run["method"] for run in data["runs"]] == ["allreduce", "diloco"]
  picture = (page.parent / "comparison.png").read_bytes()
  assert picture.startswith(b"\x89PNG")


def _no_run(tmp_path):
  return [tmp_path], "is not a run directory: config.json is missing"


def _two_texts(tmp_path):
  runs = [
    write_run(tmp_path / digest, digest=digest) for digest in ("aaaa", "bbbb")
  ]
  return runs, "losses on different corpora cannot be compared"


def _nothing(tmp_path):
  return [], "no run directories: name at least one"


def _a_flag_that_is_none(tmp_path):
  return ["--workdirs=x"], "Unknown command line flag 'workdirs'"


@pytest.mark.parametrize(
  "make", [_no_run, _two_texts, _nothing, _a_flag_that_is_none]
)
def test_bad_input_is_one_line_and_leaves_nothing(make, tmp_path):
  arguments, says = make(tmp_path)
  out = tmp_path / "out"
  done = compare(*arguments, f"--workdir={out}")
  assert done.returncode == 2
  assert says in done.stderr
  assert len(done.stderr.strip().splitlines()) == 1
  assert not out.exists()


def test_a_missing_workdir_is_one_line(tmp_path):
  done = compare(write_run(tmp_path / "a"))
  assert done.returncode == 2 and "--workdir is missing" in done.stderr


def test_help_is_there_at_once():
  start = time.perf_counter()
  done = compare("--help")
  seconds = time.perf_counter() - start
  assert done.returncode == 0 and "experiments.compare runs/" in done.stdout
  assert seconds < 2
