"""Finished runs of the study of the gap, one line of a CSV file each.

Several programs may add lines to one file.
"""

import contextlib
import csv
import dataclasses
import fcntl
import pathlib
import typing
from collections.abc import Iterator, Sequence

from dilocox_jax import files
from dilocox_jax.metrics.lines import (
  RecordError,
  make_directory,
  whole_lines,
  write_atomically,
)
from dilocox_jax.report.tables import csv_table
from experiments.gaps.settings import Setting


@dataclasses.dataclass(frozen=True)
class GapRow:
  """A finished run.

  Attributes:
    size: Name of the model (`settings.SIZES`).
    parameters: Its number of parameters.
    method: Name of the method.
    replicas: M; 1 for AllReduce, whose one replica takes all sequences.
    batch: Sequences of a replica's step.
    steps: Inner steps.
    interval: H; 0 for AllReduce.
    delay: Inner steps from a send to its apply.
    bits: Bits of a value that is sent.
    warm_start: Data-parallel steps at the beginning.
    optimizer: Inner optimizer.
    momentum: Its momentum.
    outer_momentum: Nesterov momentum of the outer step.
    source: Name of the text.
    sequence_length: Tokens that a sequence predicts.
    inner_rate: Highest inner learning rate.
    outer_rate: Outer learning rate; 0 for AllReduce.
    seed: Seed of the first parameters and of the order of the text.
    corpus: Digest of the text.
    tokens: Tokens that all replicas together were trained on.
    sent_bytes: Bytes that one replica sent, flush included.
    loss_newest: Loss of the newest outer parameters (nats a token).
    loss_average: Loss of their average, by which rates are chosen.
    judge_newest: Loss of the newest ones on the text that chooses nothing.
    judge_average: Loss of the average on that text.
    seconds: Time of the program, divided by the number of its runs.
    platform: Backend and devices.
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

  @property
  def setting(self) -> Setting:
    """The setting of the run."""
    names = [field.name for field in dataclasses.fields(Setting)]
    return Setting(**{name: getattr(self, name) for name in names})

  @property
  def run(self) -> tuple[float, float, int]:
    """What tells the run from others of its setting."""
    return self.inner_rate, self.outer_rate, self.seed


def by_setting(rows: Sequence[GapRow]) -> dict[Setting, list[GapRow]]:
  """Returns runs by their settings."""
  found: dict[Setting, list[GapRow]] = {}
  for row in rows:
    found.setdefault(row.setting, []).append(row)
  return found


def read(path: pathlib.Path) -> list[GapRow]:
  """Returns the lines of a file; none if there is no file.

  Raises:
    RecordError: If the file has other columns.
  """
  types = typing.get_type_hints(GapRow)
  try:
    lines = csv.DictReader(line.decode() for line in whole_lines(path))
    return [
      GapRow(**{name: types[name](text) for name, text in line.items()})
      for line in lines
    ]
  except (KeyError, TypeError, ValueError, csv.Error) as error:
    raise RecordError(f"{path} is no table of gaps: {error!r}") from error


def add(path: pathlib.Path, rows: Sequence[GapRow]) -> None:
  """Adds lines to a file, which is replaced as a whole.

  Raises:
    RecordError: If the file has other columns or cannot be written.
  """
  make_directory(path.parent)
  with _alone(path):
    known = {(row.setting, row.run, row.corpus): row for row in read(path)}
    known |= {(row.setting, row.run, row.corpus): row for row in rows}
    table = csv_table([dataclasses.asdict(row) for row in known.values()])
    write_atomically(path, table)


def lock_path(path: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the lock of a setting whose lines go to a file.

  Args:
    path: The file.
    name: Name of the setting.
  """
  return path.parent / f".{path.stem}" / f"{name}.lock"


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[None]:
  """Waits until no other program adds lines."""
  with files.opened_to_append(path.with_name(f".{path.name}.lock")) as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield
