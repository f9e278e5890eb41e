"""Reads and writes runs.csv and evaluations.csv as tables of pandas.

The files may have the runs of several sweeps. In runs.csv the column `study`
names the sweep. In evaluations.csv the column `run` has the name of a run,
which begins with the name of its sweep.
"""

import io
import pathlib
from collections.abc import Iterable, Mapping, Sequence
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
from experiments.sweeps.rows import EVALUATION_TYPES, RUN_TYPES

# The committed runs of all sweeps.
COMMITTED = pathlib.Path(__file__).parents[2] / "docs/results/runs.csv"
# Types of the columns of a file in pandas, by type of the value.
_DTYPES = {str: "str", int: "Int64", float: "float64", bool: "boolean"}


def gaps(runs: pd.DataFrame) -> pd.Series:
  """Returns the gap of each run to the run of its baseline with the same seed.

  The gap is the loss of the run divided by the loss of the baseline's run,
  minus 1. The loss of a run is its loss on the judge text (held-out files by
  which nothing is chosen). A run without this loss counts with its loss on the
  validation text. The gap is NaN if the sweep has no run of the baseline with
  the same seed, text and number of tokens.

  `runs` is a table as `read_runs` returns it. The result has the same index.
  """
  is_judged = runs["judge_loss"].notna()
  losses = runs["judge_loss"].where(is_judged, runs["loss"])
  common = ["study", "seed", "corpus", "tokens"]
  # A run's `baseline` is the `setting` of the runs with which it is compared.
  # So in `bases` the column `baseline` has the setting of the line itself, and
  # the merge pairs each run with a line that is equal in all common columns.
  bases = runs[common].assign(baseline=runs["setting"], base_loss=losses)
  # With two bases, the merge would make two lines of a run.
  bases = bases.drop_duplicates([*common, "baseline"])
  paired = runs[[*common, "baseline"]].merge(bases, how="left")
  base_losses = paired["base_loss"].set_axis(runs.index)
  return losses / base_losses - 1


def evaluations_path(path: pathlib.Path) -> pathlib.Path:
  """Returns the path of evaluations.csv beside a runs.csv."""
  return path.with_name("evaluations.csv")


def read_runs(path: pathlib.Path) -> pd.DataFrame:
  """Reads a file runs.csv; a file that does not exist counts as empty.

  Cells of columns with dotted names are texts. An empty cell there means that
  the field has its default, or that it is not known.

  Raises:
    RecordError: If the file cannot be read or is damaged, e.g. has other
      columns or two lines of one run.
  """
  runs = _read(path, RUN_TYPES, "runs")
  # Reports the first line that repeats a run, if there is one.
  for _, line in runs[runs["run"].duplicated()].iterrows():
    raise RecordError(
      f"{path} is damaged: it has two lines of {line['setting']!r}, seed"
      f" {line['seed']}, on the text {line['corpus']}"
    )
  return runs


def read_evaluations(path: pathlib.Path) -> pd.DataFrame:
  """Reads the evaluations.csv beside a runs.csv.

  `path` is the path of runs.csv. Errors and missing files are as in
  `read_runs`.
  """
  return _read(evaluations_path(path), EVALUATION_TYPES, "evaluations")


def runs_table(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
  """Returns lines of runs.csv as a table like that of `read_runs`.

  A line has cells by column: values, or the texts of values. A cell that is
  missing, None or "" is empty.

  Raises:
    ValueError: If a text does not fit the type of its column.
  """
  return _table(lines, RUN_TYPES)


def evaluations_table(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
  """Returns lines of evaluations.csv as a table, as `runs_table` does."""
  return _table(lines, EVALUATION_TYPES)


def _table(
  lines: Sequence[Mapping[str, Any]], kinds: Mapping[str, type]
) -> pd.DataFrame:
  """Returns lines as a table whose columns have the types `kinds`.

  The cells of columns that `kinds` lacks are texts.
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
  """Writes evaluations.csv and runs.csv in place of earlier files.

  The sweeps (column `study`) are in alphabetical order. The gaps are computed
  anew. `path` is the path of runs.csv.

  Raises:
    RecordError: If a file cannot be written.
  """
  study = evaluations["run"].str.split("/").str[0]
  _write(evaluations_path(path), evaluations, study)
  *names, last = RUN_TYPES
  fields = sorted(set(map(str, runs)) - set(RUN_TYPES))
  # The last cell is never empty, so a line that was cut is noticed.
  runs = runs[[*names, *fields, last]].reset_index(drop=True)
  runs["gap"] = gaps(runs)
  _write(path, runs, runs["study"])


def replace_studies(
  path: pathlib.Path, runs: pd.DataFrame, evaluations: pd.DataFrame
) -> None:
  """Replaces some sweeps in runs.csv and evaluations.csv; others stay.

  The sweeps are those in `runs` (column `study`). `path` is the path of
  runs.csv, which is made if it is missing.

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
  """Copies the sweeps of a work directory to docs/results.

  There they replace the sweeps of the same names. `path` is the file runs.csv
  in the work directory. If there is no such file, no sweep is replaced.

  Raises:
    RecordError: If a file cannot be read or written, or is damaged.
  """
  source = pathlib.Path(path)
  replace_studies(COMMITTED, read_runs(source), read_evaluations(source))


def _write(path: pathlib.Path, table: pd.DataFrame, study: pd.Series) -> None:
  """Writes a CSV file, whose lines are sorted by their sweeps (`study`)."""
  order = np.argsort(study.to_numpy(), kind="stable")
  text = table.iloc[order].to_csv(index=False, lineterminator="\n")
  write_atomically(path, text)


def _read(
  path: pathlib.Path, kinds: Mapping[str, type], noun: str
) -> pd.DataFrame:
  """Reads a CSV file; a file that does not exist counts as empty.

  `kinds` has the types of the columns that the file must have. Other columns
  must have a dot in their names; their cells are texts. `noun` names the lines
  in messages. Raises RecordError if the file cannot be read or is damaged.
  """
  if not path.exists():
    return pd.DataFrame(
      {name: pd.Series(dtype=_DTYPES[kind]) for name, kind in kinds.items()}
    )
  if not path.is_file():
    raise RecordError(f"{path} has to be a file")  # A FIFO would never end.
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
  """Raises ValueError unless a table has all the columns `kinds`, each once.

  Other columns must have a dot in their names.
  """
  missing = sorted(set(kinds) - set(names))
  require(not missing, f"it lacks the column {missing[:1]}")
  others = [name for name in names if name not in kinds and "." not in name]
  require(not others, f"it has a column {shown(others[:1])}")
  require(len(names) == len(set(names)), "it has a column twice")


def _check_values(table: pd.DataFrame, kinds: Mapping[str, type]) -> None:
  """Raises ValueError if an int is below 0 or a float is infinite.

  `kinds` has the types of columns by name; all others have texts.
  """
  for name in map(str, table):
    kind = kinds.get(name, str)
    if kind is int:
      require(bool((table[name].dropna() >= 0).all()), f"a {name} is below 0")
    if kind is float:
      require(not np.isinf(table[name]).any(), f"a {name} is infinite")
