"""Rows of a run, as they are recorded, resumed and read again."""

import math

import numpy as np
import pytest

from dilocox_jax.metrics.lines import read_rows
from dilocox_jax.metrics.recorder import (
  Evaluation,
  Recorder,
  RoundRow,
  from_json,
)

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
  recorder = Recorder(workdir, resume_step)
  for step in range(first, last + 1, 10):
    _round(recorder, step, loss=50 / step)
    recorder.record_evaluation(**_validation(step))
    recorder.record_timing(
      step=step, event="round", wall_s=0.5, tokens_per_s=200
    )
  recorder.record_evaluation(**_validation(last, num_steps=last))


def test_rows_are_read_back_as_they_were_recorded(tmp_path):
  recorder = Recorder(tmp_path)
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


@pytest.mark.parametrize("resume_step", [None, 20, 40])
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
