import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import (
  EventAccumulator,
)

from dilocox_jax.metrics import RecordError
from dilocox_jax.metrics.tensorboard import TensorBoardWriter


def _read(directory, tag):
  events = EventAccumulator(str(directory))
  events.Reload()
  return [(event.step, event.value) for event in events.Scalars(tag)]


def test_scalars_can_be_read_by_tensorboard(tmp_path):
  writer = TensorBoardWriter(tmp_path)
  for step in (10, 20):
    writer.scalars(step, {"train/loss": step / 4, "wire/sent_bytes": 3 * step})
  writer.close()
  assert _read(tmp_path, "train/loss") == [(10, 2.5), (20, 5.0)]
  assert _read(tmp_path, "wire/sent_bytes") == [(10, 30.0), (20, 60.0)]


def test_values_that_are_not_finite_are_left_out(tmp_path):
  writer = TensorBoardWriter(tmp_path)
  writer.scalars(1, {"a": math.nan, "b": 1.0})
  writer.scalars(2, {"a": 2.0, "b": math.inf})
  writer.close()
  assert _read(tmp_path, "a") == [(2, 2.0)]
  assert _read(tmp_path, "b") == [(1, 1.0)]


def test_a_restart_hides_the_steps_it_does_again(tmp_path, caplog):
  first = TensorBoardWriter(tmp_path)
  for step in (10, 20, 30):
    first.scalars(step, {"loss": 1.0})
  first.close()
  second = TensorBoardWriter(tmp_path, first_step=11)
  second.scalars(20, {"loss": 2.0})
  second.close()
  assert _read(tmp_path, "loss") == [(10, 1.0), (20, 2.0)]


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
  (tmp_path / "file").write_text("in the way")
  with pytest.raises(RecordError, match="cannot write .*file/board"):
    TensorBoardWriter(tmp_path / "file/board")
