"""What a sweep's page and rows say of the runs, in numbers."""

import dataclasses
import json
import math
import time

import pytest

from dilocox_jax.config import from_mapping
from dilocox_jax.report import load_run
from experiments.configs import quickstart
from experiments.sweeps import measured, page, rows, training
from experiments.sweeps.clocks import SweepClock, Times, clock_of
from experiments.sweeps.columns import cells_of
from experiments.sweeps.finished import Rows
from experiments.sweeps.rows import EvaluationRow, RunRow, run_id
from experiments.sweeps.runs import runs_of
from tests.report.conftest import write_run

BASE = {"total_steps": 60, "sync": {"method": "diloco", "sync_interval": 6}}


def listed(*names, **changes):
  given = [{"name": name, "seed": n} for n, name in enumerate(names)]
  return runs_of({"base": BASE | changes, "runs": given})


def row(run, **changes):
  first = RunRow(
    study="mine",
    run=run_id("mine", run.digest, "9f3a"),
    setting=run.name,
    config=cells_of(run),
    parameters=857_088,
    tokens=600,
    sent_bytes=100,
    loss=1.5,
    judge_loss=math.nan,
    loss_newest=math.nan,
    judge_loss_newest=math.nan,
    replica_mean_loss=1.6,
    best_loss=1.4,
    baseline="",
    seconds=1800.0,
    failure="",
    corpus="9f3a",
    platform="cpu",
    python="3.11",
    jax="0.10",
    revision="",
    cores=1,
  )
  return dataclasses.replace(first, **changes)


def test_the_introduction_sums_hours_and_counts_runs(tmp_path):
  found = listed("a", "b", "c")
  lines = [row(found[0]), row(found[1], seconds=5400.0), None]
  rows = Rows(tmp_path / "runs.csv", "mine")
  text = page.intro(found, lines, rows)
  assert text.startswith("60 inner steps by diloco, H = 6; replicas: 2;")
  assert "Trained on cpu, Python 3.11, JAX 0.10. 2 of 3 runs have ended" in text
  assert "they took 2 hours. Corpus digest `9f3a`." in text
  assert page.intro(found, [None] * 3, rows).endswith("No run has ended yet.")


def test_points_have_the_time_of_their_step_and_the_last_that_of_the_flush(
  tmp_path,
):
  run = listed("z", "a")[1]
  line = row(run, judge_loss=2.5)
  points = [
    EvaluationRow(line.run, step, 10 * step, step, 2.0, step == 60)
    for step in (30, 45, 60)
  ]
  kept = Rows(tmp_path / "runs.csv", "mine")
  kept.add(line, points)
  times = {"slow": Times({20: 2.0, 40: 4.0, 60: 6.0}, 6.5, 0.9)}
  seed_run = page._seed_run(line, kept, times, uses_judge=False)
  # The last segment that ended at step 30 or before did so after 2 s.
  assert [p.seconds["slow"] for p in seed_run.points] == [2.0, 4.0, 6.5]
  assert [p.tokens for p in seed_run.points] == [300, 450, 600]
  assert [p.sent_bytes for p in seed_run.points] == [30, 45, 60]
  assert (seed_run.seed, seed_run.loss, seed_run.sent_bytes) == (1, 1.5, 100)
  assert (seed_run.steps, seed_run.tokens, seed_run.wall_s) == (60, 600, 1800.0)
  assert page._seed_run(line, kept, times, uses_judge=True).loss == 2.5


def test_a_setting_has_its_own_baseline_and_says_that_it_is_an_average(
  tmp_path,
):
  runs = runs_of(
    {
      "base": {"total_steps": 60},
      "runs": [
        {"name": "allreduce", "sync.method": "allreduce"},
        {"name": "plain"},
        {"name": "kept", "outer.average_power": 14.0},
        {"name": "with an average", "outer.average_power": 10.0},
      ],
    }
  )
  sweep = {"baseline": "allreduce", "baselines": {"kept": "plain"}}
  times = {run.name: {"x": Times({60: 6.0}, 7.0, 0.5)} for run in runs}
  lines = [row(run) for run in runs]
  kept = Rows(tmp_path / "runs.csv", "mine")
  found = page.frame(sweep, runs, lines, kept, {}, times)
  labels = {each.label: each for each in found.settings}
  assert set(labels) == {
    "allreduce",
    "plain",
    "kept, average",
    "with an average",
  }
  assert labels["kept, average"].baseline == "plain"
  assert labels["plain"].baseline == "allreduce"
  assert labels["plain"].seconds == {"x": 7.0}
  assert labels["plain"].utilization == {"x": 0.5}


def test_a_line_has_the_last_and_the_lowest_loss_of_a_run(tmp_path):
  folder = write_run(tmp_path / "run", num_steps=60, floor=1.0)
  path = folder / "metrics.jsonl"
  lines = [json.loads(text) for text in path.read_text().splitlines()]
  # Three evaluations: the lowest is not the last.
  first = lines[-1] | {"kind": "evaluation", "step": 30, "outer_loss": 0.5}
  del first["num_steps"]
  last = lines[-1] | {"outer_loss": 1.25, "mean_loss": 1.5, "judge_loss": 2.0}
  path.write_text(
    "".join(json.dumps(each) + "\n" for each in (*lines[:-1], first, last))
  )
  (run,) = listed("mine")
  loaded = load_run(folder)
  common = {"study": "mine", "baseline": "b", "cores": 3}
  found = rows.row_of(loaded, run, failure="", **common)
  assert (found.setting, found.seed, found.cores) == ("mine", 0, 3)
  assert (found.loss, found.replica_mean_loss) == (1.25, 1.5)
  assert (found.judge_loss, found.best_loss) == (2.0, 0.5)
  assert (found.study, found.baseline) == ("mine", "b")
  # Two replicas of 1,024 tokens; compiling 11.5 s, two rounds, one evaluation.
  assert (found.steps, found.tokens) == (60, 60 * 2048)
  assert found.seconds == pytest.approx(11.5 + 2 * 2.5 + 0.75, abs=0.06)
  assert found.sent_bytes == loaded.total_sent_bytes
  diverged = rows.row_of(loaded, run, failure="not finite", **common)
  assert math.isnan(diverged.loss) and math.isnan(diverged.judge_loss)
  assert diverged.best_loss == 0.5 and diverged.failure == "not finite"
  evaluations = rows.evaluations_of(loaded, found)
  assert [(each.step, each.loss) for each in evaluations][-2:] == [
    (30, 0.5),
    (60, 1.25),
  ]
  assert evaluations[-1].flushed and evaluations[-1].run == found.run


class OneByOne:
  """A pool that runs nothing and says that all jobs have ended."""

  cores = 4

  def __init__(self, reasons):
    self.reasons = reasons

  def run(self, jobs, ended):
    for number, reason in enumerate(self.reasons):
      ended(number, reason)


def test_a_row_has_the_cores_of_a_job(tmp_path, monkeypatch):
  monkeypatch.setattr(training, "corpus_digest", lambda config: "9f3a" * 4)
  cores = []

  def keep(self, run, reason, num_cores):
    cores.append(num_cores)
    return "" if reason else "loss 1.5"

  monkeypatch.setattr(training.Training, "_record", keep)
  trained = training.Training(tmp_path, Rows(tmp_path / "runs.csv", "mine"))
  runs = listed("a", "b")
  trained.train(runs, OneByOne(["", "no text"]))  # pyright: ignore
  assert cores == [4, 4]
  (failure,) = trained.failed
  assert failure["run"] == "b, seed 1" and failure["reason"] == "no text"
  assert runs[1].digest in failure["log"]


def test_a_run_is_a_process_with_its_own_settings(tmp_path, monkeypatch):
  monkeypatch.setattr(training, "corpus_digest", lambda config: "9f3a" * 4)
  (run,) = listed("my run")
  parts = [tmp_path / "parts.py"]
  trained = training.Training(
    tmp_path, Rows(tmp_path / "runs.csv", "mine"), {}, parts
  )
  job = trained._job(run)
  folder = tmp_path / "runs" / f"my_run-seed0-{run.digest}-9f3a9f"
  assert job.log == tmp_path / "logs" / f"{folder.name}.log"
  assert f"--workdir={folder}" in job.command
  assert f"--parts={parts[0]}" in job.command
  assert "--config.sync.sync_interval=6" in job.command


def test_a_clock_says_what_it_times(tmp_path):
  config = from_mapping(BASE)
  stated = SweepClock("1gbit", 0.03)
  assert page._words(config, stated) == (
    "tiny on 1gbit (round trip 40 ms), 0.03 s a step (stated); codecs take no"
    " time"
  )
  larger = clock_of(
    {"name": "x", "cluster": "1gbit", "model": {"preset": "opt_1_3b"}}
  )
  words = page._words(config, larger)
  assert words.startswith("opt_1_3b on 1gbit")
  assert "a step (from operations), with the losses of tiny, which was" in words


def test_a_step_of_a_clock_is_that_of_the_fastest_replica(tmp_path):
  cluster = tmp_path / "two.json"
  site = {"num_devices": 1, "up": "1 Gbit/s", "down": "1 Gbit/s"}
  sites = [
    {"name": "slow", "speed": 0.5, "rtt": "10 ms"},
    {"name": "fast", "rtt": "40 ms"},
  ]
  cluster.write_text(
    json.dumps({"name": "two", "every_site": site, "sites": sites})
  )
  clock = SweepClock(str(cluster), 0.03)
  assert clock.step_s_of(from_mapping(BASE)) == pytest.approx(0.03)
  assert page._round_trips(clock) == "10 ms to 40 ms"


@pytest.mark.parametrize(
  ("codec", "timed"),
  [
    ("low_rank(rank=4)+int(bits=4)", "low_rank(rank=64)+int(bits=4)"),
    ("int(bits=2)", "int(bits=2)"),
  ],
)
def test_a_codec_is_that_of_the_timed_model_where_it_has_the_same_parts(
  codec, timed
):
  clock = SweepClock(
    "1gbit",
    changed={"exchange.codec": "low_rank(rank=64)+int(bits=4)"},
  )
  config = from_mapping(BASE | {"exchange": {"codec": codec}})
  assert clock.timed(config).exchange.codec == timed


def test_what_is_known_of_losses_has_its_gaps_and_rates():
  gaps = {gap["name"]: gap for gap in measured.collected()["gaps"]}
  two = gaps["overlap_loco 2x4"]
  four = gaps["diloco 4x4"]
  assert two["gap"] == pytest.approx(0.0195, abs=5e-5)
  assert two["error"] == pytest.approx(0.0010, abs=5e-5)
  assert (two["inner_rate"], two["settings"]["outer.learning_rate"]) == (
    0.004,
    1,
  )
  assert four["gap"] == pytest.approx(0.0798, abs=5e-5)
  assert (four["num_replicas"], four["sequences"]) == (4, 4)
  assert not any("fp32" in name or "allreduce" in name for name in gaps)


def test_runs_of_the_quick_start_differ_in_the_method_alone():
  configs = {
    name: from_mapping(quickstart.get_config(name, 90).to_dict())
    for name in quickstart.METHODS
  }
  for config in configs.values():
    assert config.total_steps == 90 and config.data.batch_size == 2
    assert config.inner.optimizer == "muon"
    assert config.outer.average_power == 14
    assert config.inner.final_fraction == 0.2
    assert config.adaptive.mode == "off"
  assert configs["dilocox"].inner.learning_rate == 0.005
  assert configs["allreduce"].inner.learning_rate == 0.0035
  assert configs["overlap_loco"].outer.learning_rate == 1.5
  assert configs["dilocox"].sync.sync_interval == 20
  own = quickstart.get_config("dilocox", 90, "notes/*.txt").data
  assert (own.source, own.glob) == ("text_files", "notes/*.txt")
  same = dataclasses.replace(configs["dilocox"], sync=configs["allreduce"].sync)
  assert same.data == configs["allreduce"].data


@pytest.mark.parametrize(
  ("minutes", "deadline_s"), [(2.0, 1120.0), (0.0, 1000.0), (None, math.inf)]
)
def test_a_sweep_stops_after_so_many_minutes(
  tmp_path, monkeypatch, minutes, deadline_s
):
  begun = []

  class Pool:
    is_late = True

    def __init__(self, processes, slurm, deadline_s):
      begun.append((processes, slurm, deadline_s))

  monkeypatch.setattr(training, "Pool", Pool)
  monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
  trained = training.Training(tmp_path, Rows(tmp_path / "runs.csv", "mine"))
  monkeypatch.setattr(trained, "train", lambda runs, pool: None)
  monkeypatch.setattr(trained, "row", lambda run: None)
  assert trained.train_for(
    listed("a"), num_processes=3, slurm="", max_minutes=minutes
  )
  assert begun == [(3, "", deadline_s)]
