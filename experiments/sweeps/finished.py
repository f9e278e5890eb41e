"""The finished runs of one sweep, in runs.csv and evaluations.csv.

A run is finished on a text if runs.csv has a line of the sweep with the digest
of the run's config and the digest of this text. Both digests are in the name of
the run.
"""

import collections
import dataclasses
import math
import pathlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pandas as pd

from dilocox_jax.checks import require
from dilocox_jax.metrics.lines import RecordError, make_directory
from experiments.sweeps import columns
from experiments.sweeps.rows import (
  CONFIG,
  RESULTS,
  RUN_TYPES,
  EvaluationRow,
  RunRow,
  run_id,
)
from experiments.sweeps.runs import SweepRun, text_of
from experiments.sweeps.tables import (
  evaluations_path,
  evaluations_table,
  read_evaluations,
  read_runs,
  runs_table,
  write_tables,
)


class Rows:
  """The finished runs of one sweep, each a line of runs.csv.

  Attributes:
    path: Path of runs.csv, to which `add` writes. evaluations.csv is beside it.
    study: Name of the sweep.
    source: Path of the runs.csv that was read; after `add` it is `path`.
    runs: Lines of the sweep in their order, by name of the run (`RunRow.run`).
  """

  def __init__(
    self, path: pathlib.Path, study: str, start: pathlib.Path | None = None
  ):
    """Reads both files. A file that does not exist counts as empty.

    Args:
      path: Path of runs.csv. Lines of other sweeps in it are kept.
      study: Name of the sweep.
      start: Another runs.csv, which is read if `path` does not exist. The first
        `add` copies its lines of the sweep to `path`. None: there is none.

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
    # Only a loss may be empty (NaN).
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
    if self.source != path:  # Only runs of this sweep are copied to `path`.
      self._other_runs = self._other_runs[:0]
      self._other_evaluations = self._other_evaluations[:0]

  @property
  def settings(self) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and overrides of each finished run, as `runs.runs_of` takes them.

    The overrides are the values that make the config, by dotted name. A config
    that was trained on several texts is listed once, with the name in its last
    line.
    """
    by_config = {_without_text(row.run): row for row in self.runs.values()}
    return [
      (row.setting, columns.overrides_of(row.config))
      for row in by_config.values()
    ]

  def evaluations(self, row: RunRow) -> list[EvaluationRow]:
    """Returns the evaluations of a finished run, in order; may be empty."""
    return list(self._evaluations.get(row.run, ()))

  def row(self, run: SweepRun, corpus: str) -> RunRow | None:
    """Returns a run's line in runs.csv; None if it has none on this text.

    `corpus` is the digest of the text.
    """
    return self.runs.get(run_id(self.study, run.digest, corpus))

  def on_one_text(self, runs: Sequence[SweepRun]) -> list[RunRow | None]:
    """Returns the line of each run, all of them on one version of the text.

    Losses on two versions of a text, e.g. of Python's library, do not compare.
    So the version with the most lines of these runs is chosen. If two versions
    have equally many lines, the version with the later last line in runs.csv is
    chosen. If configs name several texts, a version of each text is chosen.

    Returns:
      An entry for each run; None for a run without a line on the version.
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
    """Counts the lines of `runs` that are not in `lines`: those on other texts.

    `lines` has a line, or None, for each run.
    """
    configs = {
      _without_text(run_id(self.study, run.digest, "")) for run in runs
    }
    num_lines = sum(_without_text(run) in configs for run in self.runs)
    return num_lines - len({row.run for row in lines if row})

  def add(self, row: RunRow, evaluations: Sequence[EvaluationRow]) -> None:
    """Adds a finished run, or replaces its line, and writes both files.

    `evaluations` replace those that the run had.

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


def _lines(table: pd.DataFrame) -> list[dict[str, Any]]:
  """Returns the cells of each line of a table, by column."""
  return [
    {str(name): value for name, value in line.items()}
    for line in table.to_dict("records")
  ]


def _without_text(run: str) -> str:
  """Returns the name of a run without the digest of its text.

  Example: "main/bf9984aefb55" for "main/bf9984aefb55-94ff7b".
  """
  return run.rpartition("-")[0]


def _run_row(cells: Mapping[str, Any], path: pathlib.Path) -> RunRow:
  """Converts the cells of a line of runs.csv, by column, to a `RunRow`.

  Raises RecordError, with the `path` of the file, if a cell of an int column is
  empty or the cell of a dotted column does not fit its field.
  """
  results = {name: cells[name] for name in RESULTS}
  config = {}
  try:
    for name, value in cells.items():
      is_missing = RUN_TYPES.get(name) is int and pd.isna(value)
      require(not is_missing, f"its {name} is empty")
      if name in CONFIG:
        config[name] = value
      elif name not in RUN_TYPES:
        # A dotted column: the text of a field's value, or empty.
        # Empty counts as the default. That is wrong for lines whose config is
        # not fully known, such as those of `ablate_*` (`convert`).
        config[name] = columns.value_of(name, value)
  except ValueError as error:
    raise RecordError(
      f"{path} is damaged: run {cells['run']!r}: {error}"
    ) from error
  if math.isnan(config["inner_momentum"]):
    config["inner_momentum"] = None
  # A dotted field that is None has its default and is left out; inner_momentum
  # stays, as in `cells_of`.
  config = {
    name: value
    for name, value in config.items()
    if value is not None or name in CONFIG
  }
  return RunRow(config=config, **results)
