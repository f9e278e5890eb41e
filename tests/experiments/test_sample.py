"""A text that a trained model continues, and its place in the report."""

import subprocess
import sys

import pytest

from tests.experiments.runtime.test_samples import run_fixture

__all__ = ["run_fixture"]  # Pytest finds it by its name "run".


def sample(run, *flags):
  return subprocess.run(
    [sys.executable, "-m", "experiments.sample", f"--run={run}", *flags],
    capture_output=True,
    text=True,
    check=False,
  )


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
