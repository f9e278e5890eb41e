"""The binary of benchmarks: the name of a bench, given or mistaken."""

import subprocess
import sys

import pytest


def bench(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "experiments.bench", *arguments],
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.parametrize("mistake", ["foo", "--bench=foo"])
def test_a_name_that_is_no_bench_is_answered_with_those_there_are(mistake):
  done = bench(mistake, "--workdir=nowhere")
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert line.startswith("error: ") and "foo" in line
  for name in ("round", "codecs", "inner", "data"):
    assert name in line


def test_a_config_that_a_bench_does_not_read_is_refused():
  done = bench("round", "--config.seed=3", "--workdir=nowhere")
  assert done.returncode == 2
  assert "reads no config: leave out --config" in done.stderr
  assert len(done.stderr.splitlines()) == 1
