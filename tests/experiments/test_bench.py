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
  for name in ("round", "codecs", "inner", "data", "simulate", "pipeline"):
    assert name in line


@pytest.mark.parametrize(
  ("name", "flag", "hint"),
  [
    ("pipeline", "--repeats=9", "needs a bench that measures"),
    ("simulate", "--stages=2", "needs the bench pipeline"),
    ("round", "--schedule=1f1b", "needs the bench pipeline"),
    ("round", "--config.seed=3", "reads no config: leave out --config"),
  ],
)
def test_a_flag_of_another_bench_is_refused(name, flag, hint):
  done = bench(name, flag, "--workdir=nowhere")
  assert done.returncode == 2 and hint in done.stderr
  assert len(done.stderr.splitlines()) == 1


def test_a_bench_is_named_first(tmp_path):
  sizes = ("--stages=2", "--micro_batches=2", "--schedule=1f1b")
  done = bench("pipeline", f"--workdir={tmp_path}", *sizes)
  assert done.returncode == 0, done.stderr
  assert (tmp_path / "bench_pipeline.json").exists()
