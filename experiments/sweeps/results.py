"""Reads and writes the finished runs of a sweep, in files to be committed.

A run is one line of NAME.csv. Its evaluations are lines of NAME_curves.csv.
Both are written when the run has ended. A sweep in a fresh clone reads them and
does not train a run again if a line has the same config and the same text.
NAME_base.json has the names of the fields that a config had when the sweep
began (see `run_spec.run_digest`).
"""

import contextlib
import csv
import dataclasses
import functools
import io
import json
import math
import pathlib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dilocox_jax.config import RunConfig
from dilocox_jax.data.corpus import JUDGE
from dilocox_jax.metrics import RecordError
from dilocox_jax.metrics.lines import (
  make_directory,
  one_line,
  whole_lines,
  write_atomically,
  write_json,
)
from dilocox_jax.report.run import LoadedRun
from experiments.runtime import file_lock
from experiments.sweeps.run_spec import run_digest


@dataclasses.dataclass(frozen=True)
class ResultRow:
  """A finished run: one line of NAME.csv.

  Old files lack the columns of fields that have a default here.

  Attributes:
    stage: First task that needed the run, e.g. "tune_inner".
    method: Name of the method in the sweep.
    seed: Seed of the run.
    digest: Digest of the config.
    corpus: Digest of the text.
    changed: Fields that differ from the sweep's base and their values, as JSON.
    total_steps: Number of inner steps.
    tokens: Number of tokens that all replicas together were trained on.
    total_sent_bytes: Bytes that one replica sent, flush included.
    final_loss: Loss of the outer parameters after the flush (nats a token);
      NaN if the run diverged.
    mean_loss: Loss of the mean of the replicas' parameters after the flush
      (nats a token).
    best_loss: Lowest loss of the outer parameters during the run (nats a
      token).
    wall_s: Wall time of the run (seconds).
    platform: Backend and devices.
    python: Version of Python.
    jax: Version of JAX.
    failure: Why the run diverged, in one line; empty if it did not.
    revision: Commit of the source code that the run used; empty if not known.
    cores: Number of CPU cores that the run could use; 0 if not known.
    judge_loss: Loss of the outer parameters after the flush on the text that
      judges (nats a token); NaN if the run had none or diverged.
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
  judge_loss: float = math.nan


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


RowType = typing.TypeVar("RowType", ResultRow, CurveRow)
RunKey = tuple[str, str]  # Digests of the config and of the text.


class Results:
  """The files of a sweep's results.

  Attributes:
    path: Path of the CSV of the runs. The other two files are beside it.
    source: Path of the CSV that was read. It is `path`, or `start` if there is
      no file at `path`.
    rows: Finished runs, by digest of the config and digest of the text.
  """

  def __init__(
    self,
    path: pathlib.Path,
    base: Mapping[str, Any],
    start: pathlib.Path | None = None,
  ):
    """Reads the files, which need not exist.

    Args:
      path: Path of the CSV of the runs.
      base: Fields of every run, by dotted name.
      start: Path of another CSV, which is read if there is no file at `path`.
        The first write copies it and its two other files to `path`. The
        originals never change.

    Raises:
      RecordError: If a file cannot be read or has other columns.
    """
    self.path = path
    use_start = start and start.exists() and not path.exists()
    self.source = start if start and use_start else path
    _, self.curves_path, self._base_path = _files(self.path)
    _, read_curves, read_base = _files(self.source)
    self._fields = frozenset(base)
    if read_base.exists():
      with one_line(read_base, "read"):
        self._fields = frozenset(_json(read_base))
    self.rows = {(r.digest, r.corpus): r for r in _read(self.source, ResultRow)}
    self._curves: dict[RunKey, list[CurveRow]] = {}
    self._add_points(_read(read_curves, CurveRow))

  @contextlib.contextmanager
  def held(self) -> Iterator[None]:
    """Locks the files, since two sweeps at once would train the same runs.

    Raises:
      StoppedError: If another sweep has locked the files.
      RecordError: If the files cannot be written.
    """
    self._begin()
    with one_line(self._base_path, "read"):
      file = self._base_path.open()
    with file:
      refusal = f"another sweep is writing {self.path}: wait until it has ended"
      file_lock.lock(file, refusal)
      yield

  def _begin(self) -> None:
    """Creates the files, as copies of the files in `source` if it differs."""
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

  @functools.cache  # noqa: B019 - it lives as long as the sweep.
  def digest(self, config: RunConfig) -> str:
    """Returns the digest of a run (see `run_spec.run_digest`)."""
    return run_digest(config, self._fields)

  def curve(self, key: RunKey) -> list[CurveRow]:
    """Returns a run's evaluations in order; empty if the files have none."""
    return self._curves.get(key, [])

  def add(self, row: ResultRow, curve: Sequence[CurveRow]) -> None:
    """Adds a finished run to the files.

    The curve is written before the line of the run. If the process is killed
    between the two writes, no run is in the files without its curve.

    Args:
      row: The finished run.
      curve: Its evaluations in order; may be empty.

    Raises:
      RecordError: If the files cannot be written.
    """
    self._begin()
    if curve:
      _append(self.curves_path, curve)
    _append(self.path, [row])
    self.rows[row.digest, row.corpus] = row
    self._add_points(curve)

  def _add_points(self, points: Sequence[CurveRow]) -> None:
    # A process that is killed between the two writes of `add` leaves a curve
    # without a run. The run is trained again and its curve is written again, so
    # points may be in the file twice.
    for point in points:
      curve = self._curves.setdefault((point.digest, point.corpus), [])
      if point not in curve:
        curve.append(point)


def _files(path: pathlib.Path) -> tuple[pathlib.Path, ...]:
  """Returns the paths of NAME.csv, NAME_curves.csv and NAME_base.json."""
  names = (path.name, f"{path.stem}_curves.csv", f"{path.stem}_base.json")
  return tuple(path.with_name(name) for name in names)


def evaluations(run: LoadedRun, digest: str) -> list[CurveRow]:
  """Returns the evaluations of a run directory as lines of a curve."""
  key = (digest, run.record["corpus_digest"])
  return [
    CurveRow(
      *key, e.step, e.tokens, e.total_sent_bytes, e.outer_loss, e.flushed
    )
    for e in run.evaluations
  ]


def row_of(run: LoadedRun, failure: str = "", **known: Any) -> ResultRow:
  """Returns the results of a run directory as a line of the CSV.

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
    judge_loss=last.sets.get(JUDGE, math.nan) if last else math.nan,
  )


def _json(path: pathlib.Path) -> Any:
  try:
    return json.loads(path.read_bytes())
  except (ValueError, RecursionError) as error:
    raise RecordError(f"{path} is damaged: {error}") from error


def _lines(path: pathlib.Path) -> list[str]:
  try:
    return [line.decode() for line in whole_lines(path)]
  except UnicodeDecodeError as error:
    raise RecordError(f"{path} is damaged: {error}") from error


def _append(path: pathlib.Path, rows: Sequence[RowType]) -> None:
  """Adds rows to a CSV file by writing the whole file again.

  The new file replaces the old one at once, so no reader sees half of it. Old
  lines stay as they are. The header names all columns that exist today. A line
  that is older than a column is shorter, since new columns come last.
  """
  text = io.StringIO()
  names = [field.name for field in dataclasses.fields(rows[0])]
  writer = csv.DictWriter(text, names, lineterminator="\n")
  writer.writeheader()
  text.writelines(_lines(path)[1:])
  writer.writerows(dataclasses.asdict(row) for row in rows)
  write_atomically(path, text.getvalue())


def _read(path: pathlib.Path, kind: type[RowType]) -> list[RowType]:
  """Returns the lines of a CSV file; none if there is no file."""
  rows = csv.DictReader(_lines(path))
  types = typing.get_type_hints(kind)
  names = [field.name for field in dataclasses.fields(kind)]
  found = list(rows.fieldnames or ())
  # A later write puts the header of today above the lines as they are.
  if set(found) <= set(names) and found != names[: len(found)]:
    raise RecordError(
      f"{path} has its columns in another order than {', '.join(names)}"
    )
  try:
    return [
      # A field whose column is missing in an old line gets its default value.
      kind(**{n: _value(types[n], v) for n, v in row.items() if v is not None})
      for row in rows
    ]
  except (KeyError, TypeError, ValueError, csv.Error) as error:
    raise RecordError(
      f"{path} line {rows.line_num} is no {kind.__name__}: {error!r}"
    ) from error


def _value(kind: type, text: str) -> Any:
  return {"True": True, "False": False}[text] if kind is bool else kind(text)
