"""The study of the gap: populations of runs, their rates and their lines."""

import dataclasses

import numpy as np
import pytest

from dilocox_jax.metrics.lines import read_rows
from dilocox_jax.metrics.work_directory import locked
from dilocox_jax.training import run_text
from dilocox_jax.training.trainer import Trainer
from experiments.gaps import design, population, rows, tuning
from experiments.gaps.settings import Rates, Run, Setting
from experiments.gaps.work import Work
from tests.experiments.programs import run as run_program
from tests.tiers import slow

TINY = Setting(
  "5k",
  replicas=2,
  batch=2,
  steps=12,
  interval=4,
  source="synthetic",
  sequence_length=16,
)
ALLREDUCE = dataclasses.replace(TINY, replicas=1, batch=4, interval=0)
RUNS = [
  Run(Rates(inner=0.02, outer=1.0), seed=0),
  Run(Rates(inner=0.04, outer=0.7), seed=1),
]


def test_a_run_does_not_depend_on_the_others_of_its_population():
  text = run_text.corpus(TINY.config(RUNS[0]))
  together = population.train(TINY, RUNS, text)
  for run, losses in zip(RUNS, together, strict=True):
    (alone,) = population.train(TINY, [run], text)
    np.testing.assert_allclose(alone, losses, rtol=1e-5)
  assert abs(together[0].newest - together[1].newest) > 1e-3


@pytest.mark.parametrize(
  "setting",
  [
    ALLREDUCE,
    dataclasses.replace(TINY, warm_start=4, outer_momentum=0.6),
    *slow(dataclasses.replace(TINY, bits=1, delay=2)),
  ],
  ids=["every step", "after a warm start", "late and in one bit"],
)
def test_a_run_is_that_of_the_trainer(setting, tmp_path):
  run = RUNS[0]
  trainer = Trainer(setting.config(run), tmp_path)
  tokens = trainer.data.streams.take(setting.steps)
  trainer.data.streams.set_state({"step": 0})
  trainer.run()
  row = read_rows(tmp_path / "metrics.jsonl")[-1]
  texts = tokens.transpose(1, 0, 2, 3)[None]
  models = population.train_on(setting, [run], texts, [0])
  (batches,) = trainer.data.validation
  newest, average = (
    population.evaluate(setting, model, batches)[0] for model in models
  )
  assert average == pytest.approx(row["outer_loss"], rel=1e-5)
  assert newest == pytest.approx(row["mean_loss"], rel=1e-5)
  assert population.sent_bytes(setting) == row["total_sent_bytes"]


def test_replicas_read_what_allreduce_reads_and_share_nothing():
  text = run_text.corpus(TINY.config(RUNS[0]))
  alone = population.training_tokens(ALLREDUCE, text, seed=3)
  divided = population.training_tokens(TINY, text, seed=3)
  assert divided.shape == (12, 2, 2, 17)
  np.testing.assert_array_equal(divided.reshape(alone.shape), alone)
  sequences = alone.reshape(-1, 17)
  assert len(np.unique(sequences, axis=0)) == len(sequences)
  other = population.training_tokens(TINY, text, seed=4)
  assert (other != divided).any()


def bowl(setting, run):
  """Losses whose best rates are far from where the search begins."""
  inner = np.log2(run.rates.inner / 0.16)
  outer = 0.0
  if not setting.is_allreduce:
    outer = np.log2(run.rates.outer / 0.35)
  loss = 2.0 + inner**2 + outer**2 + inner * outer + 1e-3 * (run.seed % 10)
  return population.Losses(loss, loss, loss, loss)


@pytest.fixture
def fake_training(monkeypatch):
  """Runs take no time, and their losses are those of `bowl`."""
  trained = []

  def train(setting, runs, text):
    trained.extend((setting, run) for run in runs)
    return [bowl(setting, run) for run in runs]

  monkeypatch.setattr(population, "train", train)
  return trained


def work(tmp_path, **changes):
  groups = [design.Group("both", (TINY, ALLREDUCE))]
  return Work(tmp_path / "rows.csv", groups, largest_population=2, **changes)


@pytest.mark.parametrize("setting", [TINY, ALLREDUCE], ids=["rounds", "every"])
def test_the_best_rates_are_not_at_an_end(setting, tmp_path, fake_training):
  assert work(tmp_path).train_all()
  results = rows.by_setting(rows.read(tmp_path / "rows.csv"))[setting]
  best = tuning.best_rates(setting, results)
  assert best is not None and best.inner == 0.16
  tried = {each.inner_rate for each in results}
  assert min(tried) < best.inner < max(tried)
  if not setting.is_allreduce:
    assert best.outer == 0.354
    tried = {each.outer_rate for each in results}
    assert min(tried) < best.outer < max(tried)
  seeds = [r.seed for r in results if (r.inner_rate, r.outer_rate) == best]
  assert sorted(seeds) == [*tuning.RESULT_SEEDS, *tuning.TUNING_SEEDS]


def test_a_search_begins_where_the_most_similar_setting_was_best(
  tmp_path, fake_training
):
  assert work(tmp_path).train_all()
  finished = rows.by_setting(rows.read(tmp_path / "rows.csv"))
  more = dataclasses.replace(TINY, replicas=2 * TINY.replicas)
  start = tuning.start_point(more, finished)
  assert start is not None
  first = tuning.missing_runs(more, [], start).runs[0].rates
  assert first == tuning.best_rates(TINY, finished[TINY])
  del finished[TINY]
  assert tuning.start_point(more, finished) is None  # AllReduce tells nothing.


def test_a_search_may_begin_where_another_text_was_best(
  tmp_path, fake_training, monkeypatch
):
  assert work(tmp_path).train_all()
  results = rows.by_setting(rows.read(tmp_path / "rows.csv"))
  best = tuning.best_rates(TINY, results[TINY])
  fake_training.clear()
  other = dataclasses.replace(TINY, source="c_headers")
  text = dataclasses.replace(run_text.corpus(TINY.config(RUNS[0])), digest="2")
  monkeypatch.setattr("experiments.gaps.work._text", lambda source: text)
  groups = [design.Group("other", (other,))]
  assert Work(tmp_path / "rows.csv", groups).train_all()
  setting, run = fake_training[0]
  assert (setting, run.rates) == (other, best)
  assert other.name == f"{TINY.name}-c_headers"


def test_runs_on_another_text_do_not_count_as_done(
  tmp_path, fake_training, monkeypatch
):
  assert work(tmp_path).train_all()
  text = dataclasses.replace(run_text.corpus(TINY.config(RUNS[0])), digest="2")
  monkeypatch.setattr("experiments.gaps.work._text", lambda source: text)
  assert not work(tmp_path, deadline=0.0).train_all()
  assert work(tmp_path).train_all()


def test_a_text_of_files_has_its_glob_and_a_judge_text():
  config = dataclasses.replace(TINY, source="manual_pages").config(RUNS[0])
  assert config.data.source == "text_files"
  assert config.data.glob == "/usr/share/man/man8/*.gz"
  assert config.data.judge_fraction == 0.5
  assert TINY.config(RUNS[0]).data.judge_fraction == 0


def test_a_run_that_diverges_is_not_the_best(tmp_path, monkeypatch):
  def train(setting, runs, text):
    return [
      population.Losses(*4 * [np.nan])
      if run.rates.inner > 0.03  # The first pair of rates, and higher ones.
      else bowl(setting, run)
      for run in runs
    ]

  monkeypatch.setattr(population, "train", train)
  assert work(tmp_path).train_all()
  results = rows.by_setting(rows.read(tmp_path / "rows.csv"))[ALLREDUCE]
  best = tuning.best_rates(ALLREDUCE, results)
  assert best is not None and best.inner == 0.0283


def test_finished_runs_are_not_trained_again(tmp_path, fake_training):
  assert work(tmp_path).train_all()
  whole = (tmp_path / "rows.csv").read_text()
  assert len(fake_training) == len(set(fake_training))
  fake_training.clear()
  assert work(tmp_path).train_all()
  assert not fake_training
  # Killed in the middle of a write: the last line has no end.
  lines = whole.splitlines(keepends=True)
  (tmp_path / "rows.csv").write_text("".join(lines[:-4]) + lines[-4][:20])
  assert work(tmp_path).train_all()
  assert len(fake_training) == 4
  found = (tmp_path / "rows.csv").read_text()
  assert len(found.splitlines()) == len(lines)


def test_no_program_begins_after_the_time_limit(tmp_path, fake_training):
  assert not work(tmp_path, deadline=0.0).train_all()
  assert not fake_training


def test_two_programs_do_not_train_one_setting(tmp_path, fake_training):
  mine = work(tmp_path)
  lock = rows.lock_path(mine.path, TINY.name)
  with locked(lock, "another program"):
    assert not mine.train_all()
  assert {setting for setting, _ in fake_training} == {ALLREDUCE}
  assert mine.train_all()


def test_settings_of_a_list_differ_and_each_gap_has_its_baseline():
  for groups in design.DESIGNS.values():
    settings = [each for group in groups() for each in group.settings]
    assert len({each.name for each in settings}) == len(settings)
    for each in settings:
      each.config(RUNS[0])
      batch = each.global_batch
      baseline = Setting(
        each.size,
        replicas=1,
        batch=batch,
        steps=each.steps,
        source=each.source,
      )
      assert baseline in settings or each.momentum != 0.9


def test_held_out_settings_come_last():
  groups = design.DESIGNS["cpu"]()
  is_held_out = [
    any(
      each.size == design.HELD_OUT_SIZE
      or each.replicas == design.HELD_OUT_REPLICAS
      for each in group.settings
    )
    for group in groups
  ]
  assert is_held_out == sorted(is_held_out) and any(is_held_out)


def test_the_list_says_what_is_left(tmp_path):
  done = run_program("train_gaps", f"--rows={tmp_path}/rows.csv", "--list")
  assert done.returncode == 0, done.stderr
  assert "| all |" in done.stdout and "Held out: 131k" in done.stdout


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"interval": 5}, "interval=5 must divide the 12 steps"),
    ({"delay": 3}, "delay=3 must divide interval=4"),
    ({"interval": 0}, "AllReduce has one replica"),
  ],
)
def test_settings_that_would_not_end_flushed_are_refused(changes, says):
  with pytest.raises(ValueError, match=says):
    dataclasses.replace(TINY, **changes)
