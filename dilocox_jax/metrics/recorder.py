"""Defines the rows of `metrics.jsonl` and `timing.jsonl`, and writes them.

- `metrics.jsonl` has losses, norms and sent bytes. A run that was killed and
  resumed writes the same bytes into it as one that was never killed (except
  with `exchange.collective` = "mailbox"). For this, the rows up to a step must
  be recorded before the checkpoint of that step is saved.
- `timing.jsonl` has durations, which depend on the machine.

A reader skips fields that it does not know, so an older version can read the
files of a newer one.
"""

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any, SupportsFloat, TypeVar

from dilocox_jax.checks import of_type, require, within_limits
from dilocox_jax.metrics import lines
from dilocox_jax.metrics.run_logs import RunLog

METRICS = "metrics.jsonl"
TIMING = "timing.jsonl"
# Written by runs with a mailbox: the replicas in the mean of each exchange.
MAILBOX_LOG = "mailbox.jsonl"
_LARGEST = 2**63  # Largest count in a row. A damaged row may have a larger one.
_Row = TypeVar("_Row")


def float_or_nan(value: SupportsFloat | None) -> float:
  """Converts a number to a Python float, and None to NaN."""
  return math.nan if value is None else float(value)


@dataclasses.dataclass(frozen=True)
class DriftRow:
  """Measurements of one exchange, e.g. how much pseudo-gradients differ.

  Attributes:
    fragment: Index of the fragment, a part of the parameters.
    step: Inner step after which the pseudo-gradients were measured.
    cosine: Mean cosine over all pairs of replicas' pseudo-gradients, weighted
      by the product of their norms. NaN if fewer than two pseudo-gradients are
      finite and not zero, or if `exchange.collective` is "pairs" or "mailbox".
    disagreement: Distance of a replica's pseudo-gradient from the mean: root
      mean square over the replicas. With "mailbox", it is the distance of the
      replica that writes the row.
    pseudo_gradient_norm: Norm of the averaged pseudo-gradient. With "pairs",
      each replica has its own mean, and this is the root mean square of the
      norms of the means.
    rank: Mean rank with which the fragment's matrices were sent; NaN without a
      low-rank codec.
    energy_rank: How many singular values of an averaged update hold the share
      `adaptive.energy` of its squared norm: mean over the fragment's matrices.
      NaN without a low-rank codec.
    observed: Values that a user's aggregator has recorded, by name.
  """

  fragment: int
  step: int
  cosine: float
  disagreement: float
  pseudo_gradient_norm: float
  rank: float = math.nan
  energy_rank: float = math.nan
  observed: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RoundRow:
  """The metrics of one segment: a round, or several data-parallel steps.

  If `exchange.collective` is "mailbox", "replicas" below means only the replica
  that writes the row.

  Attributes:
    step: Finished inner steps of the run at the end of the segment.
    tokens: Tokens seen so far by all replicas together.
    phase: "rounds" or "data_parallel".
    loss: Mean loss over the segment's steps and the replicas. It is in nats,
      except for a user's own loss.
    loss_per_replica: Mean loss of each replica over the segment's steps; NaN
      for a replica that took no steps.
    grad_norm: Norm of the inner gradient before clipping, mean over the
      segment's steps and the replicas. In data-parallel steps it is the norm of
      the mean gradient.
    learning_rate: Learning rate of the inner optimizer at the last step.
    sent_bytes: Bytes that one replica sent in this segment.
    total_sent_bytes: Bytes that one replica has sent since the start, including
      those that were sent for evaluations.
    drift: One entry for each exchange whose mean was applied in the segment.
      An exchange to which no replica contributed has no entry.
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

  A user's own loss may have another unit. If `exchange.collective` is
  "mailbox", "all replicas" and "replica 0" below mean only the replica that
  writes the row.

  Attributes:
    step: Finished inner steps of the run.
    tokens: Tokens seen so far by all replicas together.
    total_sent_bytes: Bytes that one replica has sent since the start.
    outer_loss: Loss of the outer parameters. In data-parallel steps, these are
      the parameters that all replicas share. If each replica has its own outer
      parameters, this is the loss of their mean. If the run keeps a running
      average of the parameters, this is the loss of the average.
    mean_loss: Loss of the mean of the replicas' parameters; NaN during rounds
      if there are several processes.
    replica_loss: Loss of the parameters of replica 0.
    flushed: Whether this is the last evaluation of the run. All pending
      exchanges were applied before it.
    judge_loss: Like `outer_loss`, on the judge text: held-out files that are
      never used to choose a setting. NaN except in the last evaluation of a
      run that has such a text.
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

  The durations of all events add up to the training time of the run.

  Attributes:
    step: Finished inner steps of the run when the event ended.
    event: Name of the event:

      - "compile": JAX compiled programs for the event of the next row.
      - "round": a round of training, or several data-parallel steps.
      - "evaluation": validation losses were computed.
      - "checkpoint": a save was started. The time ends when the run goes on,
        which may be before the save ends.
      - "flush": the updates still in flight after the last step were applied.
      - "catch_up": a replica with a mailbox (a folder or bucket for messages)
        took over what the others had done without it.
    wall_s: Duration of the event in seconds, not the time since the start. A
      round ends when the devices have computed its results.
    tokens_per_s: Tokens of all replicas (with a mailbox: of the replica that
      writes the row) divided by the duration; NaN for an event that trained on
      no tokens.
    simulated_s: Seconds since the start on the run's simulated clock. NaN for
      a run without such a clock, and for events other than rounds and
      evaluations.
    exposed_s: Seconds of a round in which the replicas had done their inner
      steps and waited for a delayed exchange. NaN for other events. NaN also if
      one compiled program contains both steps and exchange, because the time
      cannot be measured then.
    link_bytes: Bytes that left this process through its throttled link during
      the event, headers included; NaN without such a link.
  """

  step: int
  event: str
  wall_s: float
  tokens_per_s: float = math.nan
  simulated_s: float = math.nan
  exposed_s: float = math.nan
  link_bytes: float = math.nan


# Functions that convert a number or a JSON value to the type of a field.
_CONVERT = {
  int: int,
  float: float_or_nan,
  str: str,
  bool: bool,
  dict: dict,
  list[float]: lambda values: [float_or_nan(value) for value in values],
  list[DriftRow]: lambda rows: [from_json(DriftRow, row) for row in rows],
}


def from_json(kind: type[_Row], row: Mapping[str, Any]) -> _Row:
  """Builds a row from the object of a JSON line, or from a mapping of numbers.

  Args:
    kind: `RoundRow`, `Evaluation`, `Timing` or `DriftRow`.
    row: Values by field. None in a float field becomes NaN. Fields that `kind`
      does not have are skipped.

  Raises:
    KeyError: If a field without a default is missing.
    TypeError, ValueError: If a value cannot be converted to the type of its
      field. For example, None in an int field raises TypeError, and a text that
      is not a number raises ValueError.
  """
  values: dict[str, Any] = {}
  for field in dataclasses.fields(kind):  # pyright: ignore[reportArgumentType]
    # A missing field without a default raises KeyError here.
    if field.name in row or _has_no_default(field):
      values[field.name] = _CONVERT[field.type](row[field.name])  # pyright: ignore
  return kind(**values)


def read_row(kind: type[_Row], row: Mapping[str, Any]) -> _Row:
  """Checks and builds a row from the object of a line that may be damaged.

  Args:
    kind: `RoundRow`, `Evaluation`, `Timing` or `DriftRow`.
    row: The object, as `json.loads` returns it. Fields that `kind` does not
      have are skipped.

  Raises:
    ValueError: One line, if a field without a default is missing, if a value
      has the wrong type, if a count, a time or a number of bytes is negative,
      or if a count is above 2^63.
  """
  for field in dataclasses.fields(kind):  # pyright: ignore[reportArgumentType]
    if field.name in row:
      _check(field.type, field.name, row[field.name])
    else:
      has_default = not _has_no_default(field)
      require(has_default, f"the field {field.name!r} is missing")
  return from_json(kind, row)


def _check(kind: Any, name: str, value: Any) -> None:
  """Raises ValueError if a value is not allowed in a field of type `kind`."""
  if typing.get_origin(kind) is list:
    (item_kind,) = typing.get_args(kind)
    for item in of_type(name, value, list):
      _check(item_kind, name, item)
  elif kind is DriftRow:
    read_row(DriftRow, of_type(name, value, dict))
  elif kind is float:
    value = of_type(name, value, float | None)
    # A user's loss may be below 0. Seconds and bytes may not.
    if value is not None and name.endswith(("_s", "_bytes")):
      within_limits(name, value, at_least=0)
  else:
    of_type(name, value, kind)
    if kind is int:
      within_limits(name, value, at_least=0, at_most=_LARGEST)


def _has_no_default(field: dataclasses.Field) -> bool:
  """Returns whether a field of a dataclass has no default value."""
  missing = dataclasses.MISSING
  return field.default is missing and field.default_factory is missing


class Recorder:
  """Writes the rows of one run, and passes them to the run's log."""

  def __init__(
    self,
    workdir: lines.Directory | None,
    resume_step: int | None = None,
    log: RunLog | None = None,
  ):
    """Opens the files and cuts the rows that a restored run writes again.

    Args:
      workdir: Run directory; created if missing. None, as in all processes but
        the first: nothing is written.
      resume_step: Inner step of the restored checkpoint. None: a new run, which
        cuts all rows.
      log: An open log, which also gets every row that is written to a file;
        None: no log.

    Raises:
      RecordError: If the directory or a file cannot be read or written.
    """
    self._files: dict[str, lines.JsonLines] = {}
    self._log = log
    if workdir is not None:
      workdir = lines.make_directory(workdir)
      # Rows of later steps are cut. With -1 these are all rows.
      last_step = -1 if resume_step is None else resume_step
      for name in (METRICS, TIMING):
        self._files[name] = lines.JsonLines(workdir / name, last_step)

  def _append(self, name: str, row: Mapping[str, Any]) -> None:
    """Appends a row to a file and passes it to the log, if this process writes.

    `name` is `METRICS` or `TIMING`.
    """
    if name not in self._files:
      return
    self._files[name].append(row)
    if self._log:
      self._log.write(lines.plain(row))

  def record_round(self, **fields: Any) -> None:
    """Records the metrics of a round, or of several data-parallel steps.

    Args:
      **fields: Fields of `RoundRow`, as Python, numpy or JAX numbers; `drift`
        is a sequence of mappings with the fields of `DriftRow`.
    """
    row = dataclasses.asdict(from_json(RoundRow, fields))
    self._append(METRICS, {"kind": "round", **row})

  def record_evaluation(
    self, *, num_steps: int | None = None, **fields: Any
  ) -> None:
    """Records the validation losses of one evaluation.

    Args:
      num_steps: Number of inner steps of the run, if this is the evaluation
        after the last exchanges (a row of kind "final"). None: the run goes on.
      **fields: Fields of `Evaluation` without `flushed`.
    """
    fields["flushed"] = num_steps is not None
    row = dataclasses.asdict(from_json(Evaluation, fields))
    if math.isnan(row["judge_loss"]):
      del row["judge_loss"]  # Most rows have no judge loss.
    kind: dict[str, Any] = {"kind": "evaluation"}
    if num_steps is not None:
      kind = {"kind": "final", "num_steps": int(num_steps)}
    self._append(METRICS, kind | row)

  def record_timing(self, **fields: Any) -> None:
    """Records the time that an event took. Events must not overlap in time.

    Args:
      **fields: Fields of `Timing`. Fields without a value may be None.
    """
    row = dataclasses.asdict(from_json(Timing, fields))
    # A run without a clock or a throttled link does not write columns of NaN.
    for name in ("simulated_s", "exposed_s", "link_bytes"):
      if math.isnan(row[name]):
        del row[name]
    self._append(TIMING, {"kind": "timing", **row})
