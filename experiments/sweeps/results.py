"""Finished runs of a sweep, in files that are small enough to be committed.

A run is one line of NAME.csv. Its curve is some lines of NAME_curves.csv. Both
are written once the run has ended, so a sweep goes on from them in a fresh
clone: a run with the config and the text of a line is not made again.
NAME_base.json has the names of the config's fields when the sweep was begun
(see `run_spec.run_digest`).
"""

import contextlib
import csv
import dataclasses
import io
import json
import math
import pathlib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dilocox_jax.config import RunConfig
from dilocox_jax.metrics import RecordError
from dilocox_jax.metrics.lines import (
  make_directory,
  one_line,
  write_atomically,
  write_json,
)
from dilocox_jax.report.run import LoadedRun
from experiments.runtime import file_lock
from experiments.sweeps.run_spec import run_digest


@dataclasses.dataclass(frozen=True)
class ResultRow:
  """A finished run. Fields with a default are columns that came later.

  Attributes:
    stage: Task for which the run was made first.
    method: Name of the method in the sweep.
    seed: Seed of the run.
    digest: Digest of the config.
    corpus: Digest of the text.
    changed: Fields over the sweep's base, as JSON.
    total_steps: Inner steps.
    tokens: Tokens of all replicas.
    total_sent_bytes: Bytes that one replica sent, flush included.
    final_loss: Loss of the outer parameters after the flush (nats a token);
      NaN if the run diverged.
    mean_loss: Loss of the mean of the replicas' parameters at that moment.
    best_loss: Lowest loss of the outer parameters during the run.
    wall_s: Wall time of the run (seconds).
    platform: Backend and devices.
    python: Version of Python.
    jax: Version of JAX.
    failure: Why the run diverged, in one line; empty if it did not.
    revision: Commit of the source that made the run; empty if not known.
    cores: Cores that the process of the run had; 0 if not known.
  """

  stage: str
  method: str
  seed: int
  digest: str
  corpus: str
  changed: str
  total_steps: int
  tokens: int
  total_sent_bytes: int
  final_loss: float
  mean_loss: float
  best_loss: float
  wall_s: float
  platform: str
  python: str
  jax: str
  failure: str = ""
  revision: str = ""
  cores: int = 0


@dataclasses.dataclass(frozen=True)
class CurveRow:
  """One evaluation of a run.

  Attributes:
    digest: Digest of the run's config.
    corpus: Digest of the text.
    step: Inner steps finished.
    tokens: Tokens of all replicas so far.
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


RowType = typing.TypeVar("RowType", ResultRow, CurveRow)
RunKey = tuple[str, str]  # Digests of the config and of the text.


class Results:
  """The files of a sweep's results.

  Attributes:
    path: The CSV of the runs. The other two files are beside it.
    source: The CSV that was read: `path`, or the start if that is missing.
    rows: The lines by digest and corpus.
  """

  def __init__(
    self,
    path: pathlib.Path,
    base: Mapping[str, Any],
    start: pathlib.Path | None = None,
  ):
    """Reads the files, which need not exist.

    Args:
      path: The CSV of the runs.
      base: Fields of every run, by dotted name.
      start: CSV to begin with where there is none at `path`. Its files are
        copied with the first write; they never change themselves.

    Raises:
      RecordError: A file cannot be read or has other columns.
    """
    self.path = path
    use_start = start and start.exists() and not path.exists()
    self.source = start if start and use_start else path
    _, self.curves_path, base_path = _files(self.path)
    self._base_path = base_path
    _, read_curves, read_base = _files(self.source)
    self._fields = frozenset(base)
    if read_base.exists():
      with one_line(read_base, "read"):
        self._fields = frozenset(json.loads(read_base.read_text()))
    self.rows = {(r.digest, r.corpus): r for r in _read(self.source, ResultRow)}
    self._digests: dict[RunConfig, str] = {}
    self._curves: dict[RunKey, list[CurveRow]] = {}
    self._add_points(_read(read_curves, CurveRow))

  @contextlib.contextmanager
  def held(self) -> Iterator[None]:
    """Keeps other sweeps out, as two would make the same runs.

    Raises:
      StoppedError: Another sweep has the files.
      RecordError: The disk refused.
    """
    self._begin()
    with one_line(self._base_path, "read"):
      file = self._base_path.open()
    with file:
      refusal = f"another sweep is at work on {self.path}: wait for its end"
      file_lock.lock(file, refusal)
      yield

  def _begin(self) -> None:
    """Makes the files, if need be as copies of those to start from."""
    make_directory(self.path.parent)
    if self.source != self.path:
      # The CSV comes last: if it is there, the other two are complete.
      files = zip(_files(self.source), _files(self.path), strict=True)
      for source, target in reversed(list(files)):
        if source.exists():
          write_atomically(target, source.read_bytes())
      self.source = self.path
    if not self._base_path.exists():
      write_json(self._base_path, sorted(self._fields))

  def digest(self, config: RunConfig) -> str:
    """Returns the digest of a run (see `run_spec.run_digest`)."""
    if config not in self._digests:
      self._digests[config] = run_digest(config, self._fields)
    return self._digests[config]

  def curve(self, key: RunKey) -> list[CurveRow]:
    """Returns a run's evaluations in order; empty if none were kept."""
    return self._curves.get(key, [])

  def add(self, row: ResultRow, curve: Sequence[CurveRow]) -> None:
    """Keeps a run; the curve first, so that a line of a run has its curve.

    Raises:
      RecordError: The disk refused.
    """
    self._begin()
    if curve:
      _append(self.curves_path, curve)
    _append(self.path, [row])
    self.rows[row.digest, row.corpus] = row
    self._add_points(curve)

  def _add_points(self, points: Sequence[CurveRow]) -> None:
    # A kill between the two files leaves a curve that is written again.
    for point in points:
      curve = self._curves.setdefault((point.digest, point.corpus), [])
      if point not in curve:
        curve.append(point)


def _files(path: pathlib.Path) -> tuple[pathlib.Path, ...]:
  """The CSV of runs, the one of curves, and the names of the fields."""
  names = (path.name, f"{path.stem}_curves.csv", f"{path.stem}_base.json")
  return tuple(path.with_name(name) for name in names)


def evaluations(run: LoadedRun, digest: str) -> list[CurveRow]:
  """Returns the curve of a run directory."""
  key = (digest, run.record["corpus_digest"])
  return [
    CurveRow(
      *key, e.step, e.tokens, e.total_sent_bytes, e.outer_loss, e.flushed
    )
    for e in run.evaluations
  ]


def row_of(run: LoadedRun, failure: str = "", **known: Any) -> ResultRow:
  """Returns the line of a run directory.

  Args:
    run: The run directory.
    failure: Why the run diverged; empty if it did not.
    **known: Columns that the directory does not know, e.g. `method`.
  """
  record, last = run.record, None if failure else run.result
  losses = [e.outer_loss for e in run.evaluations]
  return ResultRow(
    **known,
    corpus=record["corpus_digest"],
    tokens=run.tokens,
    total_sent_bytes=run.total_sent_bytes,
    final_loss=last.outer_loss if last else math.nan,
    mean_loss=last.mean_loss if last else math.nan,
    best_loss=min(losses, default=math.nan),
    wall_s=round(run.wall_s, 1),
    platform=record["platform"],
    python=record["versions"]["python"],
    jax=record["versions"]["jax"],
    failure=failure,
    revision=record["source_revision"] or "",
  )


def _whole_lines(path: pathlib.Path) -> list[str]:
  """Lines that end with a newline; a torn tail is no line."""
  if not path.exists():
    return []
  with one_line(path, "read"):
    lines = path.read_bytes().splitlines(keepends=True)
  return [line.decode() for line in lines if line.endswith(b"\n")]


def _append(path: pathlib.Path, rows: Sequence[RowType]) -> None:
  """Writes the file anew with some rows more, so that no half of it is seen.

  Lines that are there stay as they are. The first line names all columns of
  today, so lines that were written before a column existed end before it.
  """
  text = io.StringIO()
  names = [field.name for field in dataclasses.fields(rows[0])]
  writer = csv.DictWriter(text, names, lineterminator="\n")
  writer.writeheader()
  text.writelines(_whole_lines(path)[1:])
  writer.writerows(dataclasses.asdict(row) for row in rows)
  write_atomically(path, text.getvalue())


def _read(path: pathlib.Path, kind: type[RowType]) -> list[RowType]:
  rows = csv.DictReader(_whole_lines(path))
  types = typing.get_type_hints(kind)
  try:
    return [
      # Columns that a line does not have yet keep their default.
      kind(**{n: _value(types[n], v) for n, v in row.items() if v is not None})
      for row in rows
    ]
  except (KeyError, TypeError, ValueError) as error:
    raise RecordError(
      f"{path} line {rows.line_num} is no {kind.__name__}: {error!r}"
    ) from error


def _value(kind: type, text: str) -> Any:
  return text == "True" if kind is bool else kind(text)
