# pyright: reportAttributeAccessIssue=false
# Classes of protocol buffers are made at import, so pyright cannot see them.
"""Records the numbers of a run; the trainer writes them through one object.

There are two files. Rows of `metrics.jsonl` depend on seed and config alone. A
run that was killed and resumed must write the same bytes as one that was not.
For that the trainer must record every row up to a step before it saves a
checkpoint of that step. Rows of `timing.jsonl` depend on the machine, so they
differ between two runs. TensorBoard gets the values of both.

The recorder builds the types of rows from the trainer's numbers, and reports
read them again. So every field has one spelling. A reader skips fields that it
does not know, so an older version can read the files of a newer one.
"""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Mapping
from typing import Any, SupportsFloat, TypeVar

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dilocox_jax.checks import one_of
from dilocox_jax.metrics import lines

METRICS, TIMING = "metrics.jsonl", "timing.jsonl"
MEETING = "meeting.jsonl"  # Who was there, if replicas meet in a store.
_Row = TypeVar("_Row")

PHASES = ("rounds", "data_parallel")
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
    judge_loss: Loss of the outer parameters on the text that judges; NaN but
      after the last step of a run that has one.
  """

  step: int
  tokens: int
  total_sent_bytes: int
  outer_loss: float
  mean_loss: float
  replica_loss: float
  flushed: bool
  judge_loss: float = math.nan


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


class TensorBoardWriter:
  """Writes scalars with TensorBoard's own writer, without TensorFlow.

  An event file cannot be cut like a JSON-lines file, because a reader may have
  it open. A restarted run begins a new file that says from which step on it
  replaces older events. TensorBoard then hides those.
  """

  def __init__(self, directory: lines.Directory, first_step: int = 0):
    """Starts an event file.

    Args:
      directory: Directory of event files; created if missing.
      first_step: TensorBoard hides older events of this step and later steps.
    """
    self._directory = os.fspath(directory)
    with lines.one_line(directory):
      self._writer = EventFileWriter(self._directory, flush_secs=10)
    log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._add(event_pb2.Event(step=first_step, session_log=log))

  def _add(self, event: event_pb2.Event) -> None:
    event.wall_time = time.time()
    with lines.one_line(self._directory):
      self._writer.add_event(event)

  def scalars(self, step: int, values: Mapping[str, float | int]) -> None:
    """Adds one event of a step, without values that are not finite."""
    summary = summary_pb2.Summary()
    for tag, value in values.items():
      if math.isfinite(value):
        summary.value.add(tag=tag, simple_value=value)
    self._add(event_pb2.Event(step=step, summary=summary))

  def close(self) -> None:
    """Writes queued events and closes the file."""
    with lines.one_line(self._directory):
      self._writer.close()


class Recorder(contextlib.AbstractContextManager["Recorder"]):
  """Writes the rows of one run. It is a context manager."""

  def __init__(self, workdir: lines.Directory, resume_step: int | None = None):
    """Opens the files and cuts the rows that a restored run writes again.

    Args:
      workdir: Run directory; created if missing.
      resume_step: Inner step of the restored checkpoint. None starts a new run
        and cuts all rows. There are some if a run was killed before its first
        checkpoint.
    """
    workdir = lines.make_directory(workdir)
    last_step = -1 if resume_step is None else resume_step
    self._metrics = lines.JsonLines(workdir / METRICS, last_step)
    self._timing = lines.JsonLines(workdir / TIMING, last_step)
    self._board = TensorBoardWriter(workdir / "tensorboard", last_step + 1)

  def record_round(self, **fields: Any) -> None:
    """Records a finished round.

    Args:
      **fields: Fields of `RoundRow`, as Python, numpy or JAX numbers.
        `drift` is a sequence of mappings with the fields of `DriftRow`.
    """
    row = from_json(RoundRow, fields)
    one_of("phase", row.phase, PHASES)
    self._metrics.append({"kind": "round", **dataclasses.asdict(row)})
    self._board.scalars(row.step, _round_scalars(row))

  def record_evaluation(
    self, *, num_steps: int | None = None, **fields: Any
  ) -> None:
    """Records the validation losses of one evaluation.

    Args:
      num_steps: Inner steps that the run was asked for. Given for the closing
        row only, which is recorded after the flush.
      **fields: Fields of `Evaluation` without `flushed`.
    """
    fields["flushed"] = num_steps is not None
    row = from_json(Evaluation, fields)
    kind: dict[str, Any] = {"kind": "evaluation"}
    if num_steps is not None:
      kind = {"kind": "final", "num_steps": int(num_steps)}
    fields_of_row = dataclasses.asdict(row)
    if math.isnan(row.judge_loss):  # Most runs have no such column.
      del fields_of_row["judge_loss"]
    self._metrics.append(kind | fields_of_row)
    losses = ("outer_loss", "mean_loss", "replica_loss", "judge_loss")
    values = {f"validation/{name}": getattr(row, name) for name in losses}
    self._board.scalars(row.step, values)

  def record_timing(self, **fields: Any) -> None:
    """Records the time of an event; events must not overlap in time.

    Args:
      **fields: Fields of `Timing`. Those without a value may be None.
    """
    row = from_json(Timing, fields)
    one_of("event", row.event, EVENTS)
    values = dataclasses.asdict(row)
    # Runs without a clock or a throttled link have no columns of NaN.
    for name in ("simulated_s", "exposed_s", "link_bytes"):
      if math.isnan(values[name]):
        del values[name]
    self._timing.append(values)
    if row.event == "round":
      self._board.scalars(row.step, {"time/tokens_per_s": row.tokens_per_s})

  def __exit__(self, *exception: object) -> None:
    """Writes queued TensorBoard events, also after an exception."""
    self._board.close()


class SilentRecorder(Recorder):
  """A recorder that writes nothing, for all processes but the first."""

  def __init__(self):
    """Opens nothing."""

  def _ignore(self, **fields: Any) -> None:
    """Ignores a row."""

  record_round = record_evaluation = record_timing = _ignore

  def __exit__(self, *exception: object) -> None:
    """Does nothing, because nothing is open."""


def _round_scalars(row: RoundRow) -> dict[str, float | int]:
  groups = {
    "train": ("loss", "grad_norm", "learning_rate"),
    "wire": ("sent_bytes", "total_sent_bytes"),
  }
  values = {
    f"{group}/{name}": getattr(row, name)
    for group, names in groups.items()
    for name in names
  }
  groups = {"drift": ("cosine", "disagreement"), "rank": RANK_FIELDS}
  for entry in row.drift:
    for group, names in groups.items():
      for name in names:
        tag = f"{group}/{name}/fragment_{entry.fragment}"
        values[tag] = getattr(entry, name)
  return values
