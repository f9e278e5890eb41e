"""Lines of runs.csv and evaluations.csv, the results of sweeps.

A finished run is one line of runs.csv, and each of its evaluations is a line of
evaluations.csv beside it. `docs/results/README.md` describes the columns.
"""

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.report.run import LoadedRun
from experiments.sweeps import columns
from experiments.sweeps.runs import SweepRun


@dataclasses.dataclass(frozen=True)
class RunRow:
  """A finished run: one line of runs.csv.

  Losses are in nats a token; all but `best_loss` are NaN if the run diverged.
  `loss` and `judge_loss` are those of the outer parameters, or of their average
  if the run keeps one. The *flush* makes the exchanges that are still due after
  the last inner step. The *judge text* is held-out files by which nothing is
  chosen.

  Attributes:
    study: Name of the sweep, e.g. "replicas_main".
    run: Name of the run (`run_id`), which no other line of the file has.
    setting: Name of the setting: runs that differ only in the seed share it.
    config: Cells of the config, by column (`columns.cells_of`).
    parameters: Number of parameters of the model.
    tokens: Number of tokens that all replicas together were trained on.
    sent_bytes: Bytes that one replica sent, flush included.
    loss: Validation loss after the flush.
    judge_loss: Loss on the judge text after the flush; NaN if the run had none.
    loss_newest: Validation loss of the newest outer parameters of a run that
      keeps an average; NaN if unknown.
    judge_loss_newest: Loss on the judge text of the newest outer parameters of
      a run that keeps an average; NaN if unknown.
    replica_mean_loss: Validation loss of the mean of the replicas' parameters,
      after the flush.
    best_loss: Lowest validation loss over all evaluations, for the same
      parameters as `loss`; NaN if there was no evaluation.
    baseline: Name of the setting with which the run is compared; empty if there
      is none, or if the run is a baseline itself.
    seconds: Wall time of the run (seconds).
    failure: Why the run diverged, in one line; empty if it did not.
    corpus: Digest of the text that the run read.
    platform: Backend and devices of JAX.
    python: Version of Python.
    jax: Version of JAX.
    revision: Commit of the source code that the run used; empty if unknown.
    cores: Number of CPU cores that the run could use; 0 if unknown.
  """

  study: str
  run: str
  setting: str
  config: Mapping[str, Any]
  parameters: int
  tokens: int
  sent_bytes: int
  loss: float
  judge_loss: float
  loss_newest: float
  judge_loss_newest: float
  replica_mean_loss: float
  best_loss: float
  baseline: str
  seconds: float
  failure: str
  corpus: str
  platform: str
  python: str
  jax: str
  revision: str
  cores: int

  @property
  def seed(self) -> int:
    """Seed of the run."""
    return self.config["seed"]

  @property
  def steps(self) -> int:
    """Number of inner steps."""
    return self.config["steps"]

  @property
  def cells(self) -> dict[str, Any]:
    """Cells of the line by column, except for the column `gap`."""
    cells = {name: getattr(self, name) for name in RESULTS}
    return cells | dict(self.config)


@dataclasses.dataclass(frozen=True)
class EvaluationRow:
  """One evaluation of a finished run: one line of evaluations.csv.

  Attributes:
    run: Name of the run, as in its `RunRow`.
    step: Number of inner steps before the evaluation.
    tokens: Tokens that all replicas together had seen.
    sent_bytes: Bytes that one replica had sent.
    loss: Validation loss (nats a token) of the outer parameters, or of their
      average if the run keeps one.
    flushed: Whether this is the last evaluation, after the exchanges that were
      still due.
  """

  run: str
  step: int
  tokens: int
  sent_bytes: int
  loss: float
  flushed: bool


# Types of the columns that every runs.csv has, by name.
RESULTS = {
  name: kind
  for name, kind in typing.get_type_hints(RunRow).items()
  if name != "config"
}
CONFIG = {column: columns.kind_of(column) for column in columns.FIELDS}
_FIRST = ("study", "run", "setting")
# All columns in their order. A key keeps its first place.
RUN_TYPES = {
  **dict.fromkeys(_FIRST, str),
  **CONFIG,
  **dict.fromkeys(("parameters", "tokens", "sent_bytes"), int),
  **dict.fromkeys(("loss", "judge_loss"), float),
  "baseline": str,
  "gap": float,
  **RESULTS,
}
EVALUATION_TYPES = typing.get_type_hints(EvaluationRow)


def run_id(study: str, digest: str, corpus: str) -> str:
  """Returns the name of a run, e.g. "replicas_main/bf9984aefb55-94ff7b".

  Args:
    study: Name of the sweep.
    digest: Digest of the config (`SweepRun.digest`).
    corpus: Digest of the text. The name has its first six digits.
  """
  return f"{study}/{digest}-{corpus[:6]}"


def row_of(
  loaded_run: LoadedRun,
  run: SweepRun,
  study: str,
  baseline: str,
  failure: str,
  cores: int,
) -> RunRow:
  """Returns the results in a run directory as a line of runs.csv.

  Args:
    loaded_run: Content of the run directory.
    run: The run with its config, as the sweep lists it.
    study: Name of the sweep.
    baseline: As in `RunRow`.
    failure: As in `RunRow`. If it is not empty, all losses but `best_loss` are
      NaN.
    cores: As in `RunRow`.
  """
  record = loaded_run.record
  losses = [evaluation.outer_loss for evaluation in loaded_run.evaluations]
  result = None if failure else loaded_run.result
  corpus = record["corpus_digest"]
  return RunRow(
    study=study,
    run=run_id(study, run.digest, corpus),
    setting=run.name,
    config=columns.cells_of(run),
    parameters=parameter_count(run.config.model.shape),
    tokens=loaded_run.tokens,
    sent_bytes=loaded_run.total_sent_bytes,
    loss=result.outer_loss if result else math.nan,
    judge_loss=result.judge_loss if result else math.nan,
    loss_newest=math.nan,
    judge_loss_newest=math.nan,
    replica_mean_loss=result.mean_loss if result else math.nan,
    best_loss=min(losses, default=math.nan),
    baseline=baseline,
    seconds=round(loaded_run.wall_s, 1),
    failure=failure,
    corpus=corpus,
    platform=record["platform"],
    python=record["versions"]["python"],
    jax=record["versions"]["jax"],
    revision=record["source_revision"] or "",
    cores=cores,
  )


def evaluations_of(run: LoadedRun, row: RunRow) -> list[EvaluationRow]:
  """Returns the evaluations in a run directory as lines of evaluations.csv."""
  return [
    EvaluationRow(
      run=row.run,
      step=evaluation.step,
      tokens=evaluation.tokens,
      sent_bytes=evaluation.total_sent_bytes,
      loss=evaluation.outer_loss,
      flushed=evaluation.flushed,
    )
    for evaluation in run.evaluations
  ]
