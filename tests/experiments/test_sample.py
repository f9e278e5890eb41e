"""A text that a trained model continues, and its place in the report."""

import subprocess
import sys

import pytest

from tests import runs


def sample(run, *flags):
  return subprocess.run(
    [sys.executable, "-m", "experiments.sample", f"--run={run}", *flags],
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.fixture(scope="module", name="run")
def run_fixture(tmp_path_factory):
  folder = tmp_path_factory.mktemp("texts")
  for number in range(40):
    (folder / f"{number}.txt").write_text("abcd" * 40 + str(number))
  run = tmp_path_factory.mktemp("run")
  text = {"source": "text_files", "glob": f"{folder}/*.txt"}
  runs.train(runs.settings(data=text, total_steps=6), run)
  return run


@pytest.mark.slow
def test_a_sample_continues_the_prompt_and_stands_in_the_report(run):
  flags = ("--prompt=abc", "--num_tokens=7", "--temperature=0")
  done = sample(run, *flags)
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("abc") and len(done.stdout) >= 11
  assert sample(run, *flags).stdout == done.stdout
  report = (run / "report.md").read_text()
  assert "## A sample" in report and "    abc" in report


@pytest.mark.slow
def test_what_cannot_be_continued_is_one_line(run, tmp_path):
  for flags, message in (
    ((run, "--prompt="), "the prompt is empty: there is nothing to continue"),
    ((tmp_path,), "is not a run directory"),
  ):
    done = sample(*flags)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1
