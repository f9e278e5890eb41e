"""Finished runs of sweeps, in two tidy CSV files that other programs read.

A finished run is one line of runs.csv, and each of its evaluations is a line of
evaluations.csv beside it. Both are written when the run has ended. The files
may have the runs of several sweeps: the column `study` has the name of the
sweep. `docs/results/README.md` describes the columns. A run of a sweep is not
trained again if there is a line of the same config on the same text.
"""

import collections
import dataclasses
import io
import math
import pathlib
import typing
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dilocox_jax.checks import require, shown
from dilocox_jax.metrics.lines import (
  RecordError,
  make_directory,
  one_line,
  write_atomically,
)
from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.report.run import LoadedRun
from experiments.sweeps import columns
from experiments.sweeps.runs import SweepRun, text_of

# The committed runs of all sweeps.
COMMITTED = pathlib.Path(__file__).parents[2] / "docs/results/runs.csv"
# Types of the columns of a file in pandas, by type of the value.
_DTYPES = {str: "str", int: "Int64", float: "float64", bool: "boolean"}


@dataclasses.dataclass(frozen=True)
class RunRow:
  """A finished run: one line of runs.csv.

  The line also has a cell for each entry of `config`. The file has one more
  column, `gap`, which follows from other lines (`gaps`).

  Attributes:
    study: Name of the sweep, e.g. "replicas_main".
    run: Name of the run (`run_id`), which no other line of the file has.
    setting: Name of the setting. Runs that differ only in the seed have the
      same.
    config: Cells of the config, by column (`columns.cells_of`).
    parameters: Number of parameters of the model.
    tokens: Number of tokens that all replicas together were trained on.
    sent_bytes: Bytes that one replica sent, flush included.
    loss: Validation loss after the flush (nats a token) of the outer
      parameters, or of their average if the run keeps one; NaN if the run
      diverged.
    judge_loss: Loss after the flush on the judge text (nats a token), of the
      same parameters as `loss`. No setting is chosen by this text. NaN if the
      run diverged or had no such text.
    loss_newest: Validation loss (nats a token) of the newest outer parameters
      of a run that keeps an average; NaN if unknown.
    judge_loss_newest: Their loss on the judge text; NaN if unknown.
    replica_mean_loss: Validation loss of the mean of the replicas' parameters
      after the flush (nats a token); NaN if the run diverged.
    best_loss: Lowest validation loss over all evaluations (nats a token), of
      the same parameters as `loss`; NaN if there was no evaluation.
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
    """Cells of the line by column, without `gap`."""
    cells = {name: getattr(self, name) for name in _RESULTS}
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
    flushed: Whether this is the last evaluation, after the flush.
  """

  run: str
  step: int
  tokens: int
  sent_bytes: int
  loss: float
  flushed: bool


# Types of the columns that every runs.csv has, by name.
_RESULTS = {
  name: kind
  for name, kind in typing.get_type_hints(RunRow).items()
  if name != "config"
}
_CONFIG = {column: columns.kind_of(column) for column in columns.FIELDS}
_FIRST = ("study", "run", "setting")
# All columns in their order. A key keeps its first place.
_RUN_TYPES = {
  **dict.fromkeys(_FIRST, str),
  **_CONFIG,
  **dict.fromkeys(("parameters", "tokens", "sent_bytes"), int),
  **dict.fromkeys(("loss", "judge_loss"), float),
  "baseline": str,
  "gap": float,
  **_RESULTS,
}
_EVALUATION_TYPES = typing.get_type_hints(EvaluationRow)


def run_id(study: str, digest: str, corpus: str) -> str:
  """Returns the name of a run, e.g. "replicas_main/bf9984aefb55-94ff7b".

  Args:
    study: Name of the sweep.
    digest: Digest of the config (`SweepRun.digest`).
    corpus: Digest of the text. The name has its first six digits.
  """
  return f"{study}/{digest}-{corpus[:6]}"


class Rows:
  """The finished runs of one sweep, and the two files that have them.

  Attributes:
    path: Path of runs.csv, to which `add` writes. evaluations.csv is beside it.
    study: Name of the sweep.
    source: Path of the file that has the present content: `path`, or `start`
      until the first run is added.
    runs: Lines of the sweep in their order, by name of the run.
  """

  def __init__(
    self, path: pathlib.Path, study: str, start: pathlib.Path | None = None
  ):
    """Reads the files. A file that does not exist counts as empty.

    Args:
      path: Path of runs.csv. Lines of other sweeps in it are kept.
      study: Name of the sweep.
      start: Another runs.csv, which is read if `path` does not exist. The first
        `add` copies its runs of the sweep, and their evaluations, to `path`.
        None: a new sweep begins without runs.

    Raises:
      RecordError: If a file cannot be read, is damaged or has other columns.
    """
    self.path = path
    self.study = study
    self.source = start if start and not path.exists() else path
    runs = read_runs(self.source)
    evaluations = read_evaluations(self.source)
    is_own = runs["study"] == study
    # A process that was killed between the writes of the two files left
    # evaluations without a line of their run.
    has_line = evaluations["run"].isin(runs["run"])
    is_own_evaluation = evaluations["run"].isin(runs.loc[is_own, "run"])
    self.runs = {
      cells["run"]: _run_row(cells, self.source)
      for cells in _lines(runs[is_own])
    }
    self._evaluations: dict[str, list[EvaluationRow]] = {}
    own_evaluations = evaluations[is_own_evaluation]
    if own_evaluations.drop(columns="loss").isna().any(axis=None):
      raise RecordError(
        f"{evaluations_path(self.source)} is damaged: a line of {study} has an"
        " empty cell"
      )
    for cells in _lines(own_evaluations):
      row = EvaluationRow(**cells)
      self._evaluations.setdefault(row.run, []).append(row)
    self._other_runs = runs[~is_own]
    self._other_evaluations = evaluations[has_line & ~is_own_evaluation]
    if self.source != path:
      self._other_runs = self._other_runs[:0]
      self._other_evaluations = self._other_evaluations[:0]

  @property
  def settings(self) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and overrides of each finished run, as `runs.runs_of` takes them.

    A run with lines on several texts is listed once, with the name and the
    overrides of the last of these lines.
    """
    by_config = {_without_text(row.run): row for row in self.runs.values()}
    return [
      (row.setting, columns.overrides_of(row.config))
      for row in by_config.values()
    ]

  def evaluations(self, row: RunRow) -> list[EvaluationRow]:
    """Returns the evaluations of a finished run, in order.

    Args:
      row: The line of the run.

    Returns:
      The lines of its evaluations; empty if evaluations.csv has none.
    """
    return list(self._evaluations.get(row.run, ()))

  def row(self, run: SweepRun, corpus: str) -> RunRow | None:
    """Returns the line of a run on a text; None if there is none.

    Args:
      run: The run.
      corpus: Digest of the text.
    """
    return self.runs.get(run_id(self.study, run.digest, corpus))

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
    corpora_by_config: dict[str, list[str]] = {}
    last_line: dict[str, int] = {}
    for number, row in enumerate(self.runs.values()):
      config = _without_text(row.run)
      corpora_by_config.setdefault(config, []).append(row.corpus)
      last_line[row.corpus] = number
    # How many lines of the runs each version has, by text of the config.
    num_lines: dict[Hashable, collections.Counter[str]] = {}
    for run in runs:
      counter = num_lines.setdefault(text_of(run.config), collections.Counter())
      config = _without_text(run_id(self.study, run.digest, ""))
      counter.update(corpora_by_config.get(config, ()))
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
    configs = {
      _without_text(run_id(self.study, run.digest, "")) for run in runs
    }
    num_lines = sum(_without_text(run) in configs for run in self.runs)
    return num_lines - len({row.run for row in lines if row})

  def add(self, row: RunRow, evaluations: Sequence[EvaluationRow]) -> None:
    """Adds a finished run, and writes both files.

    A line of the same run is replaced. The evaluations are written first: if
    the process is killed between the two writes, no run has a line without its
    evaluations.

    Args:
      row: Line of the finished run, of the same sweep.
      evaluations: Evaluations of the run, in order.

    Raises:
      RecordError: If the files cannot be written.
    """
    make_directory(self.path.parent)
    self.source = self.path
    self._evaluations[row.run] = list(evaluations)
    self.runs[row.run] = row
    own_runs = runs_table([row.cells for row in self.runs.values()])
    own_evaluations = evaluations_table(
      [
        dataclasses.asdict(evaluation)
        for evaluations in self._evaluations.values()
        for evaluation in evaluations
      ]
    )
    write_tables(
      self.path,
      pd.concat([self._other_runs, own_runs]),
      pd.concat([self._other_evaluations, own_evaluations]),
    )


def gaps(runs: pd.DataFrame) -> pd.Series:
  """Returns the gap of each run to the run of its baseline with its seed.

  The gap is the loss of the run divided by the loss of the baseline, minus 1.
  Both are losses on the judge text where the run has one, and else on the
  validation text. The gap is NaN if the study has no run of the baseline with
  this seed, text and number of tokens.

  Args:
    runs: Lines of runs.csv.
  """
  is_judged = runs["judge_loss"].notna()
  losses = runs["judge_loss"].where(is_judged, runs["loss"])
  common = ["study", "seed", "corpus", "tokens"]
  bases = runs[common].assign(baseline=runs["setting"], base_loss=losses)
  bases = bases.drop_duplicates([*common, "baseline"])
  paired = runs[[*common, "baseline"]].merge(bases, how="left")
  base_losses = paired["base_loss"].set_axis(runs.index)
  return losses / base_losses - 1


def evaluations_path(path: pathlib.Path) -> pathlib.Path:
  """Returns the path of evaluations.csv beside a runs.csv."""
  return path.with_name("evaluations.csv")


def read_runs(path: pathlib.Path) -> pd.DataFrame:
  """Reads runs.csv; a file that does not exist counts as empty.

  Cells of columns with dotted names are texts. An empty cell there means that
  the field has its default, or that it is not known.

  Args:
    path: Path of the file.

  Raises:
    RecordError: If the file cannot be read, ends within a line, has other
      columns, has a cell that does not fit its column, or has two lines of one
      run.
  """
  runs = _read(path, _RUN_TYPES, "runs")
  for _, line in runs[runs["run"].duplicated()].iterrows():
    raise RecordError(
      f"{path} is damaged: it has two lines of {line['setting']!r}, seed"
      f" {line['seed']}, on the text {line['corpus']}"
    )
  return runs


def read_evaluations(path: pathlib.Path) -> pd.DataFrame:
  """Reads the evaluations.csv beside a runs.csv, as `read_runs` does.

  Args:
    path: Path of runs.csv.
  """
  return _read(evaluations_path(path), _EVALUATION_TYPES, "evaluations")


def runs_table(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
  """Returns lines of runs.csv as a table like that of `read_runs`.

  Args:
    lines: Cells of each line by column: values, or the texts of values. A cell
      that is missing, None or "" is empty.
  """
  return _table(lines, _RUN_TYPES)


def evaluations_table(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
  """Returns lines of evaluations.csv as a table, as `runs_table` does."""
  return _table(lines, _EVALUATION_TYPES)


def _table(
  lines: Sequence[Mapping[str, Any]], kinds: Mapping[str, type]
) -> pd.DataFrame:
  """Returns lines as a table whose columns have the right types.

  Args:
    lines: Cells of each line by column.
    kinds: Types of the columns by name. Other columns get texts.
  """
  others = {name for line in lines for name in line if name not in kinds}
  values_by_column = {}
  for name, kind in [*kinds.items(), *((name, str) for name in sorted(others))]:
    values = []
    for line in lines:
      value = line.get(name)
      if value is None or value == "":
        value = "" if kind is str else None
      elif kind is bool:
        value = str(value) == "True"
      else:
        value = kind(value)
      values.append(value)
    values_by_column[name] = pd.Series(values, dtype=_DTYPES[kind])
  return pd.DataFrame(values_by_column)


def write_tables(
  path: pathlib.Path, runs: pd.DataFrame, evaluations: pd.DataFrame
) -> None:
  """Writes evaluations.csv and runs.csv; each replaces an earlier file.

  The studies are in alphabetical order. The gaps are computed anew.

  Args:
    path: Path of runs.csv.
    runs: Its lines, without gaps or with old ones.
    evaluations: Lines of evaluations.csv.

  Raises:
    RecordError: If a file cannot be written.
  """
  study = evaluations["run"].str.split("/").str[0]
  _write(evaluations_path(path), evaluations, study)
  *names, last = _RUN_TYPES
  fields = sorted(set(map(str, runs)) - set(_RUN_TYPES))
  # The last cell is never empty, so a line that was cut is noticed.
  runs = runs[[*names, *fields, last]].reset_index(drop=True)
  runs["gap"] = gaps(runs)
  _write(path, runs, runs["study"])


def replace_studies(
  path: pathlib.Path, runs: pd.DataFrame, evaluations: pd.DataFrame
) -> None:
  """Writes all runs of some studies into the two files, and keeps the others.

  Args:
    path: Path of runs.csv, which is made if it is missing. Lines of the studies
      that it has already are removed.
    runs: The new lines.
    evaluations: The evaluations of these runs.

  Raises:
    RecordError: If a file cannot be read or written, or is damaged.
  """
  make_directory(path.parent)
  old_runs = read_runs(path)
  old_evaluations = read_evaluations(path)
  kept_runs = old_runs[~old_runs["study"].isin(runs["study"])]
  is_kept = old_evaluations["run"].isin(kept_runs["run"])
  write_tables(
    path,
    pd.concat([kept_runs, runs]),
    pd.concat([old_evaluations[is_kept], evaluations]),
  )


def commit(path: str) -> None:
  """Replaces the runs of a sweep in `COMMITTED` by those of a work directory.

  Args:
    path: The file runs.csv in the work directory.

  Raises:
    RecordError: If a file cannot be read or written, or is damaged.
  """
  source = pathlib.Path(path)
  replace_studies(COMMITTED, read_runs(source), read_evaluations(source))


def _write(path: pathlib.Path, table: pd.DataFrame, study: pd.Series) -> None:
  """Writes a CSV file, sorted by study.

  Args:
    path: Path of the file.
    table: Its lines.
    study: Name of the study of each line.
  """
  order = np.argsort(study.to_numpy(), kind="stable")
  text = table.iloc[order].to_csv(index=False, lineterminator="\n")
  write_atomically(path, text)


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
    run: The run of the sweep that was trained there.
    study: Name of the sweep.
    baseline: Name of the setting with which the run is compared; empty if there
      is none.
    failure: Why the run diverged, in one line; empty if it did not.
    cores: Number of CPU cores that the run could use; 0 if unknown.
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
  """Returns the evaluations in a run directory as lines of evaluations.csv.

  Args:
    run: Content of the run directory.
    row: Line of the run.
  """
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


def _lines(table: pd.DataFrame) -> list[dict[str, Any]]:
  """Returns the cells of each line of a table, by column."""
  return [
    {str(name): value for name, value in line.items()}
    for line in table.to_dict("records")
  ]


def _without_text(run: str) -> str:
  """Returns the name of a run without the digits of its text."""
  return run.rpartition("-")[0]


def _run_row(cells: Mapping[str, Any], path: pathlib.Path) -> RunRow:
  """Returns a line of runs.csv whose config is known.

  Args:
    cells: Cells of the line by column (`read_runs`).
    path: Path of the file, for messages.

  Raises:
    RecordError: If a cell is empty that must not be, or does not fit the field
      of its column.
  """
  results = {name: cells[name] for name in _RESULTS}
  config = {}
  try:
    for name, value in cells.items():
      is_missing = _RUN_TYPES.get(name) is int and pd.isna(value)
      require(not is_missing, f"its {name} is empty")
      if name in _CONFIG:
        config[name] = value
      elif name not in _RUN_TYPES:
        config[name] = columns.value_of(name, value)
  except ValueError as error:
    raise RecordError(
      f"{path} is damaged: run {cells['run']!r}: {error}"
    ) from error
  if math.isnan(config["inner_momentum"]):
    config["inner_momentum"] = None
  config = {
    name: value
    for name, value in config.items()
    if value is not None or name in _CONFIG
  }
  return RunRow(config=config, **results)


def _read(
  path: pathlib.Path, kinds: Mapping[str, type], noun: str
) -> pd.DataFrame:
  """Reads a CSV file; a file that does not exist counts as empty.

  Args:
    path: Path of the file.
    kinds: Types of the columns that it must have, by name. Other columns must
      have a dot in their names; their cells are texts.
    noun: What its lines are, for messages.

  Raises:
    RecordError: If the file cannot be read, ends within a line, has other
      columns, or has a cell that does not fit its column.
  """
  if not path.exists():
    return pd.DataFrame(
      {name: pd.Series(dtype=_DTYPES[kind]) for name, kind in kinds.items()}
    )
  with one_line(path, "read"):
    content = path.read_bytes()
  try:
    # The file is replaced as a whole, so a line without an end was cut.
    require(content.endswith(b"\n"), "its last line is cut")
    header = pd.read_csv(io.BytesIO(content), header=None, nrows=1, dtype=str)
    names = list(header.iloc[0])
    _check_columns(names, kinds)
    numbers = [name for name in names if kinds.get(name, str) is not str]
    table = pd.read_csv(
      io.BytesIO(content),
      dtype={name: _DTYPES[kinds.get(name, str)] for name in names},
      keep_default_na=False,
      na_values={name: [""] for name in numbers},
    )
    # A line with more cells than columns makes pandas take an index from it.
    is_longer = not isinstance(table.index, pd.RangeIndex)
    require(not is_longer, "a line is longer than the others")
    _check_values(table, kinds)
  except (TypeError, ValueError, OverflowError) as error:
    reason = " ".join(str(error).split())
    raise RecordError(f"{path} is no table of {noun}: {reason}") from error
  return table


def _check_columns(names: Sequence[str], kinds: Iterable[str]) -> None:
  """Raises ValueError unless a table has the expected columns, each once.

  Args:
    names: Columns of the table.
    kinds: Columns that it must have, in any order. Other columns must have a
      dot in their names.
  """
  missing = sorted(set(kinds) - set(names))
  require(not missing, f"it lacks the column {missing[:1]}")
  others = [name for name in names if name not in kinds and "." not in name]
  require(not others, f"it has a column {shown(others[:1])}")
  require(len(names) == len(set(names)), "it has a column twice")


def _check_values(table: pd.DataFrame, kinds: Mapping[str, type]) -> None:
  """Raises ValueError if an int is below 0 or a float is infinite.

  Args:
    table: The table.
    kinds: Types of its columns by name. Other columns have texts.
  """
  for name in map(str, table):
    kind = kinds.get(name, str)
    if kind is int:
      require(bool((table[name].dropna() >= 0).all()), f"a {name} is below 0")
    if kind is float:
      require(not np.isinf(table[name]).any(), f"a {name} is infinite")
