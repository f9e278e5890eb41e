import dataclasses
import math

import pytest

from dilocox_jax.metrics.rows import (
  DriftRow,
  Evaluation,
  RoundRow,
  Timing,
  from_json,
)

ROWS = [
  DriftRow(
    fragment=1,
    step=30,
    cosine=0.5,
    disagreement=0.25,
    pseudo_gradient_norm=2.0,
  ),
  Evaluation(
    step=30,
    tokens=60,
    total_sent_bytes=8,
    outer_loss=1.5,
    mean_loss=1.6,
    replica_loss=1.7,
    flushed=False,
  ),
  Timing(step=30, event="round", wall_s=2.0, tokens_per_s=30.0),
]
ROUND = RoundRow(
  step=30,
  tokens=60,
  phase="rounds",
  loss=2.0,
  loss_per_replica=[1.9, 2.1],
  grad_norm=1.0,
  learning_rate=1e-3,
  sent_bytes=4,
  total_sent_bytes=8,
  drift=[ROWS[0]],
)


@pytest.mark.parametrize(
  "row", [*ROWS, ROUND], ids=lambda row: type(row).__name__
)
def test_a_row_survives_the_way_through_json(row):
  assert from_json(type(row), dataclasses.asdict(row)) == row


def test_null_in_a_float_field_reads_as_nan():
  values = dataclasses.asdict(ROUND) | {
    "loss": None,
    "loss_per_replica": [1.0, None],
    "drift": [dataclasses.asdict(ROWS[0]) | {"cosine": None}],
  }
  row = from_json(RoundRow, values)
  assert math.isnan(row.loss) and math.isnan(row.drift[0].cosine)
  assert row.loss_per_replica[0] == 1.0
  assert math.isnan(row.loss_per_replica[1])


def test_fields_of_a_later_version_are_skipped():
  later = dataclasses.asdict(ROWS[2]) | {"effective_rank": 12, "kind": "x"}
  assert from_json(Timing, later) == ROWS[2]
