"""Types of the rows of a run, with the names, units and meaning of fields.

The recorder builds these types from the trainer's numbers, and reports read
them again. So every field has one spelling. A reader skips fields that it does
not know, so an older version can read the files of a newer one.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, SupportsFloat, TypeVar

_Row = TypeVar("_Row")

PHASES = ("rounds", "data_parallel", "single")
# Fields of a `DriftRow` that only a low-rank codec fills.
RANK_FIELDS = ("rank", "energy_rank", "stable_rank")
EVENTS = ("round", "compile", "evaluation", "checkpoint")


def float_or_nan(value: SupportsFloat | None) -> float:
  """Returns a Python float; None, which means "not finite", becomes NaN."""
  return math.nan if value is None else float(value)


@dataclasses.dataclass(frozen=True)
class DriftRow:
  """The distances between replicas when a fragment is measured.

  Attributes:
    fragment: Index of the fragment.
    step: Inner step of the measurement.
    cosine: Mean cosine over all pairs of replicas' pseudo-gradients; NaN if it
      has no meaning (one replica, or a zero vector).
    disagreement: Norm of the differences between the pseudo-gradients and
      their mean.
    pseudo_gradient_norm: Norm of the averaged pseudo-gradient.
    rank: Mean rank with which the fragment's matrices were sent; NaN without
      low rank.
    energy_rank: Mean rank that holds a given share of the averaged update's
      energy; NaN without low rank.
    stable_rank: Mean stable rank of the averaged update; NaN without low rank.
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
    loss: Mean loss over the round's steps and the replicas, in nats.
    loss_per_replica: Mean loss over the round's steps, one value per replica.
    grad_norm: Norm of the inner gradient before clipping.
    learning_rate: Learning rate of the inner optimizer at the last step.
    sent_bytes: Bytes that one replica sent in this round.
    total_sent_bytes: Bytes that one replica has sent since the start, also in
      evaluations and in the flush, which belong to no round.
    drift: One entry per fragment that was measured in the round.
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
  """The validation losses of one evaluation, in nats per token.

  Attributes:
    step: Inner steps finished.
    tokens: Tokens seen so far by all replicas together.
    total_sent_bytes: Bytes that one replica has sent since the start.
    outer_loss: Loss of the outer parameters.
    mean_loss: Loss of the mean of the replicas' parameters; NaN where it would
      have had to be sent between processes.
    replica_loss: Loss of replica 0.
    flushed: Whether all pending exchanges had been applied.
    sets: Loss of the outer parameters on each text of `evaluation.sets`.
  """

  step: int
  tokens: int
  total_sent_bytes: int
  outer_loss: float
  mean_loss: float
  replica_loss: float
  flushed: bool
  sets: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Timing:
  """The time that one event took on the wall clock.

  Attributes:
    step: Inner steps finished when the event ended.
    event: One of `EVENTS`.
    wall_s: Duration of the event in seconds, not the time since the start.
    tokens_per_s: Tokens of all replicas divided by the duration; NaN for an
      event that trained on no tokens.
    simulated_s: Seconds since the start on the run's simulated clock; NaN for
      a run without one.
    exposed_s: Seconds of a round in which the replicas had done their inner
      steps and waited for a delayed exchange; NaN where the exchange is part of
      the window's program, which does not tell.
    link_bytes: Bytes that left this process by its throttled link, headers
      included; NaN without such a link.
  """

  step: int
  event: str
  wall_s: float
  tokens_per_s: float = math.nan
  simulated_s: float = math.nan
  exposed_s: float = math.nan
  link_bytes: float = math.nan


# Function that converts a number or JSON value to the type of a field.
_CONVERT = {
  int: int,
  float: float_or_nan,
  str: str,
  bool: bool,
  list[float]: lambda values: [float_or_nan(value) for value in values],
  dict[str, float]: lambda each: {k: float_or_nan(v) for k, v in each.items()},
  list[DriftRow]: lambda rows: [from_json(DriftRow, row) for row in rows],
}


def from_json(kind: type[_Row], row: Mapping[str, Any]) -> _Row:
  """Builds a row from the object of a JSON line, or from a mapping of numbers.

  Args:
    kind: `RoundRow`, `Evaluation`, `Timing` or `DriftRow`.
    row: Values by field; None in a float field becomes NaN. Fields that `kind`
      does not have are skipped.

  Raises:
    KeyError: If a field without a default is missing.
  """
  values = {}
  for field in dataclasses.fields(kind):  # pyright: ignore[reportArgumentType]
    if field.name in row or _has_no_default(field):
      values[field.name] = _CONVERT[field.type](row[field.name])
  return kind(**values)


def _has_no_default(field: dataclasses.Field) -> bool:
  missing = dataclasses.MISSING
  return field.default is missing and field.default_factory is missing
