"""Finished runs of a sweep, in CSV files that other programs read.

A run is one line of NAME.csv, its evaluations are lines of NAME_curves.csv.
Both are written when the run has ended. A sweep does not train a run again if a
line has the same config and the same text.
"""

import collections
import csv
import dataclasses
import io
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
    digest: Digest of the config; lines of the curve have it too.
    corpus: Digest of the text.
    overrides: Fields that are not at their defaults, as JSON.
    total_steps: Number of inner steps.
    tokens: Number of tokens that all replicas together were trained on.
    sent_bytes: Bytes that one replica sent, flush included.
    loss: Loss of the outer parameters after the flush (nats a token); NaN if
      the run diverged.
    mean_loss: Loss of the mean of the replicas' parameters after the flush.
    best_loss: Lowest loss of the outer parameters during the run.
    judge_loss: Loss of the outer parameters on the text that judges; NaN if
      the run had none.
    wall_s: Wall time of the run (seconds).
    platform: Backend and devices.
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
  """One evaluation of a run: one line of NAME_curves.csv.

  Attributes:
    digest: Digest of the run's config.
    corpus: Digest of the text.
    step: Inner steps finished.
    tokens: Tokens that all replicas together have seen so far.
    sent_bytes: Bytes that one replica had sent.
    loss: Loss of the outer parameters (nats a token).
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
  """The files of a sweep's finished runs.

  Attributes:
    path: Path of NAME.csv. The curves are beside it.
    source: Path of the file that was read, or that is written.
    runs: Finished runs by digest of the config and digest of the text.
  """

  def __init__(self, path: pathlib.Path, start: pathlib.Path | None = None):
    """Reads the files, which need not exist.

    Args:
      path: Path of NAME.csv.
      start: Another such file, from which a new sweep begins; it is copied with
        the first write.

    Raises:
      RecordError: If a file cannot be read or has other columns.
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
      # A run that was killed before its line was written has a curve alone.
      if key in self.runs:
        self._curves.setdefault(key, []).append(point)

  @property
  def settings(self) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and overrides of each run, as `runs.runs_of` takes them.

    A run that has lines on several texts is there once.

    Raises:
      RecordError: If a line has no overrides.
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
    """Returns a run's evaluations in order; empty if the files have none."""
    return list(self._curves.get((row.digest, row.corpus), ()))

  def row(self, run: SweepRun, corpus: str) -> RunRow | None:
    """Returns the line of a run.

    Args:
      run: The run.
      corpus: Digest of its text.
    """
    return self.runs.get((run.digest, corpus))

  def on_one_text(self, runs: Sequence[SweepRun]) -> list[RunRow | None]:
    """Returns the line of each run, all of them on one text.

    Losses on two texts do not compare. The text with the most lines is taken;
    of two texts with as many lines, the one that came later. Runs whose config
    asks for different texts, as synthetic ones do with each seed, are counted
    separately.

    Args:
      runs: The runs.

    Returns:
      For each run its line on the chosen text, or None if it has none.
    """
    corpora: dict[str, list[str]] = {}
    last_line: dict[str, int] = {}
    for number, (digest, corpus) in enumerate(self.runs):
      corpora.setdefault(digest, []).append(corpus)
      last_line[corpus] = number
    counts: dict[Hashable, collections.Counter[str]] = {}
    for run in runs:
      count = counts.setdefault(text_of(run.config), collections.Counter())
      count.update(corpora.get(run.digest, ()))
    chosen_corpus = {}
    for text, count in counts.items():
      ranks = {corpus: (n, last_line[corpus]) for corpus, n in count.items()}
      chosen_corpus[text] = max(ranks, key=ranks.__getitem__, default="")
    return [self.row(run, chosen_corpus[text_of(run.config)]) for run in runs]

  def num_others(
    self, runs: Sequence[SweepRun], lines: Sequence[RunRow | None]
  ) -> int:
    """Returns how many lines of some runs are on texts that are not shown.

    Args:
      runs: The runs.
      lines: The line of each run that is shown; None if there is none.
    """
    digests = {run.digest for run in runs}
    num_lines = sum(digest in digests for digest, _ in self.runs)
    return num_lines - len({row.digest for row in lines if row})

  def add(self, row: RunRow, curve: Sequence[CurveRow]) -> None:
    """Adds a finished run to the files.

    The curve is written before the line of the run: if the process is killed in
    between, no run is in the files without its curve.

    Args:
      row: The finished run.
      curve: Its evaluations in order.

    Raises:
      RecordError: If the files cannot be written.
    """
    make_directory(self.path.parent)
    self.source = self.path
    self._curves[row.digest, row.corpus] = list(curve)
    self.runs[row.digest, row.corpus] = row
    points = [point for each in self._curves.values() for point in each]
    _write_table(_curves_path(self.path), points)
    _write_table(self.path, self.runs.values())


def row_of(
  loaded_run: LoadedRun, run: SweepRun, failure: str, cores: int
) -> RunRow:
  """Returns the results in a run directory as a line of NAME.csv.

  Args:
    loaded_run: The run directory.
    run: The run of the sweep that was trained there.
    failure: Why it diverged; empty if it did not.
    cores: Number of CPU cores that it had; 0 if unknown.
  """
  record = loaded_run.record
  losses = [row.outer_loss for row in loaded_run.evaluations]
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
  """Returns the evaluations of a run directory as lines of a curve."""
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
  """Writes rows as a CSV file, which replaces an earlier one as a whole."""
  write_atomically(path, csv_table([dataclasses.asdict(row) for row in rows]))


def _read(path: pathlib.Path, kind: type[RowType]) -> list[RowType]:
  """Returns the lines of a CSV file; none if there is no file.

  Raises:
    RecordError: If it cannot be read, is cut, or has other columns.
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


def _check_columns(found: Sequence[str], wanted: Iterable[str]) -> None:
  """Raises ValueError unless a table has each column once, and no other."""
  missing = sorted(set(wanted) - set(found))
  require(not missing, f"it lacks the column {missing[:1]}")
  others = sorted(set(found) - set(wanted))
  require(not others, f"it has a column {shown(others[:1])}")
  require(len(found) == len(set(found)), "it has a column twice")


def _value(kind: type, text: str | None) -> Any:
  """Returns the value of a cell, such as `csv_table` writes it.

  Args:
    kind: Type of the value.
    text: The cell; None if its line is shorter than the others.
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
