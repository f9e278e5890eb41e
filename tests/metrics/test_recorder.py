"""Rows of a run, as they are recorded, resumed and read again."""

import math

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import (
  EventAccumulator,
)

from dilocox_jax.metrics import (
  Evaluation,
  Recorder,
  RecordError,
  RoundRow,
  Timing,
  from_json,
  read_rows,
)
from dilocox_jax.metrics.recorder import TensorBoardWriter

NAN = math.nan


def _round(recorder, step, loss=2.0, cosine: float | None = 0.5):
  recorder.record_round(
    step=np.int32(step),
    tokens=step * 100,
    phase="rounds",
    loss=np.float32(loss),
    loss_per_replica=np.array([loss, NAN], np.float32),
    grad_norm=np.float32(0.7),
    learning_rate=np.float64(1e-3),
    sent_bytes=np.int64(10),
    total_sent_bytes=step,
    drift=[
      {
        "fragment": np.int32(0),
        "step": np.int32(step),
        "cosine": cosine,
        "disagreement": np.float32(0.5),
        "pseudo_gradient_norm": np.float32(0.25),
        "rank": 4.0,
      }
    ],
  )


def _validation(step, **others):
  return others | {
    "step": step,
    "tokens": step * 100,
    "total_sent_bytes": step,
    "outer_loss": np.float32(1.5),
    "mean_loss": None,
    "replica_loss": 1.25,
  }


def _train(workdir, first, last, resume_step=None):
  with Recorder(workdir, resume_step) as recorder:
    for step in range(first, last + 1, 10):
      _round(recorder, step, loss=50 / step)
      recorder.record_evaluation(**_validation(step))
      recorder.record_timing(
        step=step, event="round", wall_s=0.5, tokens_per_s=200
      )
    recorder.record_evaluation(**_validation(last, num_steps=last))


def _scalars(directory):
  events = EventAccumulator(str(directory))
  events.Reload()
  return {
    tag: [(event.step, event.value) for event in events.Scalars(tag)]
    for tag in events.Tags()["scalars"]
  }


def test_rows_are_read_back_as_they_were_recorded(tmp_path):
  with Recorder(tmp_path) as recorder:
    _round(recorder, 10, loss=0.1, cosine=None)
    recorder.record_evaluation(**_validation(10, judge_loss=1.75))
    recorder.record_evaluation(**_validation(20, num_steps=20))
  first, evaluated, last = read_rows(tmp_path / "metrics.jsonl")
  kinds = [row["kind"] for row in (first, evaluated, last)]
  assert kinds == ["round", "evaluation", "final"]
  assert last["num_steps"] == 20 and "judge_loss" not in last
  # Fields of a later version are skipped, and null is no number.
  row = from_json(RoundRow, first | {"effective_rank": 12})
  assert (row.step, row.tokens, row.sent_bytes) == (10, 1000, 10)
  assert row.loss == row.loss_per_replica[0] == float(np.float32(0.1))
  assert math.isnan(row.loss_per_replica[1])
  assert math.isnan(row.drift[0].cosine) and first["drift"][0]["cosine"] is None
  assert (row.drift[0].disagreement, row.drift[0].rank) == (0.5, 4.0)
  for values, flushed in ((evaluated, False), (last, True)):
    read = from_json(Evaluation, values)
    assert (read.outer_loss, read.flushed) == (1.5, flushed)
  assert from_json(Evaluation, evaluated).judge_loss == 1.75
  del evaluated["replica_loss"]
  with pytest.raises(KeyError, match="replica_loss"):
    from_json(Evaluation, evaluated)


def test_tensorboard_has_the_values_that_are_finite(tmp_path):
  with Recorder(tmp_path) as recorder:
    _round(recorder, 10, loss=0.5)
    recorder.record_evaluation(**_validation(10, judge_loss=1.75))
    recorder.record_timing(step=10, event="round", wall_s=1, tokens_per_s=8)
  assert _scalars(tmp_path / "tensorboard") == {
    "train/loss": [(10, 0.5)],
    "train/grad_norm": [(10, pytest.approx(0.7))],
    "train/learning_rate": [(10, pytest.approx(1e-3))],
    "wire/sent_bytes": [(10, 10)],
    "wire/total_sent_bytes": [(10, 10)],
    "drift/cosine/fragment_0": [(10, 0.5)],
    "drift/disagreement/fragment_0": [(10, 0.5)],
    "rank/rank/fragment_0": [(10, 4.0)],
    "validation/outer_loss": [(10, 1.5)],
    "validation/replica_loss": [(10, 1.25)],
    "validation/judge_loss": [(10, 1.75)],
    "time/tokens_per_s": [(10, 8)],
  }


def test_a_restart_hides_the_steps_it_does_again(tmp_path):
  for first_step, steps in ((0, (10, 20, 30)), (11, (20,))):
    writer = TensorBoardWriter(tmp_path, first_step)
    for step in steps:
      writer.scalars(step, {"loss": first_step})
    writer.close()
  assert _scalars(tmp_path) == {"loss": [(10, 0.0), (20, 11.0)]}


def test_times_stay_out_of_the_metrics_and_are_there_if_known(tmp_path):
  with Recorder(tmp_path) as recorder:
    recorder.record_timing(step=1, event="compile", wall_s=0.5)
    known = {"simulated_s": 2.0, "exposed_s": 0.25, "link_bytes": 70}
    recorder.record_timing(
      step=10, event="round", wall_s=0.5, tokens_per_s=200, **known
    )
  compiled, trained = read_rows(tmp_path / "timing.jsonl")
  plain = {"step": 1, "event": "compile", "wall_s": 0.5, "tokens_per_s": None}
  assert compiled == plain and math.isnan(from_json(Timing, plain).link_bytes)
  assert trained.items() >= (known | {"tokens_per_s": 200.0}).items()
  assert read_rows(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("resume_step", [None, 10, 20, 40])
def test_a_resumed_run_leaves_the_same_bytes_as_one_that_was_not_killed(
  tmp_path, resume_step
):
  _train(tmp_path / "whole", 10, 40)
  _train(tmp_path / "killed", 10, 40)
  with (tmp_path / "killed/metrics.jsonl").open("ab") as file:
    file.write(b'{"kind": "ro')
  _train(tmp_path / "killed", (resume_step or 0) + 10, 40, resume_step)
  for name in ("metrics.jsonl", "timing.jsonl"):
    whole = (tmp_path / "whole" / name).read_bytes()
    assert (tmp_path / "killed" / name).read_bytes() == whole
  rows = read_rows(tmp_path / "killed/metrics.jsonl")
  assert [row["kind"] for row in rows].count("final") == 1


def test_what_nobody_reads_and_what_cannot_be_made_is_refused(tmp_path):
  with Recorder(tmp_path / "run") as recorder:
    with pytest.raises(ValueError, match="event='lunch' must be one of round,"):
      recorder.record_timing(step=1, event="lunch", wall_s=1.0)
  (tmp_path / "file").write_text("in the way")
  for make in (Recorder, TensorBoardWriter):
    with pytest.raises(RecordError, match="cannot write .*file/run: Not a dir"):
      make(tmp_path / "file/run")
