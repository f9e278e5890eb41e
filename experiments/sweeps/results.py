"""Finished runs of a sweep, in files that are small enough to be committed.

A run is one line of NAME.csv, its curve some lines of NAME_curves.csv, both
written once it has ended. A fresh clone goes on from them: a run whose config
and text are those of a line is not made again. Of the config all fields count
that can change a number; fields that came later count where they are set, so
NAME_base.json keeps the names of those there were.
"""

import contextlib
import csv
import dataclasses
import fcntl
import hashlib
import io
import json
import math
import os
import pathlib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dilocox_jax.config import FREE_ON_RESUME, RunConfig
from dilocox_jax.mapping import flat
from dilocox_jax.metrics import RecordError
from dilocox_jax.metrics.lines import make_directory, one_line, write_json
from dilocox_jax.report.run import LoadedRun
from experiments.runtime import file_lock

# Curves are kept, so that it matters when a run is evaluated.
_FREE = tuple(e for e in FREE_ON_RESUME if not e.startswith("evaluation."))


@dataclasses.dataclass(frozen=True)
class ResultRow:
  """A finished run.

  Attributes:
    stage: Task for which the run was made first (the column is called `stage`).
    method: Name in the sweep.
    seed: Its seed.
    digest: Of its config.
    corpus: Digest of its text.
    changed: Fields over the sweep's base, as JSON.
    total_steps: Inner steps.
    tokens: Of all replicas.
    total_sent_bytes: What one replica sent, flush included.
    final_loss: Of the outer parameters after the flush; NaN if it diverged.
    mean_loss: Of the mean of the replicas' parameters then.
    best_loss: Lowest of the outer parameters on the way.
    wall_s: What it took.
    platform: Backend and devices.
    python: Version.
    jax: Version.
    failure: Why it diverged, in one line.
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


@dataclasses.dataclass(frozen=True)
class CurveRow:
  """One evaluation.

  Attributes:
    digest: Of the run's config.
    corpus: Digest of its text.
    step: Inner steps finished.
    tokens: Of all replicas.
    sent_bytes: What one replica had sent.
    loss: Of the outer parameters (nats a token).
    flushed: Whether it is the last, after the flush.
  """

  digest: str
  corpus: str
  step: int
  tokens: int
  sent_bytes: int
  loss: float
  flushed: bool


Line = typing.TypeVar("Line", ResultRow, CurveRow)
RunKey = tuple[str, str]


class Results:
  """The files of a sweep's results.

  Attributes:
    path: Of the runs; the others lie beside it.
    rows: By digest and corpus.
  """

  def __init__(self, path: pathlib.Path, base: Mapping[str, Any]):
    """Reads what is there.

    Args:
      path: Of the CSV, which need not exist.
      base: Fields of every run, by dotted names.

    Raises:
      RecordError: A file cannot be read or is of another kind.
    """
    self.path = path
    self.curves_path = path.with_name(f"{path.stem}_curves.csv")
    self._base_path = path.with_name(f"{path.stem}_base.json")
    self._fields = frozenset(base)
    if self._base_path.exists():
      with one_line(self._base_path, "read"):
        self._fields = frozenset(json.loads(self._base_path.read_text()))
    self.rows = {(r.digest, r.corpus): r for r in _read(path, ResultRow)}
    self._digests: dict[RunConfig, str] = {}
    self._curves: dict[RunKey, list[CurveRow]] = {}
    for each in _read(self.curves_path, CurveRow):
      self._note(each)

  @contextlib.contextmanager
  def held(self) -> Iterator[None]:
    """Keeps other sweeps out, as two would make the same runs.

    Raises:
      StoppedError: Another has it.
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
    make_directory(self.path.parent)
    if not self._base_path.exists():
      write_json(self._base_path, sorted(self._fields))

  def digest(self, config: RunConfig) -> str:
    """Twelve digits that two configs share only if they mean one run."""
    if config not in self._digests:
      self._digests[config] = self._digest(config)
    return self._digests[config]

  def _digest(self, config: RunConfig) -> str:
    default = flat(RunConfig().to_mapping())
    meaning = {
      path: value
      for path, value in flat(config.to_mapping()).items()
      if (path in self._fields or value != default[path])
      and not any(f"{path}.".startswith(f"{free}.") for free in _FREE)
    }
    text = json.dumps(meaning, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]

  def curve(self, key: RunKey) -> list[CurveRow]:
    """A run's evaluations in order; empty if none were kept."""
    return self._curves.get(key, [])

  def add(self, row: ResultRow, curve: Sequence[CurveRow]) -> None:
    """Keeps a run; the curve first, so that a line of a run has its curve.

    Raises:
      RecordError: The disk refused.
    """
    self._begin()
    if curve:
      _append(self.curves_path, CurveRow, curve)
    _append(self.path, ResultRow, [row])
    self.rows[row.digest, row.corpus] = row
    for each in curve:
      self._note(each)

  def _note(self, each: CurveRow) -> None:
    # A kill between the two files leaves a curve that is written again.
    curve = self._curves.setdefault((each.digest, each.corpus), [])
    if each not in curve:
      curve.append(each)


def evaluations(run: LoadedRun, digest: str) -> list[CurveRow]:
  """The curve of a run directory."""
  corpus = run.record["corpus_digest"]
  return [
    CurveRow(
      digest,
      corpus,
      e.step,
      e.tokens,
      e.total_sent_bytes,
      e.outer_loss,
      e.flushed,
    )
    for e in run.evaluations
  ]


def row_of(run: LoadedRun, failure: str = "", **known: Any) -> ResultRow:
  """The line of a run directory.

  Args:
    run: What it says.
    failure: Why it diverged.
    **known: columns that the directory does not know.
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
  )


def _names(kind: type[Line]) -> list[str]:
  return [field.name for field in dataclasses.fields(kind)]


def _lines(kind: type[Line], rows: Sequence[Line], *, header: bool) -> bytes:
  text = io.StringIO()
  writer = csv.DictWriter(text, _names(kind), lineterminator="\n")
  if header:
    writer.writeheader()
  writer.writerows(dataclasses.asdict(row) for row in rows)
  return text.getvalue().encode()


def _append(path: pathlib.Path, kind: type[Line], rows: Sequence[Line]) -> None:
  """One write under a lock: a kill leaves whole lines and at most a torn tail.

  A torn tail is cut before anything follows it.
  """
  with one_line(path), path.open("a+b", buffering=0) as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.seek(0)
    whole = file.read().rfind(b"\n") + 1
    file.truncate(whole)
    file.write(_lines(kind, rows, header=not whole))
    os.fsync(file.fileno())


def _read(path: pathlib.Path, kind: type[Line]) -> list[Line]:
  if not path.exists():
    return []
  with one_line(path, "read"):
    content = path.read_bytes()
  text = content[: content.rfind(b"\n") + 1].decode()
  rows = csv.DictReader(io.StringIO(text))
  hints = typing.get_type_hints(kind)
  try:
    return [
      kind(**{n: _value(hints[n], row[n]) for n in _names(kind)})
      for row in rows
    ]
  except (KeyError, TypeError, ValueError) as error:
    raise RecordError(
      f"{path} line {rows.line_num} is no {kind.__name__}: {error!r}"
    ) from error


def _value(kind: type, text: str) -> Any:
  return text == "True" if kind is bool else kind(text)
