"""Whole runs whose rank and H follow what is measured."""

import numpy as np
import pytest

from tests import runs

# Half the energy is in a few directions of any matrix, so the rank must fall.
SHARE = 0.5


@pytest.mark.slow
def test_a_killed_run_adapts_as_one_that_was_not(tmp_path):
  config = runs.settings(
    total_steps=24,
    model={"model_dim": 32, "ff_dim": 48},
    exchange={"codec": "low_rank(rank=8)+int", "feedback": 1.0},
    adaptive={
      "mode": "rank_and_interval",
      "window_rounds": 2,
      "energy": SHARE,
    },
  )
  runs.train(config, tmp_path / "whole")
  runs.train(config, tmp_path / "killed", until=12)
  runs.train(config, tmp_path / "killed")
  (whole, _), (resumed, _) = (
    runs.saved(tmp_path / name) for name in ("whole", "killed")
  )
  runs.assert_same_bits(resumed, whole)
  assert runs.metrics_text(tmp_path / "killed") == runs.metrics_text(
    tmp_path / "whole"
  )
  rows = runs.rows(tmp_path / "whole", "round")
  ranks = [entry["rank"] for row in rows for entry in row["drift"]]
  assert ranks[0] == 8 and ranks[-1] < 8
  sent = [row["sent_bytes"] for row in rows if row["drift"]]
  assert sent[-1] < sent[0]
  lengths = np.diff([0, *(row["step"] for row in rows)])
  assert lengths[-2] < lengths[0]  # The last may be cut short.
