"""What a run says of itself, from Python."""

import logging
import subprocess
import sys

import numpy as np
import pytest

import dilocox_jax as dx
from dilocox_jax.api.progress import shown_progress
from dilocox_jax.training.trainer import Trainer
from tests import runs

TOKENS = np.arange(4000) % 23
CONFIG = {
  "model": {"preset": "nano", "scan_unroll": 1},
  "sync": {"sync_interval": 2},
  "data": {"batch_size": 2, "sequence_length": 8},
  "evaluation": {"num_sequences": 2},
  "checkpoint": {"interval_steps": 4},
}


def train(workdir, **changes):
  return dx.train(
    data=(TOKENS, TOKENS[:500]),
    method="diloco",
    replicas=2,
    steps=8,
    config=CONFIG,
    workdir=workdir,
    **changes,
  )


def test_a_run_says_what_it_trains_and_where_it_goes_on(
  tmp_path, caplog, monkeypatch
):
  runs.share_programs(monkeypatch)
  with monkeypatch.context() as patch, pytest.raises(runs.Killed):
    patch.setattr(Trainer, "_dispatch", runs.killed(6))
    train(tmp_path)
  assert "model nano: 12,624 parameters, 2 replicas" in caplog.text
  assert "compiling; the first loss" in caplog.text
  assert "going on" not in caplog.text
  caplog.clear()
  train(tmp_path)
  assert "going on from step 4 of 8" in caplog.text
  assert "diloco: step 8 of 8 | loss" in caplog.text
  assert "min left" in caplog.text and "orbax" not in caplog.text
  caplog.clear()
  train(tmp_path)
  assert "has ended before: nothing is left to train" in caplog.text
  caplog.clear()
  train(tmp_path, quiet=True)
  assert not caplog.text


def test_nothing_stays_changed():
  names = "dilocox_jax", "absl", "jax", "orbax"
  before = [logging.getLogger(name).level for name in names]
  with shown_progress():
    assert logging.getLogger("dilocox_jax").isEnabledFor(logging.INFO)
    assert not logging.getLogger("absl").isEnabledFor(logging.INFO)
  assert before == [logging.getLogger(name).level for name in names]
  logging.getLogger("dilocox_jax").setLevel(logging.DEBUG)
  try:
    with shown_progress():
      assert logging.getLogger("dilocox_jax").isEnabledFor(logging.DEBUG)
  finally:
    logging.getLogger("dilocox_jax").setLevel(before[0])


@pytest.mark.parametrize(
  ("setup", "expected"),
  [
    ("", "a line\n"),
    ("logging.basicConfig(format='mine: %(message)s')", "mine: a line\n"),
  ],
)
def test_lines_go_to_the_programs_handlers_or_to_standard_error_once(
  setup, expected
):
  code = (
    f"import logging\n{setup}\n"
    "from dilocox_jax.api.progress import shown_progress\n"
    "with shown_progress():\n"
    "  logging.getLogger('dilocox_jax.training').info('a line')\n"
    "  logging.getLogger('absl').info('of a checkpoint')\n"
    "logging.getLogger('dilocox_jax.training').info('later')\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert done.stderr == expected and not done.stdout
