"""The program that says beforehand what several replicas cost."""

import json
import math
from typing import Any

import pytest

from experiments.gaps.tuned_pairs import global_batch
from experiments.sweeps.rows import RunRow
from experiments.sweeps.training import Training
from tests.experiments.programs import run

TINY = (
  "--config.model.preset=nano",
  "--config.model.scan_unroll=1",
  "--config.data.source=synthetic",
  "--config.data.batch_size=2",
  "--config.data.sequence_length=8",
  "--config.evaluation.num_sequences=2",
  "--config.total_steps=6",
)


@pytest.fixture(name="trained")
def trained_fixture(monkeypatch):
  """Runs in place of real ones: the loss is a formula. Lists their configs.

  AllReduce ends at 2 (B N / 10,000)^-0.15, and the best rate is 0.004.
  """
  configs = []

  def train_for(self, runs, **options):
    assert not self.failed and options["slurm"] == ""
    for one in runs:
      config = one.config
      assert config.sync.method == "allreduce"
      configs.append(config)
      octaves = math.log2(config.inner.learning_rate / 0.004)
      loss = 2 * global_batch(config) ** -0.15 * (1 + 0.01 * octaves**2)
      values: dict[str, Any] = dict.fromkeys(RunRow.__annotations__, 0)
      values["loss"] = loss
      self.rows.runs[one.digest, "text"] = RunRow(**values)

  def row(self, one):
    return self.rows.runs.get((one.digest, "text"))

  monkeypatch.setattr(Training, "train_for", train_for)
  monkeypatch.setattr(Training, "row", row)
  return configs


def numbers(folder):
  return json.loads((folder / "gap.json").read_text())


def test_both_batches_are_tuned_and_the_gaps_are_printed(tmp_path, trained):
  done = run(
    "gap",
    *TINY,
    "--config.inner.learning_rate=0.002",
    f"--workdir={tmp_path}",
    "--minutes=60",
  )
  assert done.returncode == 0, done.stderr
  # At 0.001, 0.002 and 0.004 the best is at the end, so 0.008 follows.
  rates = [(global_batch(c), c.inner.learning_rate) for c in trained]
  assert sorted(rates) == [
    (batch, rate) for batch in (2, 4) for rate in (0.001, 0.002, 0.004, 0.008)
  ]
  found = numbers(tmp_path)
  assert (found["batch"], found["steps"]) == (4, 6)
  assert found["gain"]["value"] == pytest.approx(1 - 2**-0.15)
  assert found["gain"]["low"] < found["gain"]["value"]
  assert found["loss"] == pytest.approx(2 * 4**-0.15)
  assert set(found["gaps"]["diloco"]) == {"2", "4"}
  assert "falls from 2 to 4 sequences" in " ".join(done.stdout.split())
  assert max(map(len, done.stdout.splitlines()[:-1])) <= 80
  page = (tmp_path / "report.md").read_text()
  assert "| 2 | 2 | 30 | +" in page and "loco | 16 | +" in page
  assert "at an end" not in page


def test_a_best_rate_at_an_end_is_said(tmp_path, trained):
  done = run(
    "gap",
    *TINY,
    "--config.inner.learning_rate=0.0002",
    "--rates=3",
    f"--workdir={tmp_path}",
  )
  assert done.returncode == 0, done.stderr
  assert len(trained) == 6
  said = " ".join(done.stdout.split())
  assert "2 sequences, 0.0004, is at an end of those tried: raise" in said
  assert "4 sequences, 0.0004, is at an end of those tried: raise" in said


def test_several_seeds_are_trained_at_the_best_rates(tmp_path, trained):
  done = run(
    "gap",
    *TINY,
    "--config.inner.learning_rate=0.004",
    "--seeds=3",
    f"--workdir={tmp_path}",
  )
  assert done.returncode == 0, done.stderr
  assert len(trained) == 6 + 2 * 2
  assert {c.seed for c in trained} == {0, 1, 2}
  assert all(c.inner.learning_rate == 0.004 for c in trained if c.seed)
  # The seeds do not differ here, so s has no error.
  gain = numbers(tmp_path)["gain"]
  assert gain["low"] == pytest.approx(gain["high"])


def test_a_model_that_takes_too_long_is_replaced_by_smaller_ones(
  tmp_path, trained
):
  done = run(
    "gap",
    "--config.total_steps=50000",
    "--config.data.batch_size=8",
    "--minutes=60",
    "--processes=2",
    f"--workdir={tmp_path}",
  )
  assert done.returncode == 0, done.stderr
  found = numbers(tmp_path)
  assert found["kind"] == "extended" and found["loss"] is None
  assert found["parameters"] == 857_216
  said = " ".join(done.stdout.split())
  assert "extended to 857,216 by its power of the number of parameters" in said
  assert "--cluster" not in said
  # s is the same at all sizes here, so the range covers a falling s.
  gain = found["gain"]
  assert gain["value"] == pytest.approx(1 - 2**-0.15, rel=0.02)
  assert gain["low"] < 0.8 * gain["value"]
  assert len({c.model.model_dim for c in trained}) == 3


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (["--losses=1,2,3"], "--losses: losses has 3 numbers: give two"),
    (
      ["--losses=1.5,1.6"],
      "--losses: the loss with the whole batch, 1.6, is not below the loss"
      " with half of it, 1.5",
    ),
    (["--losses=a,b"], "--losses=a,b must be two numbers"),
    (
      ["--losses=2,1.9", "--seeds=2"],
      "--seeds needs runs to train, so no --losses",
    ),
    (["--losses=2,1.9", "--step_s=1"], "--step_s needs --cluster"),
    (["--losses=2,1.9", "--cluster=nowhere"], "unknown cluster preset"),
    (["--config.sync.method=allreduce"], "exchanges gradients at every step"),
    (
      ["--config.data.batch_size=3", "--config.mesh.num_replicas=1"],
      "3 sequences in a step, which cannot be halved",
    ),
    (
      ["--minutes=0.1", "--config.total_steps=10000000"],
      "--minutes=0.1 is too short for two smaller models",
    ),
    (
      ["--losses=2,1.9", "--config.data.batch_size=3"],
      None,
    ),
  ],
)
def test_bad_input_is_one_line(tmp_path, flags, said):
  done = run("gap", *flags, f"--workdir={tmp_path}")
  if said is None:  # Six sequences go with two replicas.
    assert done.returncode == 0 and "falls from 3 to 6" in done.stdout
    return
  assert done.returncode == 2
  assert said in done.one_line


def test_losses_of_the_user_and_a_cluster_say_what_is_worth_it(tmp_path):
  done = run(
    "gap",
    "--losses=1.69,1.59",
    "--config.sync.method=overlap_loco",
    "--config.data.batch_size=4",
    "--cluster=1gbit",
    "--step_s=0.5",
    f"--workdir={tmp_path}",
  )
  assert done.returncode == 0, done.stderr
  found = numbers(tmp_path)
  assert found["kind"] == "given" and found["loss"] == 1.59
  assert found["gain"]["value"] == pytest.approx(1 - 1.59 / 1.69)
  # 600 steps of half a second, or of a quarter with four replicas.
  gaps = found["gaps"]["overlap_loco"]
  assert gaps["2"]["time_s"] == pytest.approx(300, rel=0.02)
  assert gaps["4"]["time_s"] == pytest.approx(150, rel=0.1)
  said = " ".join(done.stdout.split())
  assert "2 clusters may be worth it or not: after 5 min they reach a" in said
  assert "Time and loss on 1gbit" in said
  assert max(map(len, done.stdout.splitlines()[:-1])) <= 80


def table(done, title):
  """The words of each row of a table that was printed."""
  lines = iter(done.stdout.splitlines())
  for line in lines:
    if line.strip() == title:
      break
  for line in lines:
    if set(line.strip()) == {"\u2500"}:
      break
  rows = []
  while row := next(lines).split():
    rows.append(row)
  return rows


@pytest.mark.parametrize("columns", [80, 120])
def test_many_rates_leave_room_for_all_numbers(
  tmp_path, trained, monkeypatch, columns
):
  monkeypatch.setenv("COLUMNS", str(columns))
  done = run(
    "gap",
    *TINY,
    "--config.inner.learning_rate=0.0625",
    "--rates=8",
    f"--workdir={tmp_path}",
  )
  assert done.returncode == 0, done.stderr
  assert len(trained) == 2 * 7
  parameters = f"{numbers(tmp_path)['parameters']:,}"
  rows = table(done, "Runs of AllReduce")
  starts = [row for row in rows if row[0] == parameters]
  assert [row[1:4] for row in starts] == [
    [batch, "6", "0.003906"] for batch in ("2", "4")
  ]
  # The loss and the refined loss, with all digits.
  assert all(len(value) == 6 for row in starts for value in row[-2:])
  words = [word for row in rows for word in row]
  assert words.count("0.007812,") == words.count("0.125") == 2


def test_six_numbers_of_replicas_leave_room_for_the_names_of_methods(
  tmp_path, monkeypatch
):
  monkeypatch.setenv("COLUMNS", "80")
  done = run(
    "gap",
    "--losses=1.69,1.59",
    "--config.data.batch_size=64",
    f"--workdir={tmp_path}",
  )
  assert done.returncode == 0, done.stderr
  rows = table(done, "Expected gap of every method (%)")
  assert {row[0] for row in rows} == set(numbers(tmp_path)["gaps"])
  # H, six gaps, and the bytes with their unit.
  assert {len(row) for row in rows} == {1 + 1 + 6 + 2}


@pytest.mark.slow
def test_real_runs_are_trained_and_kept(tmp_path):
  flags = [*TINY, "--config.total_steps=40", f"--workdir={tmp_path}"]
  done = run("gap", *flags, "--rates=3", "--processes=2")
  # So short a run may say nothing about s; then the one line says why.
  assert done.returncode == 0 or "too short" in done.one_line, done.stderr
  assert "6 runs, 6 to do" in done.stdout
  assert len((tmp_path / "runs.csv").read_text().splitlines()) == 7
  again = run("gap", *flags, "--rates=3", "--processes=2")
  assert "to do" not in again.stdout
  assert again.returncode == done.returncode
