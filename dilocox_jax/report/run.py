"""Reads a run directory as one object, `LoadedRun`.

The run need not have finished.
"""

import contextlib
import dataclasses
import html
import math
import pathlib
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dilocox_jax.checks import (
  in_front,
  json_file,
  of_type,
  printable,
  require,
  within_limits,
)
from dilocox_jax.metrics.lines import Directory, RecordError, read_rows
from dilocox_jax.metrics.recorder import (
  METRICS,
  TIMING,
  Evaluation,
  RoundRow,
  Timing,
  read_row,
)
from dilocox_jax.metrics.work_directory import CONFIG, RECORD
from dilocox_jax.plan.collectives import MAILBOX
from dilocox_jax.plan.operations import AllReduce
from dilocox_jax.report import units

_Row = typing.TypeVar("_Row", RoundRow, Evaluation, Timing)
# Type of each field of a record.
_RECORD = {
  "bytes_per_token": float | None,
  "chosen_for_device": dict,
  "clock": str,
  "clock_digest": str,
  "command": str | None,
  "corpus_digest": str,
  "corpus_name": str,
  "earlier_starts": list,
  "overrides": list,
  "held_out_digest": str,
  "method": str,
  "num_replicas": int,
  "parameter_count": int,
  "platform": str,
  "source_revision": str | None,
  "versions": dict,
}
# Fields of a record that may be missing, for example in a run without a clock.
_OPTIONAL = {"clock", "clock_digest", "overrides", "held_out_digest"}
_LARGEST = 2**63  # Largest number that a record may have.


@dataclasses.dataclass(frozen=True)
class LoadedRun:
  """Contents of a run directory.

  Iterating over the object yields the rows of `rounds` and `evaluations`,
  sorted by step.

  Attributes:
    workdir: Path of the run directory.
    config: All fields of the config by name, nested by section.
    record: Content of `run.json`: versions, source revision, corpus, method and
      sizes.
    rounds: Rows of training, one for each round or for several data-parallel
      steps, in order.
    evaluations: Rows of validations, in order. If the run has finished, the
      last one is the final validation.
    finished: Whether the run has written its final validation.
    timings: Rows of durations, in order.
  """

  workdir: pathlib.Path
  config: dict[str, Any]
  record: dict[str, Any]
  rounds: list[RoundRow]
  evaluations: list[Evaluation]
  finished: bool
  timings: list[Timing]

  def __iter__(self) -> Iterator[RoundRow | Evaluation]:
    """Returns an iterator over the rows of rounds and evaluations, by step."""
    rows = [*self.rounds, *self.evaluations]
    return iter(sorted(rows, key=lambda row: row.step))

  def __repr__(self) -> str:
    """Describes the run on one line."""
    return f"LoadedRun({self.summary})"

  def _repr_html_(self) -> str:
    """Returns the outcome as an HTML table, which notebooks show."""
    rows = (
      f"<tr><th>{name}</th><td>{html.escape(printable(text))}</td></tr>"
      for name, text in self._outcome.items()
    )
    return f"<table>{''.join(rows)}</table>"

  @property
  def summary(self) -> str:
    """Method, steps, loss, bytes and directory, on one line."""
    outcome = self._outcome
    text = (
      f"{outcome['method']}, {outcome['steps']} steps, loss {outcome['loss']}, "
      f"{outcome['sent bytes']} sent, {outcome['directory']}"
    )
    return printable(text)

  @property
  def _outcome(self) -> dict[str, str]:
    """Texts of method, steps, loss, bytes and directory."""
    method = self.record["method"]
    if not self.finished:
      method += " (not finished)"
    loss = "none yet"
    if self.evaluations:
      loss = units.human_loss(self.validation_loss)
    return {
      "method": method,
      "steps": f"{self.steps:,}",
      "loss": loss,
      "sent bytes": units.human_bytes(self.total_sent_bytes),
      "directory": str(self.workdir),
    }

  @property
  def fp32_bytes(self) -> float:
    """Bytes that a replica would have sent by AllReduce of fp32 gradients.

    All steps so far count, with one AllReduce in every step.
    """
    gradients = AllReduce(4 * self.record["parameter_count"])
    return self.steps * gradients.sent_bytes(self.record["num_replicas"])

  @property
  def result(self) -> Evaluation | None:
    """The last validation; None before the first validation."""
    return self.evaluations[-1] if self.evaluations else None

  @property
  def validation_loss(self) -> float:
    """Last validation loss (nats a token); NaN before the first validation.

    It is that of the outer parameters, or of their average if the run keeps
    one.
    """
    return self.result.outer_loss if self.result else math.nan

  @property
  def bits_per_byte(self) -> float:
    """Last validation loss in bits a byte, comparable between tokenizers.

    The result is NaN before the first validation, and if the record does not
    say how many bytes a token has.
    """
    bytes_per_token = self.record.get("bytes_per_token") or math.nan
    return self.validation_loss / math.log(2) / bytes_per_token

  @property
  def perplexity(self) -> float:
    """Exponential of the last validation loss; infinite for a loss above 700.

    It is NaN before the first validation.
    """
    if self.validation_loss > 700:
      return math.inf  # The exponential would overflow.
    return math.exp(self.validation_loss)

  @property
  def clock(self) -> str:
    """Name of the simulated cluster, e.g. "cluster 1gbit".

    Without a recorded name, it is "the given cluster".
    """
    return self.record.get("clock", "the given cluster")

  @property
  def total_sent_bytes(self) -> int:
    """Bytes that one replica has sent so far."""
    return _furthest(self, "total_sent_bytes")

  @property
  def steps(self) -> int:
    """Number of inner steps that are finished."""
    return _furthest(self, "step")

  @property
  def tokens(self) -> int:
    """Tokens that all replicas have seen.

    With a mailbox (exchanges through files in a store) only the tokens of this
    replica count.
    """
    return _furthest(self, "tokens")

  @property
  def uses_mailbox(self) -> bool:
    """Whether the run is a single replica that exchanges through a mailbox.

    A mailbox is files in a store that all replicas can read and write.
    """
    return self.config.get("exchange", {}).get("collective") == MAILBOX

  @property
  def counted_replicas(self) -> str:
    """Whose tokens are counted: "all replicas", or "this replica"."""
    return "this replica" if self.uses_mailbox else "all replicas"

  @property
  def wall_s(self) -> float:
    """Sum of all measured durations (s): of rounds, evaluations and so on."""
    return math.fsum(timing.wall_s for timing in self.timings)

  @property
  def tokens_per_s(self) -> float:
    """Tokens a second, over the duration of all rounds; NaN without rounds."""
    rounds = [
      timing for timing in self.timings if math.isfinite(timing.tokens_per_s)
    ]
    total_s = math.fsum(timing.wall_s for timing in rounds)
    if not total_s:
      return math.nan
    tokens = math.fsum(timing.wall_s * timing.tokens_per_s for timing in rounds)
    return tokens / total_s

  @property
  def simulated_s(self) -> dict[int, float]:
    """Simulated time (s) of each evaluation, by step; empty without a clock."""
    return {
      timing.step: timing.simulated_s
      for timing in self.timings
      if timing.event == "evaluation" and math.isfinite(timing.simulated_s)
    }

  @property
  def corpus(self) -> str:
    """Name and digests of the text. Equal digests make losses comparable."""
    held_out = self.record.get("held_out_digest", "unknown windows")
    digest = self.record["corpus_digest"]
    return f"{self.record['corpus_name']} ({digest}, evaluated on {held_out})"


def _furthest(run: LoadedRun, field: str) -> int:
  """Returns the last value of a field that grows during a run; 0 without rows.

  Both rounds and evaluations have the field.
  """
  last_rows = [*run.rounds[-1:], *run.evaluations[-1:]]
  return max((getattr(row, field) for row in last_rows), default=0)


def load_run(workdir: Directory) -> LoadedRun:
  """Reads a run directory.

  Args:
    workdir: Directory that a trainer wrote.

  Returns:
    The run. A list is empty if there are no rows of its kind yet.

  Raises:
    ValueError: If the directory is not a run directory, or if one of its files
      cannot be read or is damaged. The message is one line.
  """
  workdir = pathlib.Path(workdir)
  config = _read_object(workdir / CONFIG)
  record = _read_object(workdir / RECORD)
  with in_front(f"{workdir / RECORD} is damaged: "):
    _check_record(record)
  with in_front(f"{workdir / CONFIG} is damaged: "):
    of_type("seed", config.get("seed", 0), int)
    of_type("outer", config.get("outer", {}), dict)
    of_type("exchange", config.get("exchange", {}), dict)
  try:
    rows = read_rows(workdir / METRICS)
    timings = read_rows(workdir / TIMING)
  except RecordError as error:
    raise ValueError(str(error)) from error
  rounds = [row for row in rows if row.get("kind") == "round"]
  evaluations = [
    row for row in rows if row.get("kind") in ("evaluation", "final")
  ]
  return LoadedRun(
    workdir=workdir,
    config=config,
    record=record,
    rounds=_typed(workdir / METRICS, RoundRow, rounds),
    evaluations=_typed(workdir / METRICS, Evaluation, evaluations),
    finished=any(row["kind"] == "final" for row in evaluations),
    timings=_typed(workdir / TIMING, Timing, timings),
  )


def _read_object(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object; raises ValueError for a missing or damaged file."""
  is_missing = False
  # If the system refuses even to look, `json_file` says why.
  with contextlib.suppress(OSError):
    is_missing = not path.exists()
  require(
    not is_missing,
    f"{path.parent} is not a run directory: {path.name} is missing",
  )
  return json_file(path)


def _check_record(record: Mapping[str, Any]) -> None:
  """Raises ValueError unless run.json has the fields that reports read."""
  for name, kind in _RECORD.items():
    if name in _OPTIONAL and name not in record:
      continue
    require(name in record, f"it has no {name}")
    of_type(name, record[name], kind)
  for name in ("num_replicas", "parameter_count"):
    within_limits(name, record[name], at_least=1, at_most=_LARGEST)
  if record["bytes_per_token"] is not None:
    within_limits("bytes_per_token", record["bytes_per_token"], above=0)
  for name, version in record["versions"].items():
    of_type(f"versions.{name}", version, str)
  for number, name in enumerate(record.get("overrides", ())):
    of_type(f"overrides[{number}]", name, str)


def _typed(
  path: pathlib.Path, kind: type[_Row], rows: Iterable[Mapping[str, Any]]
) -> list[_Row]:
  """Converts JSON objects to rows of a type.

  Raises:
    ValueError: If a row of the file `path` is damaged.
  """
  with in_front(f"{path} has a damaged row, which is no {kind.__name__}: "):
    return [read_row(kind, row) for row in rows]
