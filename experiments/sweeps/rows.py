"""Finished runs of a sweep, in CSV files that other programs read.

A finished run is one line of NAME.csv, and each of its evaluations is a line of
NAME_curves.csv. Both are written when the run has ended. A run of a sweep is
not trained again if a line has the same digest of the config and the same
digest of the text.
"""

import collections
import csv
import dataclasses
import io
import itertools
import json
import math
import pathlib
import typing
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from dilocox_jax.checks import json_object, require, shown
from dilocox_jax.metrics.lines import (
  RecordError,
  make_directory,
  one_line,
  write_atomically,
)
from dilocox_jax.report.run import LoadedRun
from dilocox_jax.report.tables import csv_table
from experiments.sweeps.runs import SweepRun, text_of


@dataclasses.dataclass(frozen=True)
class RunRow:
  """A finished run: one line of NAME.csv.

  Attributes:
    name: Name of the setting.
    seed: Seed of the run.
    digest: Digest of the config (`SweepRun.digest`).
    corpus: Digest of the text that the run read.
    overrides: Values that make the config (`SweepRun.overrides`), as a JSON
      object.
    total_steps: Number of inner steps.
    tokens: Number of tokens that all replicas together were trained on.
    sent_bytes: Bytes that one replica sent, flush included.
    loss: Loss after the flush (nats a token) of the outer parameters, or of
      their average if the run keeps one; NaN if the run diverged.
    mean_loss: Loss of the mean of the replicas' parameters after the flush
      (nats a token); NaN if the run diverged.
    best_loss: Lowest loss over all evaluations (nats a token), of the same
      parameters as `loss`; NaN if there was no evaluation.
    judge_loss: Loss after the flush on the judge text (nats a token), of the
      same parameters as `loss`. No setting is chosen by this text. NaN if the
      run diverged or had no such text.
    wall_s: Wall time of the run (seconds).
    platform: Backend and devices of JAX.
    python: Version of Python.
    jax: Version of JAX.
    revision: Commit of the source code that the run used; empty if unknown.
    cores: Number of CPU cores that the run could use; 0 if unknown.
    failure: Why the run diverged, in one line; empty if it did not.
  """

  name: str
  seed: int
  digest: str
  corpus: str
  overrides: str
  total_steps: int
  tokens: int
  sent_bytes: int
  loss: float
  mean_loss: float
  best_loss: float
  judge_loss: float
  wall_s: float
  platform: str
  python: str
  jax: str
  revision: str
  cores: int
  failure: str


@dataclasses.dataclass(frozen=True)
class CurveRow:
  """One evaluation of a finished run: one line of NAME_curves.csv.

  Attributes:
    digest: Digest of the run's config, as in its `RunRow`.
    corpus: Digest of the text, as in its `RunRow`.
    step: Number of inner steps before the evaluation.
    tokens: Tokens that all replicas together had seen.
    sent_bytes: Bytes that one replica had sent.
    loss: Validation loss (nats a token) of the outer parameters, or of their
      average if the run keeps one.
    flushed: Whether this is the last evaluation, after the flush.
  """

  digest: str
  corpus: str
  step: int
  tokens: int
  sent_bytes: int
  loss: float
  flushed: bool


RowType = typing.TypeVar("RowType", RunRow, CurveRow)


class Rows:
  """The two files of a sweep's finished runs, and their content.

  Attributes:
    path: Path of NAME.csv, to which `add` writes. NAME_curves.csv is beside it.
    source: Path of the file that has the present content: `path`, or `start`
      until the first run is added.
    runs: Lines of NAME.csv in their order, by digest of the config and digest
      of the text.
  """

  def __init__(self, path: pathlib.Path, start: pathlib.Path | None = None):
    """Reads the files. A file that does not exist counts as empty.

    Args:
      path: Path of NAME.csv.
      start: Another NAME.csv, which is read if `path` does not exist. The first
        `add` copies its runs and their curves to `path`. None: a new sweep
        begins without runs.

    Raises:
      RecordError: If a file cannot be read, is damaged or has other columns, or
        has two lines of the same run.
    """
    self.path = path
    self.source = start if start and not path.exists() else path
    self.runs: dict[tuple[str, str], RunRow] = {}
    for row in _read(self.source, RunRow):
      key = row.digest, row.corpus
      if key in self.runs:
        raise RecordError(
          f"{self.source} is damaged: it has two lines of {row.name!r}, seed "
          f"{row.seed}, on the text {row.corpus}"
        )
      self.runs[key] = row
    self._curves: dict[tuple[str, str], list[CurveRow]] = {}
    for point in _read(_curves_path(self.source), CurveRow):
      key = point.digest, point.corpus
      # If the process was killed between the writes of the two files, there is
      # a curve without a line of its run.
      if key in self.runs:
        self._curves.setdefault(key, []).append(point)

  @property
  def settings(self) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and overrides of each finished run, as `runs.runs_of` takes them.

    A run with lines on several texts is listed once, with the name and the
    overrides of the last of these lines.

    Raises:
      RecordError: If the overrides of a line are no JSON object.
    """
    by_digest = {row.digest: row for row in self.runs.values()}
    try:
      return [
        (row.name, json_object(row.overrides, f"overrides of {row.name!r}"))
        for row in by_digest.values()
      ]
    except ValueError as error:
      raise RecordError(f"{self.source} is damaged: {error}") from error

  def curve(self, row: RunRow) -> list[CurveRow]:
    """Returns the evaluations of a finished run, in order.

    Args:
      row: The line of the run.

    Returns:
      The lines of its curve; empty if NAME_curves.csv has none.
    """
    return list(self._curves.get((row.digest, row.corpus), ()))

  def row(self, run: SweepRun, corpus: str) -> RunRow | None:
    """Returns the line of a run on a text; None if there is none.

    Args:
      run: The run.
      corpus: Digest of the text.
    """
    return self.runs.get((run.digest, corpus))

  def on_one_text(self, runs: Sequence[SweepRun]) -> list[RunRow | None]:
    """Chooses one text, and returns the line of each run on this text.

    The same config may have been trained on different versions of its text, for
    example with another version of Python's library. Losses on two versions do
    not compare. The version with the most lines is chosen; of two versions with
    equally many lines, the version of the later line.

    A version is chosen for each text that the configs name (`text_of`). For
    example, a synthetic text differs with the seed.

    Args:
      runs: The runs.

    Returns:
      For each run its line on the chosen text; None if it has no such line.
    """
    corpora_by_run: dict[str, list[str]] = {}  # By digest of the config.
    last_line: dict[str, int] = {}
    for number, (digest, corpus) in enumerate(self.runs):
      corpora_by_run.setdefault(digest, []).append(corpus)
      last_line[corpus] = number
    # How many lines of the runs each version has, by text of the config.
    num_lines: dict[Hashable, collections.Counter[str]] = {}
    for run in runs:
      counter = num_lines.setdefault(text_of(run.config), collections.Counter())
      counter.update(corpora_by_run.get(run.digest, ()))
    chosen_corpus = {}
    for text, counter in num_lines.items():
      ranks = {
        corpus: (count, last_line[corpus]) for corpus, count in counter.items()
      }
      chosen_corpus[text] = max(ranks, key=ranks.__getitem__, default="")
    return [self.row(run, chosen_corpus[text_of(run.config)]) for run in runs]

  def num_others(
    self, runs: Sequence[SweepRun], lines: Sequence[RunRow | None]
  ) -> int:
    """Returns how many lines of some runs a page does not show.

    They are lines of the same runs on other texts.

    Args:
      runs: The runs.
      lines: The line of each run that the page shows; None if it shows none.
    """
    digests = {run.digest for run in runs}
    num_lines = sum(digest in digests for digest, _ in self.runs)
    return num_lines - len({row.digest for row in lines if row})

  def add(self, row: RunRow, curve: Sequence[CurveRow]) -> None:
    """Adds a finished run, and writes both files.

    A line of the same run on the same text is replaced. The curves are written
    first: if the process is killed between the two writes, no run has a line
    without its curve.

    Args:
      row: Line of the finished run.
      curve: Evaluations of the run, in order.

    Raises:
      RecordError: If the files cannot be written.
    """
    make_directory(self.path.parent)
    self.source = self.path
    self._curves[row.digest, row.corpus] = list(curve)
    self.runs[row.digest, row.corpus] = row
    points = itertools.chain.from_iterable(self._curves.values())
    _write_table(_curves_path(self.path), points)
    _write_table(self.path, self.runs.values())


def row_of(
  loaded_run: LoadedRun, run: SweepRun, failure: str, cores: int
) -> RunRow:
  """Returns the results in a run directory as a line of NAME.csv.

  Args:
    loaded_run: Content of the run directory.
    run: The run of the sweep that was trained there.
    failure: Why the run diverged, in one line; empty if it did not.
    cores: Number of CPU cores that the run could use; 0 if unknown.
  """
  record = loaded_run.record
  losses = [evaluation.outer_loss for evaluation in loaded_run.evaluations]
  result = None if failure else loaded_run.result
  return RunRow(
    name=run.name,
    seed=run.seed,
    digest=run.digest,
    corpus=record["corpus_digest"],
    overrides=json.dumps(run.overrides, sort_keys=True),
    total_steps=run.config.total_steps,
    tokens=loaded_run.tokens,
    sent_bytes=loaded_run.total_sent_bytes,
    loss=result.outer_loss if result else math.nan,
    mean_loss=result.mean_loss if result else math.nan,
    best_loss=min(losses, default=math.nan),
    judge_loss=result.judge_loss if result else math.nan,
    wall_s=round(loaded_run.wall_s, 1),
    platform=record["platform"],
    python=record["versions"]["python"],
    jax=record["versions"]["jax"],
    revision=record["source_revision"] or "",
    cores=cores,
    failure=failure,
  )


def curve_of(run: LoadedRun, row: RunRow) -> list[CurveRow]:
  """Returns the evaluations in a run directory as lines of NAME_curves.csv.

  Args:
    run: Content of the run directory.
    row: Line of the run, which has the digests.
  """
  return [
    CurveRow(
      digest=row.digest,
      corpus=row.corpus,
      step=evaluation.step,
      tokens=evaluation.tokens,
      sent_bytes=evaluation.total_sent_bytes,
      loss=evaluation.outer_loss,
      flushed=evaluation.flushed,
    )
    for evaluation in run.evaluations
  ]


def _curves_path(path: pathlib.Path) -> pathlib.Path:
  return path.with_name(f"{path.stem}_curves.csv")


def _write_table(
  path: pathlib.Path, rows: Iterable[RunRow] | Iterable[CurveRow]
) -> None:
  """Writes a CSV file, which replaces an earlier file as a whole.

  Args:
    path: Path of the file.
    rows: Lines of the file, all of the same class.
  """
  write_atomically(path, csv_table([dataclasses.asdict(row) for row in rows]))


def _read(path: pathlib.Path, kind: type[RowType]) -> list[RowType]:
  """Reads a CSV file; a file that does not exist counts as empty.

  Args:
    path: Path of the file.
    kind: Class of its lines. The fields of the class are the columns.

  Raises:
    RecordError: If the file cannot be read, ends within a line, has other
      columns, or has a cell that does not fit its column.
  """
  if not path.exists():
    return []
  types = typing.get_type_hints(kind)
  with one_line(path, "read"):
    content = path.read_bytes()
  try:
    # The file is replaced as a whole, so a line without an end was cut.
    require(content.endswith(b"\n"), "its last line is cut")
    rows = csv.DictReader(io.StringIO(content.decode(), newline=""))
    _check_columns(rows.fieldnames or (), types)
    return [
      kind(**{name: _value(types[name], text) for name, text in row.items()})
      for row in rows
    ]
  except (KeyError, TypeError, ValueError, csv.Error) as error:
    reason = " ".join(str(error).split())
    raise RecordError(
      f"{path} is no table of {kind.__name__}: {type(error).__name__} {reason}"
    ) from error


def _check_columns(columns: Sequence[str], expected: Iterable[str]) -> None:
  """Raises ValueError unless a table has the expected columns, each once.

  Args:
    columns: Columns of the table.
    expected: Columns that it must have, in any order.
  """
  missing = sorted(set(expected) - set(columns))
  require(not missing, f"it lacks the column {missing[:1]}")
  others = sorted(set(columns) - set(expected))
  require(not others, f"it has a column {shown(others[:1])}")
  require(len(columns) == len(set(columns)), "it has a column twice")


def _value(kind: type, text: str | None) -> Any:
  """Reads a cell as `csv_table` writes it.

  Args:
    kind: Type of the value: str, int, float or bool.
    text: Text of the cell; None if the line has fewer cells than columns.

  Raises:
    ValueError: If the line is too short, or the text is no such value, an int
      below 0 or an infinite float. NaN is allowed.
  """
  if text is None:
    raise ValueError("a line is shorter than the others")
  if kind is bool:
    require(
      text in ("True", "False"), f"{shown(text)} is neither True nor False"
    )
    return text == "True"
  value = kind(text)
  if kind is int:
    require(value >= 0, f"{shown(text)} is below 0")
  if kind is float:
    require(not math.isinf(value), f"{shown(text)} is out of range")
  return value
