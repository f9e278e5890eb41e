import dataclasses
import json
import pathlib

import pytest

from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.training import run_text
from experiments.runtime import cores
from experiments.sweeps import run_maker
from experiments.sweeps.required_runs import TASKS
from experiments.sweeps.results import Results
from experiments.sweeps.run_maker import KeptRuns, corpus_digest
from experiments.sweeps.run_spec import RequiredRun, run_digest
from tests.experiments.sweeps import fakes as sweeps


def opened(tmp_path, work="work", any_text=False):
  plan = sweeps.required()
  results = Results(tmp_path / "results.csv", plan.sweep.base)
  runs = KeptRuns(results, tmp_path / work, any_text)
  plan.loss_of = runs.loss
  return plan, results, runs


def test_a_sweep_that_was_killed_goes_on_and_makes_nothing_twice(
  tmp_path, monkeypatch
):
  with monkeypatch.context() as patch:
    first = sweeps.stand_in(patch, kill_after=9)
    plan, _, runs = opened(tmp_path)
    with pytest.raises(KeyboardInterrupt):
      sweeps.make_all(plan, runs)
  assert len(first) == 9
  kept = (tmp_path / "results.csv").read_bytes()
  assert kept.count(b"\n") == 10
  rest = sweeps.stand_in(monkeypatch)
  plan, results, runs = opened(tmp_path)
  sweeps.make_all(plan, runs)
  assert (tmp_path / "results.csv").read_bytes().startswith(kept)
  done = [path.name for path in (*first, *rest)]
  assert len(set(done)) == len(done) == len(results.rows)
  plan, results, runs = opened(tmp_path)
  for task in TASKS:
    planned = sweeps.runs_of(task, plan)
    assert runs.missing(planned) == []


def test_the_process_of_a_run_gets_the_files_that_register_parts(tmp_path):
  plan, results, _ = opened(tmp_path)
  runs = KeptRuns(results, tmp_path, False, ["mine.py", "yours.cfg"])
  command = runs.job(sweeps.runs_of("tune_inner", plan)[0]).command
  assert {"--parts=mine.py", "--parts=yours.cfg"} < set(command)


@pytest.mark.slow
def test_a_fresh_clone_goes_on_from_the_lines_alone(tmp_path, monkeypatch):
  made = sweeps.stand_in(monkeypatch)
  plan, _, runs = opened(tmp_path)
  sweeps.make_all(plan, runs)
  count = len(made)
  plan, _, runs = opened(tmp_path, work="elsewhere")
  sweeps.make_all(plan, runs)
  assert len(made) == count


@pytest.mark.slow
def test_a_run_that_ended_before_its_line_was_written_is_not_made_again(
  tmp_path, monkeypatch
):
  made = sweeps.stand_in(monkeypatch)
  plan, results, runs = opened(tmp_path)
  sweeps.make_all(plan, runs)
  count, lines = len(made), results.rows
  results.path.unlink()
  plan, results, runs = opened(tmp_path)
  sweeps.make_all(plan, runs)
  assert len(made) == count and results.rows.keys() == lines.keys()


def test_a_finished_runs_state_goes_and_its_numbers_stay(tmp_path, monkeypatch):
  made = sweeps.stand_in(monkeypatch)
  plan, results, runs = opened(tmp_path)
  sweeps.make_all(plan, runs)
  for workdir in made:
    assert not (workdir / "checkpoints").exists()
    assert (workdir / "metrics.jsonl").exists()
  planned = sweeps.runs_of("results", plan)[0]
  row = runs.row(planned)
  assert row and row.final_loss == sweeps.loss_of(planned)
  assert row.cores == len(cores.divided(1)[0])
  record = json.loads((made[0] / "run.json").read_text())
  assert row.revision == (record["source_revision"] or "")
  curve = results.curve((row.digest, row.corpus))
  assert [each.step for each in curve] == [12, 24, 36, 48]
  assert curve[-1].loss == row.final_loss and curve[-1].flushed
  tuning = runs.row(plan.tune_inner(plan.sweep.methods[0])[0])
  assert tuning and results.curve((tuning.digest, tuning.corpus)) == []


@pytest.mark.slow
def test_lines_on_another_text_count_for_a_report_alone(tmp_path, monkeypatch):
  sweeps.stand_in(monkeypatch)
  plan, _, runs = opened(tmp_path)
  sweeps.make_all(plan, runs)
  planned = plan.tune_inner(plan.sweep.methods[0])
  assert runs.to_do(planned) == "0 to do"
  monkeypatch.setattr(run_maker, "corpus_digest", lambda c: "other")
  _, _, here = opened(tmp_path)
  assert here.missing(planned) == planned
  assert here.to_do(planned).startswith("3 to do (3 of these have lines")
  _, _, anywhere = opened(tmp_path, any_text=True)
  assert anywhere.missing(planned) == []


def test_a_directory_of_another_text_is_left_alone(tmp_path, monkeypatch):
  """As after an upgrade of Python, whose library is the text."""
  made = sweeps.stand_in(monkeypatch)
  plan, results, runs = opened(tmp_path)
  planned = plan.tune_inner(plan.sweep.methods[0])
  runs.make(planned, 1, float("inf"))
  monkeypatch.setattr(run_maker, "corpus_digest", lambda c: "other")
  count = len(results.rows)
  runs.make(planned, 1, float("inf"))
  assert len(set(made)) == len(made) == 2 * len(planned)
  assert len(results.rows) == count  # The made runs are of the first text.


def test_curves_are_kept_whichever_task_comes_first(tmp_path, monkeypatch):
  sweeps.stand_in(monkeypatch)
  plan, results, runs = opened(tmp_path)
  for task in (*TASKS[:2], "equal_time"):
    planned = sweeps.runs_of(task, plan)
    runs.make(planned, 1, float("inf"))
  reference = plan.sweep.method("dilocox_continue")
  for each in plan.results(reference):
    row = runs.row(each)
    assert row and results.curve((row.digest, row.corpus))


def test_a_report_never_mixes_two_texts(tmp_path, monkeypatch):
  sweeps.stand_in(monkeypatch)
  plan, results, runs = opened(tmp_path, any_text=True)
  planned = plan.tune_inner(plan.sweep.methods[0])
  runs.make(planned[:2], 1, float("inf"))
  lone = dataclasses.replace(
    results.rows[results.digest(planned[0].config), sweeps.TEXT],
    digest=results.digest(planned[2].config),
    corpus="other",
  )
  results.add(lone, [])
  assert runs.missing(planned) == [planned[2]]


class Ends:
  """A batch in which every job ends for one reason."""

  reason = ""

  def __init__(self, jobs, processes, *, ended, deadline_s):
    self.jobs, self.ended, self.is_late = jobs, ended, True

  def run(self):
    for job in self.jobs:
      sweeps.write_run(job, sweeps.sweep().config({}), 1.0)
      self.ended(job, self.reason)


@pytest.mark.parametrize(
  "reason, failed, left",
  [
    ("the loss or its gradient is not finite at step 3: lower it", 0, 0),
    pytest.param(
      *("a parameter is not finite after step 6: lower it", 0, 0),
      marks=pytest.mark.slow,
    ),
    ("killed by SIGKILL", 3, 3),
  ],
)
def test_only_a_run_that_diverged_is_a_result(
  reason, failed, left, tmp_path, monkeypatch
):
  monkeypatch.setattr(run_maker, "corpus_digest", lambda c: sweeps.TEXT)
  monkeypatch.setattr(Ends, "reason", reason)
  monkeypatch.setattr(run_maker.job_pool, "JobPool", Ends)
  plan, results, runs = opened(tmp_path)
  planned = plan.tune_inner(plan.sweep.methods[0])
  assert runs.make(planned, 1, float("inf")) == bool(left)
  assert [why for _, why in runs.failures] == [reason] * failed
  assert len(runs.missing(planned)) == left
  for row in results.rows.values():
    assert row.final_loss != row.final_loss and row.failure == reason


def test_the_text_of_a_run_is_the_one_that_training_would_see():

  config = sweeps.sweep().config({"seed": 3})
  assert corpus_digest(config) == run_text.corpus(config).digest


def test_a_field_that_a_later_version_adds_makes_no_run_anew(tmp_path):
  maker = run_maker.RunMaker(tmp_path)
  digests = {
    maker.digest(RequiredRun("t", "n", {}, from_mapping(changed)))
    for changed in ({}, {"seed": 1}, {"data": {"vocab_size": 1024}})
  }
  plain = run_digest(RunConfig(), counted=())
  assert digests == {plain, run_digest(from_mapping({"seed": 1}), counted=())}
  # A version without the field would have made the same digest of the rest.
  assert run_digest(RunConfig()) != plain


def test_the_process_of_a_run_gets_its_whole_config(tmp_path):
  plan, _, runs = opened(tmp_path)
  planned = plan.tune_inner(plan.sweep.method("diloco"))[0]
  job = runs.job(planned)
  assert "--config.inner.learning_rate=0.001" in job.command
  assert "--config.seed=1000" in job.command
  assert job.total_steps == 12
  assert job.workdir.parent == pathlib.Path(tmp_path / "work" / "runs")
