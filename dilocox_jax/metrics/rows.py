"""The rows of a run as types: one place for their names, units and meaning.

The recorder builds them from whatever numbers the trainer has, and the report
reads them back, so a field cannot be spelt in two ways. Fields that a reader
does not know are skipped: a later version may write more than an older one
reads.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, SupportsFloat, TypeVar

_Row = TypeVar("_Row")

PHASES = ("local", "data_parallel", "single")
RANK_FIELDS = ("rank", "energy_rank", "stable_rank")  # Of a drift, if low rank.
EVENTS = ("round", "compile", "evaluation", "checkpoint")


def number(value: SupportsFloat | None) -> float:
  """A Python float; None, which stands for "not finite", becomes NaN."""
  return math.nan if value is None else float(value)


@dataclasses.dataclass(frozen=True)
class DriftRow:
  """How far the replicas are apart when a fragment is measured.

  Attributes:
    fragment: Index of the fragment.
    step: Inner step of the measurement.
    cosine: Mean pairwise cosine of the pseudo-gradients; NaN where it has no
      meaning (one replica, or a zero vector).
    disagreement: Norm of the pseudo-gradients about their mean.
    pseudo_gradient_norm: Norm of the averaged pseudo-gradient.
    rank: Mean rank with which its matrices were sent; NaN without low rank.
    energy_rank: Mean rank that holds a share of the averaged update's energy.
    stable_rank: Mean stable rank of the averaged update.
  """

  fragment: int
  step: int
  cosine: float
  disagreement: float
  pseudo_gradient_norm: float
  rank: float = math.nan
  energy_rank: float = math.nan
  stable_rank: float = math.nan


@dataclasses.dataclass(frozen=True)
class RoundRow:
  """One round of training.

  Attributes:
    step: Inner steps finished.
    tokens: Tokens seen so far by all replicas together.
    phase: One of `PHASES`.
    loss: Mean over the round's steps and the replicas.
    loss_per_replica: Mean over the round's steps, one value a replica.
    grad_norm: Norm of the inner gradient before clipping.
    learning_rate: Of the inner optimizer at the round's last step.
    sent_bytes: What one replica put on the wire in this round.
    total_sent_bytes: The same since the start.
    drift: One entry a fragment that was measured in the round.
  """

  step: int
  tokens: int
  phase: str
  loss: float
  loss_per_replica: list[float]
  grad_norm: float
  learning_rate: float
  sent_bytes: int
  total_sent_bytes: int
  drift: list[DriftRow]


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Validation losses side by side, in nats a token.

  Attributes:
    step: Inner steps finished.
    tokens: Tokens seen so far by all replicas together.
    total_sent_bytes: What one replica has put on the wire so far.
    outer_loss: Of the outer parameters.
    mean_loss: Of the mean of the replicas' parameters.
    replica_loss: Of replica 0.
    flushed: Whether everything pending had been exchanged and applied.
  """

  step: int
  tokens: int
  total_sent_bytes: int
  outer_loss: float
  mean_loss: float
  replica_loss: float
  flushed: bool


@dataclasses.dataclass(frozen=True)
class Timing:
  """What one event cost on the wall clock.

  Attributes:
    step: Inner steps finished when it ended.
    event: One of `EVENTS`.
    wall_s: Duration of the event, not time since the start.
    tokens_per_s: All replicas' tokens over the duration; NaN where no tokens
      were trained on.
    simulated_s: What the run's clock says since the start; NaN without one.
  """

  step: int
  event: str
  wall_s: float
  tokens_per_s: float
  simulated_s: float = math.nan


_READERS = {
  float: number,
  list[float]: lambda values: [number(value) for value in values],
  list[DriftRow]: lambda values: [
    from_json(DriftRow, value) for value in values
  ],
}


def from_json(kind: type[_Row], row: Mapping[str, Any]) -> _Row:
  """Builds a row from a line's object; null in a float becomes NaN.

  Args:
    kind: `Round`, `Evaluation`, `Timing` or `Drift`.
    row: The object; fields that `kind` has not are skipped.

  Returns:
    The row.
  """
  values = {}
  for field in dataclasses.fields(kind):  # pyright: ignore[reportArgumentType]
    if field.name not in row and field.default is not dataclasses.MISSING:
      continue
    read = _READERS.get(field.type, lambda value: value)
    values[field.name] = read(row[field.name])
  return kind(**values)
