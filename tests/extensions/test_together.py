"""Extensions of several kinds in one run, as the trainer does it."""

import jax
import pytest

from tests import runs as trained
from tests.extensions import runs


@pytest.mark.slow
@pytest.mark.usefixtures(
  "growing_registered", "gossip_registered", "lookahead_registered"
)
def test_a_run_of_the_trainer_writes_its_rows_and_checkpoints(tmp_path):
  config = runs.config(
    10,
    4,
    sync={"method": "growing", "sync_interval": 2},
    exchange={"kind": "gossip"},
    outer={"optimizer": "clipped_momentum"},
    checkpoint={"interval_steps": 4},
    evaluation={"interval_steps": 4, "num_sequences": 8},
  )
  trained.train(config, tmp_path)
  rounds = trained.rows(tmp_path, "round")
  sent = [drift["step"] for row in rounds for drift in row["drift"]]
  assert sent == [2, 4, 8]
  # Each has a mean of its own, so no cosine follows from it.
  assert not any(drift["cosine"] for row in rounds for drift in row["drift"])
  (final,) = trained.rows(tmp_path, "final")
  assert final["total_sent_bytes"] == runs.simulated(config).sent_bytes
  state, _ = trained.saved(tmp_path)
  leaves = jax.tree.leaves(state.fragments[0].params)
  assert {leaf.shape[0] for leaf in leaves} == {4}
