"""Small runs that compare growing rounds at equal bytes."""

import dataclasses
import math
import time

import pytest

from experiments.gaps import growing_runs, population
from experiments.gaps.growing import RATES, SETTINGS, GrowingSetting
from experiments.gaps.growing_runs import GrowingRuns
from experiments.gaps.settings import Rates
from tests.experiments import programs, test_gaps
from tests.tiers import slow

TINY = GrowingSetting(
  "5k",
  replicas=2,
  batch=2,
  steps=12,
  interval=4,
  source="synthetic",
  sequence_length=16,
)
# Rounds of 2, 2, 4 and 4 steps.
GROWING = dataclasses.replace(
  TINY, first_interval=2, steps_per_doubling=4, outer_schedule="cosine"
)
FREE = dataclasses.replace(TINY, outer_optimizer="schedule_free_sgd")


@pytest.mark.parametrize("setting", [GROWING, *slow(FREE)])
def test_a_run_is_that_of_the_trainer(setting, tmp_path):
  test_gaps.test_a_run_is_that_of_the_trainer(setting, tmp_path)


def test_all_settings_send_equally_many_bytes():
  others = {
    name: each for name, each in SETTINGS.items() if name != "allreduce"
  }
  assert {each.num_exchanges for each in others.values()} == {16}
  (sent_bytes,) = set(map(population.sent_bytes, others.values()))
  assert sent_bytes == 2_518_368  # As docs/results/predictions.md says.
  assert RATES.keys() == SETTINGS.keys()


def test_a_run_must_end_with_a_whole_round():
  with pytest.raises(
    ValueError, match="the last round of the run is not whole"
  ):
    dataclasses.replace(TINY, steps=13)


LOSSES = {0.0283: math.nan, 0.02: 2.4, 0.04: 2.2, 0.0566: 2.1, 0.08: 2.5}


def test_the_best_rates_are_trained_on_other_seeds(tmp_path, monkeypatch):
  """Each run once, and only until the deadline."""
  trained = []

  def train(setting, runs, text):
    trained.extend((setting, run) for run in runs)
    growth = 1.02 if setting.first_interval else 1.0
    return [
      population.Losses(
        *(growth * LOSSES[run.rates.inner] + 0.01 * run.seed,) * 4
      )
      for run in runs
    ]

  monkeypatch.setattr(population, "train", train)
  monkeypatch.setattr(growing_runs, "_text", lambda name: test_gaps.TINY)
  monkeypatch.setattr(test_gaps.Setting, "digest", "text", raising=False)
  runs = GrowingRuns(
    path=tmp_path / "rows.csv",
    seeds=(10, 11),
    result_seeds=(0, 1),
    deadline=math.inf,
  )
  names = ("constant", "growing_4_to_32")
  for _ in range(2):  # The second time nothing is left to train.
    for name in names:
      assert runs.choose_rates(name)
      assert runs.train_results(name)
  assert len(trained) == sum(2 * len(RATES[name]) + 2 for name in names)
  results = [run for _, run in trained if run.seed < 10]
  assert {run.rates for run in results} == {Rates(0.0566, 1.0)}
  constant, growing = runs.table(names).splitlines()[2:]
  assert "| 2.1050, +0.00 ± 0.00 % |" in constant
  assert "| 2.1470, +2.00 ± 0.00 % |" in growing
  late = dataclasses.replace(runs, deadline=time.monotonic() - 1)
  assert not late.choose_rates("cosine")
  assert not late._rows("cosine")
  assert late.choose_rates("constant") and late.train_results("constant")


def test_runs_that_are_left_when_the_time_is_over_are_no_success(tmp_path):
  done = programs.run(
    "train_growing",
    f"--rows={tmp_path}/rows.csv",
    "--settings=constant",
    "--minutes=0",
  )
  assert done.returncode == 75 and "runs are left" in done.one_line


@pytest.mark.parametrize(
  "flag, message",
  [
    ("--seeds=a,1", "--seeds=a,1 must be whole numbers"),
    ("--seeds=-1", "--seeds=-1: seed=-1 must be at least 0"),
    ("--result_seeds=", "--result_seeds=: name at least one seed"),
  ],
)
def test_wrong_seeds_are_refused_with_the_name_of_the_flag(
  flag, message, tmp_path
):
  done = programs.run(
    "train_growing", f"--rows={tmp_path}/rows.csv", "--minutes=0", flag
  )
  assert done.returncode == 2 and message in done.one_line


def test_an_unknown_setting_is_refused(tmp_path):
  done = programs.run(
    "train_growing", f"--rows={tmp_path}/rows.csv", "--settings=shrinking"
  )
  assert done.returncode == 2
  assert "--settings=shrinking is not one of constant" in done.stderr
  assert done.stderr.count("\n") == 1
