"""Finished runs of a sweep, in CSV files that other programs read.

A run is one line of NAME.csv, its evaluations are lines of NAME_curves.csv.
Both are written when the run has ended. A sweep does not train a run again if a
line has the same config and the same text.
"""

import collections
import csv
import dataclasses
import json
import math
import pathlib
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from dilocox_jax.metrics.lines import (
  RecordError,
  make_directory,
  whole_lines,
  write_atomically,
)
from dilocox_jax.report.run import LoadedRun
from dilocox_jax.report.tables import csv_table
from experiments.sweeps.runs import SweepRun


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
    rows = _read(self.source, RunRow)
    self.runs = {(row.digest, row.corpus): row for row in rows}
    self._curves: dict[tuple[str, str], dict[CurveRow, None]] = {}
    self._keep(_read(_curves_path(self.source), CurveRow))

  @property
  def settings(self) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and overrides of each run, as `runs.runs_of` takes them."""
    rows = self.runs.values()
    try:
      return [(row.name, json.loads(row.overrides)) for row in rows]
    except (ValueError, RecursionError) as error:
      raise RecordError(f"{self.source} is damaged: {error}") from error

  def curve(self, row: RunRow) -> list[CurveRow]:
    """Returns a run's evaluations in order; empty if the files have none."""
    return list(self._curves.get((row.digest, row.corpus), ()))

  def row(self, run: SweepRun, corpus: str = "") -> RunRow | None:
    """Returns the line of a run.

    Args:
      run: The run.
      corpus: Digest of its text; "" for the text of most lines.
    """
    if corpus:
      return self.runs.get((run.digest, corpus))
    found = [row for key, row in self.runs.items() if key[0] == run.digest]
    usual = collections.Counter(row.corpus for row in self.runs.values())
    return max(found, key=lambda row: usual[row.corpus], default=None)

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
    self._keep(curve)
    self.runs[row.digest, row.corpus] = row
    points = [point for each in self._curves.values() for point in each]
    curves = _curves_path(self.path)
    for path, rows in ((curves, points), (self.path, self.runs.values())):
      write_atomically(path, csv_table([*map(dataclasses.asdict, rows)]))

  def _keep(self, points: Sequence[CurveRow]) -> None:
    # A run that was killed between two writes is trained again, and then its
    # points are there twice.
    for point in points:
      key = point.digest, point.corpus
      self._curves.setdefault(key, {})[point] = None


def row_of(run: LoadedRun, made: SweepRun, failure: str, cores: int) -> RunRow:
  """Returns what a run directory found as a line of NAME.csv.

  Args:
    run: The run directory.
    made: The run of the sweep that made it.
    failure: Why it diverged; empty if it did not.
    cores: Number of CPU cores that it had; 0 if unknown.
  """
  record, last = run.record, None if failure else run.result
  losses = [each.outer_loss for each in run.evaluations]
  return RunRow(
    name=made.name,
    seed=made.seed,
    digest=made.digest,
    corpus=record["corpus_digest"],
    overrides=json.dumps(made.overrides, sort_keys=True),
    total_steps=made.config.total_steps,
    tokens=run.tokens,
    sent_bytes=run.total_sent_bytes,
    loss=last.outer_loss if last else math.nan,
    mean_loss=last.mean_loss if last else math.nan,
    best_loss=min(losses, default=math.nan),
    judge_loss=last.judge_loss if last else math.nan,
    wall_s=round(run.wall_s, 1),
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
      *(row.digest, row.corpus, e.step, e.tokens, e.total_sent_bytes),
      *(e.outer_loss, e.flushed),
    )
    for e in run.evaluations
  ]


def _curves_path(path: pathlib.Path) -> pathlib.Path:
  return path.with_name(f"{path.stem}_curves.csv")


def _read(path: pathlib.Path, kind: type[RowType]) -> list[RowType]:
  """Returns the lines of a CSV file; none if there is no file."""
  types = typing.get_type_hints(kind)
  try:
    rows = csv.DictReader(line.decode() for line in whole_lines(path))
    return [
      kind(**{name: _value(types[name], text) for name, text in row.items()})
      for row in rows
    ]
  except (KeyError, TypeError, ValueError, csv.Error) as error:
    raise RecordError(
      f"{path} is no table of {kind.__name__}: {error!r}"
    ) from (error)


def _value(kind: type, text: str) -> Any:
  return {"True": True, "False": False}[text] if kind is bool else kind(text)
