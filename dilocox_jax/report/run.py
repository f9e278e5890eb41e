"""A run directory read back as one value.

The figures, the page and the comparison all start here, so a field has one
reader. A run that is not finished yet, or was killed, is still a run: what is
missing is empty, and `finished` says whether it ended.
"""

import dataclasses
import json
import math
import pathlib
from typing import Any

from dilocox_jax.metrics import (
  Evaluation,
  RoundRow,
  Timing,
  from_json,
  read_rows,
)
from dilocox_jax.metrics.lines import Directory
from dilocox_jax.metrics.recorder import METRICS, TIMING
from dilocox_jax.metrics.run_record import CONFIG, RECORD


@dataclasses.dataclass(frozen=True)
class LoadedRun:
  """What a run directory says.

  Attributes:
    workdir: The directory.
    config: The whole config.
    record: Versions, revision, corpus, method and sizes.
    rounds: Training rows in order.
    evaluations: Validation rows in order, the closing one last.
    finished: Whether the closing row is there.
    timings: Durations in order.
  """

  workdir: pathlib.Path
  config: dict[str, Any]
  record: dict[str, Any]
  rounds: list[RoundRow]
  evaluations: list[Evaluation]
  finished: bool
  timings: list[Timing]

  @property
  def result(self) -> Evaluation | None:
    """The last validation, or None before the first."""
    return self.evaluations[-1] if self.evaluations else None

  @property
  def validation_loss(self) -> float:
    """Outer parameters' loss at the last validation; NaN before the first."""
    return self.result.outer_loss if self.result else math.nan

  @property
  def total_sent_bytes(self) -> int:
    """What one replica has put on the wire so far."""
    return _furthest(self, "total_sent_bytes")

  @property
  def steps(self) -> int:
    """Inner steps finished."""
    return _furthest(self, "step")

  @property
  def tokens(self) -> int:
    """Tokens seen by all replicas together."""
    return _furthest(self, "tokens")

  @property
  def wall_s(self) -> float:
    """Sum of all durations."""
    return math.fsum(timing.wall_s for timing in self.timings)

  @property
  def tokens_per_s(self) -> float:
    """Training throughput over the rounds' durations; NaN without rounds."""
    done = [t for t in self.timings if math.isfinite(t.tokens_per_s)]
    spent_s = math.fsum(t.wall_s for t in done)
    tokens = math.fsum(t.wall_s * t.tokens_per_s for t in done)
    return tokens / spent_s if spent_s else math.nan

  @property
  def corpus(self) -> str:
    """The text as reports name it; losses compare where the name is equal."""
    held_out = self.record.get("held_out_digest", "unknown windows")
    digest = self.record["corpus_digest"]
    return f"{self.record['corpus_name']} ({digest}, evaluated on {held_out})"


def _furthest(run: LoadedRun, field: str) -> int:
  last = [*run.rounds[-1:], *run.evaluations[-1:]]
  return max((getattr(row, field) for row in last), default=0)


def _read_object(path: pathlib.Path) -> dict[str, Any]:
  try:
    return dict(json.loads(path.read_bytes()))
  except FileNotFoundError:
    raise ValueError(
      f"{path.parent} is not a run directory: {path.name} is missing"
    ) from None
  except (OSError, ValueError, TypeError) as error:
    raise ValueError(f"{path} cannot be read: {error}") from error


def load_run(workdir: Directory) -> LoadedRun:
  """Reads a run directory.

  Args:
    workdir: Where a trainer wrote.

  Returns:
    The run; rows that are not there yet are empty lists.

  Raises:
    ValueError: It is not a run directory.
  """
  workdir = pathlib.Path(workdir)
  config, record = (_read_object(workdir / name) for name in (CONFIG, RECORD))
  rows = read_rows(workdir / METRICS)
  evaluations = [row for row in rows if row["kind"] in ("evaluation", "final")]
  return LoadedRun(
    workdir=workdir,
    config=config,
    record=record,
    rounds=[from_json(RoundRow, row) for row in rows if row["kind"] == "round"],
    evaluations=[from_json(Evaluation, row) for row in evaluations],
    finished=any(row["kind"] == "final" for row in evaluations),
    timings=[from_json(Timing, row) for row in read_rows(workdir / TIMING)],
  )
