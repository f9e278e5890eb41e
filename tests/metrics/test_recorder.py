import math

import numpy as np
import pytest

from dilocox_jax.metrics import (
  Evaluation,
  Recorder,
  RecordError,
  RoundRow,
  from_json,
  read_rows,
)


def _round(recorder, step, loss=2.0, cosine: float | None = 0.5):
  recorder.record_round(
    step=np.int32(step),
    tokens=step * 100,
    phase="rounds",
    loss=np.float32(loss),
    loss_per_replica=np.array([loss, loss + 1], np.float32),
    grad_norm=np.float32(0.7),
    learning_rate=np.float64(1e-3),
    sent_bytes=np.int64(10),
    total_sent_bytes=step,
    drift=[
      {
        "fragment": np.int32(0),
        "step": np.int32(step),
        "cosine": cosine,
        "disagreement": np.float32(0.1),
        "pseudo_gradient_norm": np.float32(0.3),
      }
    ],
  )


def _validation(step):
  return {
    "step": step,
    "tokens": step * 100,
    "total_sent_bytes": step,
    "outer_loss": np.float32(1.1),
    "mean_loss": 1.2,
    "replica_loss": 1.3,
  }


def _train(workdir, first, last, resume_step=None):
  with Recorder(workdir, resume_step) as recorder:
    for step in range(first, last + 1, 10):
      _round(recorder, step, loss=50 / step)
      recorder.record_evaluation(**_validation(step))
      recorder.record_timing(
        step=step, event="round", wall_s=0.5, tokens_per_s=200
      )
    recorder.record_evaluation(num_steps=last, **_validation(last))


def test_a_round_is_read_back_as_it_was_recorded(tmp_path):
  with Recorder(tmp_path) as recorder:
    _round(recorder, 10, loss=0.1, cosine=None)
  (row,) = read_rows(tmp_path / "metrics.jsonl")
  assert row["kind"] == "round"
  assert row["drift"][0]["cosine"] is None
  read = from_json(RoundRow, row)
  assert read.loss == float(np.float32(0.1))
  assert read.loss_per_replica == [
    float(np.float32(0.1)),
    float(np.float32(1.1)),
  ]
  assert (read.step, read.tokens, read.sent_bytes) == (10, 1000, 10)
  assert read.drift[0].pseudo_gradient_norm == float(np.float32(0.3))
  assert math.isnan(read.drift[0].cosine)


def test_the_final_row_is_a_flushed_evaluation_with_the_steps_asked_for(
  tmp_path,
):
  with Recorder(tmp_path) as recorder:
    recorder.record_evaluation(**_validation(10))
    recorder.record_evaluation(num_steps=20, **_validation(20))
  first, last = read_rows(tmp_path / "metrics.jsonl")
  assert (first["kind"], first["flushed"]) == ("evaluation", False)
  assert (last["kind"], last["flushed"]) == ("final", True)
  assert last["num_steps"] == 20
  assert from_json(Evaluation, last).outer_loss == float(np.float32(1.1))


def test_the_clock_stays_out_of_the_metrics(tmp_path):
  _train(tmp_path / "a", 10, 30)
  fields = {
    key for row in read_rows(tmp_path / "a/metrics.jsonl") for key in row
  }
  assert not fields & {"wall_s", "tokens_per_s", "time"}
  rows = read_rows(tmp_path / "a/timing.jsonl")
  assert rows[0] == {
    "step": 10,
    "event": "round",
    "wall_s": 0.5,
    "tokens_per_s": 200.0,
  }


def test_what_a_link_carried_stands_beside_the_time(tmp_path):
  with Recorder(tmp_path) as recorder:
    recorder.record_timing(
      step=10, event="round", wall_s=0.5, exposed_s=0.1, link_bytes=70
    )
  (row,) = read_rows(tmp_path / "timing.jsonl")
  assert (row["exposed_s"], row["link_bytes"]) == (0.1, 70)
  assert "simulated_s" not in row


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


def test_an_event_or_phase_that_nobody_reads_is_refused(tmp_path):
  with Recorder(tmp_path) as recorder:
    with pytest.raises(ValueError, match="event='lunch' must be one of round,"):
      recorder.record_timing(step=1, event="lunch", wall_s=1.0)


def test_a_work_directory_that_cannot_be_made_is_one_line(tmp_path):
  (tmp_path / "file").write_text("in the way")
  with pytest.raises(RecordError, match="cannot write .*file/run: Not a dir"):
    Recorder(tmp_path / "file/run")
