"""Reads a run directory back as one value.

Figures, page and comparison all start from this value. A run that has not
finished or was killed can be read too: its lists are shorter, and `finished`
is False.
"""

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
from dilocox_jax.plan.operations import AllReduce
from dilocox_jax.report import units

_Row = typing.TypeVar("_Row", RoundRow, Evaluation, Timing)
# What a record holds, by field.
_RECORD = {
  "bytes_per_token": float | None,
  "chosen_for_device": dict,
  "clock": str,
  "clock_digest": str,
  "command": str | None,
  "corpus_digest": str,
  "corpus_name": str,
  "earlier_starts": list,
  "handed_in": list,
  "held_out_digest": str,
  "method": str,
  "num_replicas": int,
  "parameter_count": int,
  "platform": str,
  "source_revision": str | None,
  "versions": dict,
}
# What runs without a clock, or with their own parts alone, leave out.
_OPTIONAL = {"clock", "clock_digest", "handed_in", "held_out_digest"}
_LARGEST = 2**63  # Of a count; floats have all smaller ones in their range.


@dataclasses.dataclass(frozen=True)
class LoadedRun:
  """Contents of a run directory. `list(run)` has its rows.

  Attributes:
    workdir: Path of the run directory.
    config: All fields of the config, nested by section.
    record: Versions, source revision, corpus, method and sizes.
    rounds: Rows of training rounds, in order.
    evaluations: Rows of validations, in order; the final one is last.
    finished: Whether the run wrote its final row.
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
    """Goes through the rows of rounds and evaluations, by step."""
    rows = [*self.rounds, *self.evaluations]
    return iter(sorted(rows, key=lambda row: row.step))

  def __repr__(self) -> str:
    """Says on one line what was trained and where."""
    return f"LoadedRun({self.summary})"

  def _repr_html_(self) -> str:
    """Shows the outcome as a table in a notebook."""
    rows = (
      f"<tr><th>{name}</th><td>{html.escape(printable(text))}</td></tr>"
      for name, text in self._outcome.items()
    )
    return f"<table>{''.join(rows)}</table>"

  @property
  def summary(self) -> str:
    """Method, steps, loss, bytes and directory, on one line."""
    method, steps, loss, sent, place = self._outcome.values()
    text = f"{method}, {steps} steps, loss {loss}, {sent} sent, {place}"
    return printable(text)

  @property
  def _outcome(self) -> dict[str, str]:
    loss = units.human_loss(self.validation_loss)
    return {
      "method": self.record["method"]
      + ("" if self.finished else " (not finished)"),
      "steps": f"{self.steps:,}",
      "loss": loss if self.evaluations else "none yet",
      "sent bytes": units.human_bytes(self.total_sent_bytes),
      "directory": str(self.workdir),
    }

  @property
  def fp32_bytes(self) -> float:
    """What a replica would have sent as fp32 gradients in every step."""
    gradients = AllReduce(4 * self.record["parameter_count"])
    return self.steps * gradients.sent_bytes(self.record["num_replicas"])

  @property
  def result(self) -> Evaluation | None:
    """Last validation, or None before the first."""
    return self.evaluations[-1] if self.evaluations else None

  @property
  def validation_loss(self) -> float:
    """Last validation loss of the outer parameters; NaN before the first."""
    return self.result.outer_loss if self.result else math.nan

  @property
  def bits_per_byte(self) -> float:
    """Last validation loss in bits a byte, which tokenizers do not change.

    NaN if the text has no bytes, or the run does not say how many.
    """
    size = self.record.get("bytes_per_token") or math.nan
    return self.validation_loss / math.log(2) / size

  @property
  def perplexity(self) -> float:
    """Exponential of the last validation loss; depends on the tokenizer."""
    loss = self.validation_loss
    return math.exp(loss) if not loss > 700 else math.inf  # It overflows.

  @property
  def clock(self) -> str:
    """What simulated time is that of, e.g. "cluster 1gbit"."""
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
    """Tokens that all replicas together have seen."""
    return _furthest(self, "tokens")

  @property
  def wall_s(self) -> float:
    """Sum of all durations (s)."""
    return math.fsum(timing.wall_s for timing in self.timings)

  @property
  def tokens_per_s(self) -> float:
    """Tokens per second over the duration of all rounds; NaN without any."""
    done = [t for t in self.timings if math.isfinite(t.tokens_per_s)]
    spent_s = math.fsum(t.wall_s for t in done)
    tokens = math.fsum(t.wall_s * t.tokens_per_s for t in done)
    return tokens / spent_s if spent_s else math.nan

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
    """Name and digests of the text; losses compare only where it is equal."""
    held_out = self.record.get("held_out_digest", "unknown windows")
    digest = self.record["corpus_digest"]
    return f"{self.record['corpus_name']} ({digest}, evaluated on {held_out})"


def _furthest(run: LoadedRun, field: str) -> int:
  # Rounds and evaluations both count up, and either may be ahead of the other.
  last = [*run.rounds[-1:], *run.evaluations[-1:]]
  return max((getattr(row, field) for row in last), default=0)


def load_run(workdir: Directory) -> LoadedRun:
  """Reads a run directory.

  Args:
    workdir: Directory that a trainer wrote.

  Returns:
    The run. Kinds of rows that do not exist yet are empty lists.

  Raises:
    ValueError: If the directory is no run directory, or a file of it cannot be
      read or is damaged. The message is one line.
  """
  workdir = pathlib.Path(workdir)
  config = _read_object(workdir / CONFIG)
  record = _read_object(workdir / RECORD)
  with in_front(f"{workdir / RECORD} is damaged: "):
    _check_record(record)
  with in_front(f"{workdir / CONFIG} is damaged: "):
    of_type("seed", config.get("seed", 0), int)
    of_type("outer", config.get("outer", {}), dict)
  try:
    rows = read_rows(workdir / METRICS)
    timings = read_rows(workdir / TIMING)
  except RecordError as error:
    raise ValueError(str(error)) from error
  rounds = [r for r in rows if r.get("kind") == "round"]
  evaluations = [r for r in rows if r.get("kind") in ("evaluation", "final")]
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
  require(
    path.exists(),
    f"{path.parent} is not a run directory: {path.name} is missing",
  )
  return json_file(path)


def _check_record(record: Mapping[str, Any]) -> None:
  """Raises ValueError unless a record has what a report needs of it."""
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
  for number, part in enumerate(record.get("handed_in", ())):
    of_type(f"handed_in[{number}]", part, str)


def _typed(
  path: pathlib.Path, kind: type[_Row], rows: Iterable[Mapping[str, Any]]
) -> list[_Row]:
  with in_front(f"{path} has a damaged row, which is no {kind.__name__}: "):
    return [read_row(kind, row) for row in rows]
