"""Finished runs of the studies of the gap: each is one line of a CSV file.

Several programs may add lines to one file at the same time.
"""

import contextlib
import csv
import dataclasses
import fcntl
import math
import pathlib
import typing
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

from dilocox_jax import files
from dilocox_jax.checks import known, within_limits
from dilocox_jax.metrics.lines import (
  RecordError,
  make_directory,
  whole_lines,
  write_atomically,
)
from dilocox_jax.report.tables import csv_table
from experiments.gaps.settings import SIZES, Setting

_LOSSES = ("loss_newest", "loss_average", "judge_newest", "judge_average")


@dataclasses.dataclass(frozen=True)
class Row:
  """A finished run. The fields of a subclass are the columns of its file."""

  @property
  def key(self) -> Hashable:
    """Values that identify the run in its file."""
    raise NotImplementedError


RowKind = TypeVar("RowKind", bound=Row)


@dataclasses.dataclass(frozen=True)
class GapRow(Row):
  """A finished run of the study of the gap: one line of its CSV file.

  The fields from `size` to `sequence_length` describe the setting of the run.
  Losses are in nats a token. NaN means that the run diverged.

  Attributes:
    size: Name of the model's size (`settings.SIZES`).
    parameters: Number of parameters of the model.
    method: Name of the method.
    replicas: Number of replicas, M; 1 for AllReduce, whose single replica takes
      all sequences.
    batch: Sequences in a step of one replica.
    steps: Inner steps of the run.
    interval: Inner steps of a round, H; 0 for AllReduce.
    delay: Inner steps from when a pseudo-gradient is sent to when its mean is
      applied; 0: the replicas wait for the mean.
    bits: Bits of a value that is sent, 32 or 1.
    warm_start: Data-parallel steps at the beginning.
    optimizer: Name of the inner optimizer.
    momentum: Momentum of the inner optimizer.
    outer_momentum: Nesterov momentum of the outer step.
    source: Name of the text.
    sequence_length: Tokens that a sequence predicts.
    inner_rate: Highest inner learning rate.
    outer_rate: Outer learning rate; 0 for AllReduce.
    seed: Seed of the first parameters and of the order of the sequences.
    corpus: Digest of the text.
    tokens: Tokens that all replicas together were trained on.
    sent_bytes: Bytes that one replica sent in the whole run; 0 for AllReduce.
    loss_newest: Validation loss of the newest outer parameters.
    loss_average: Validation loss of the average of the outer parameters, by
      which rates are chosen.
    judge_newest: Loss of the newest outer parameters on the judge text
      (held-out text on which nothing is chosen).
    judge_average: Loss of the average on the judge text.
    seconds: Wall time of the JAX program divided by the number of its runs.
    platform: Backend of JAX, and its kind of device.
    jax: Version of JAX.
    revision: Commit of the source code; empty if unknown.
  """

  size: str
  parameters: int
  method: str
  replicas: int
  batch: int
  steps: int
  interval: int
  delay: int
  bits: int
  warm_start: int
  optimizer: str
  momentum: float
  outer_momentum: float
  source: str
  sequence_length: int
  inner_rate: float
  outer_rate: float
  seed: int
  corpus: str
  tokens: int
  sent_bytes: int
  loss_newest: float
  loss_average: float
  judge_newest: float
  judge_average: float
  seconds: float
  platform: str
  jax: str
  revision: str

  def __post_init__(self):
    """Raises ValueError unless the trainer could have made this run.

    There must be such a setting, and a loss is above 0 or NaN.
    """
    known("size", self.size, SIZES)
    for name in ("replicas", "batch", "steps", "sequence_length"):
      within_limits(name, getattr(self, name), at_least=1)
    for name in ("interval", "delay", "warm_start"):
      within_limits(name, getattr(self, name), at_least=0)
    for name in _LOSSES:
      loss = getattr(self, name)
      if not math.isnan(loss):
        within_limits(name, loss, above=0, below=math.inf)
    _ = self.setting  # It checks its fields together.

  @property
  def setting(self) -> Setting:
    """The setting of the run."""
    names = [field.name for field in dataclasses.fields(Setting)]
    return Setting(**{name: getattr(self, name) for name in names})

  @property
  def run(self) -> tuple[float, float, int]:
    """Inner rate, outer rate and seed: they identify a run of a setting."""
    return self.inner_rate, self.outer_rate, self.seed

  @property
  def key(self) -> Hashable:
    """Values that identify the run in its file."""
    return self.setting, self.run, self.corpus


def by_setting(rows: Sequence[GapRow]) -> dict[Setting, list[GapRow]]:
  """Groups finished runs by their settings."""
  rows_by_setting: dict[Setting, list[GapRow]] = {}
  for row in rows:
    rows_by_setting.setdefault(row.setting, []).append(row)
  return rows_by_setting


def read(path: pathlib.Path) -> list[GapRow]:
  """Reads the finished runs of a file such as docs/results/gap_law.csv.

  Without a file there are none.

  Raises:
    RecordError: If the file cannot be read, if its columns are not the fields
      of `GapRow`, or if a line is damaged.
  """
  return read_rows(path, GapRow)


def read_rows(path: pathlib.Path, kind: type[RowKind]) -> list[RowKind]:
  """Reads the finished runs of a file; without a file there are none.

  A last line without a line break is left out, because the file was cut there.

  Raises:
    RecordError: If the file cannot be read, if its columns are not the fields
      of `kind`, or if a line is damaged.
  """
  types = typing.get_type_hints(kind)
  try:
    lines = csv.DictReader(line.decode() for line in whole_lines(path))
    return [
      kind(**{name: types[name](_cell(text)) for name, text in line.items()})
      for line in lines
    ]
  except (KeyError, TypeError, ValueError, csv.Error) as error:
    raise RecordError(f"{path} is no table of gaps: {error!r}") from error


def _cell(text: str | None) -> str:
  """Returns the text of a cell; raises ValueError if its line is too short."""
  if text is None:
    raise ValueError("a line is shorter than the first one")
  return text


def add(path: pathlib.Path, rows: Sequence[RowKind]) -> None:
  """Adds one or more finished runs to a file; replaces lines of the same runs.

  Raises:
    RecordError: If the file cannot be read or written, or if its columns are
      not the fields of the runs.
  """
  make_directory(path.parent)
  with _write_lock(path):
    rows_by_key = {}
    for row in [*read_rows(path, type(rows[0])), *rows]:
      rows_by_key[row.key] = row
    table = csv_table([dataclasses.asdict(row) for row in rows_by_key.values()])
    write_atomically(path, table)


def lock_path(path: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the file that a program locks while it trains the setting `name`.

  `path` is the file to which the finished runs are added.
  """
  return path.parent / f".{path.stem}" / f"{name}.lock"


@contextlib.contextmanager
def _write_lock(path: pathlib.Path) -> Iterator[None]:
  """Waits for and holds the lock that a program needs to add lines."""
  with files.opened_to_append(path.with_name(f".{path.name}.lock")) as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield
