"""Run directories side by side, from the command line to the page."""

import pytest

from tests.experiments.programs import run
from tests.report.conftest import write_run


def test_runs_make_a_table_and_a_page(tmp_path):
  runs = [
    write_run(tmp_path / "a", method="allreduce"),
    write_run(tmp_path / "b", floor=2.0),
  ]
  done = run("compare", *runs, f"--workdir={tmp_path / 'out'}")
  assert done.returncode == 0, done.stderr
  assert "diloco" in done.stdout and "28.6x" in done.stdout
  lines = done.stdout.splitlines()
  assert max(map(len, lines[:-1])) <= 80
  page = tmp_path / "out" / "report.md"
  assert lines[-1] == f"comparison: {page}"
  command = f"python -m experiments.compare {runs[0]} {runs[1]}"
  assert command in page.read_text()


@pytest.mark.parametrize(
  ("arguments", "says"),
  [
    (["."], "is not a run directory: config.json is missing"),
    (["aaaa", "bbbb"], "losses on different corpora cannot be compared"),
    ([], "no run directories: name at least one"),
    (["--workdirs=x"], "Unknown command line flag 'workdirs'"),
  ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, arguments, says):
  for digest in ("aaaa", "bbbb"):
    write_run(tmp_path / digest, digest=digest)
  out, paths = tmp_path / "out", [*arguments]
  if arguments and not arguments[0].startswith("-"):
    paths = [tmp_path / each for each in arguments]
  done = run("compare", *paths, f"--workdir={out}")
  assert done.returncode == 2 and says in done.one_line
  assert not out.exists()


def test_a_missing_workdir_is_one_line(tmp_path):
  done = run("compare", write_run(tmp_path / "a"))
  assert done.returncode == 2 and "--workdir is missing" in done.one_line
