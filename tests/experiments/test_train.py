"""The program that trains: configs, and what a run says and leaves behind."""

import pytest

from tests import runs
from tests.data.test_corpus import ENTROPY_NATS
from tests.experiments.programs import run


@pytest.fixture(scope="module", name="trained")
def trained_fixture(tmp_path_factory):
  """A short run with a profile, and how it ended."""
  workdir = tmp_path_factory.mktemp("trained")
  clock = "--cluster=1gbit", "--step_s=300"
  done = run(
    "train", *runs.SMALL_FLAGS, f"--workdir={workdir}", *clock, "--profile"
  )
  assert done.returncode == 0, done.stderr
  return workdir, done


def test_a_run_leaves_what_explains_it(trained):
  workdir, done = trained
  for name in (
    "config.json",
    "run.json",
    "metrics.jsonl",
    "timing.jsonl",
    "report.md",
    "figures",
    "checkpoints",
  ):
    assert (workdir / name).exists(), name
  assert f"report: {workdir / 'report.md'}" in done.stdout
  assert max(map(len, done.stdout.splitlines()[:-1])) <= 80
  assert (workdir / "figures" / "hours.png").exists()  # Of the clock.
  (trace,) = (workdir / "profile").rglob("*.xplane.pb")
  assert trace.stat().st_size > 10_000


def test_a_finished_run_is_neither_changed_nor_made_longer(trained):
  flags = *runs.SMALL_FLAGS, f"--workdir={trained[0]}", "--cluster=1gbit"
  before = runs.files(trained[0])
  for change, word in (
    ("--config.seed=7", "seed: 0 -> 7"),
    ("--config.total_steps=20", "checkpoint.init_from"),
  ):
    done = run("train", *flags, "--step_s=300", change)
    assert done.returncode == 2 and word in done.stderr
  assert runs.files(trained[0]) == before


@pytest.mark.slow
def test_the_entropy_of_the_chain_is_reached(tmp_path):
  flags = {
    "data.source": "synthetic",
    "model.preset": "nano",
    "model.vocab_size": 64,
    "total_steps": 2500,
    "sync.method": "allreduce",
    "inner.learning_rate": 0.005,
  }
  given = [f"--config.{name}={value}" for name, value in flags.items()]
  done = run("train", *given, f"--workdir={tmp_path}")
  assert done.returncode == 0, done.stderr
  (final,) = runs.rows(tmp_path, "final")
  assert -0.005 < final["outer_loss"] / ENTROPY_NATS - 1 < 0.01
