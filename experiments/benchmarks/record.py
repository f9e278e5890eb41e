"""What a benchmark leaves behind: a file for programs, a table for people."""

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dilocox_jax.metrics.lines import write_json
from dilocox_jax.report.text_tables import terminal_table

_SPREAD = ("median", "min", "max", "bound")


def spread(
  values: Sequence[float], bound: float, *, is_least: bool = False
) -> dict[str, float | bool]:
  """Returns the median and the ends of repeated measurements.

  Args:
    values: The measurements.
    bound: Goal of the median, set beforehand.
    is_least: Whether the bound is the least that is good; by default it is
      the most.
  """
  median = statistics.median(values)
  return {
    "median": median,
    "min": min(values),
    "max": max(values),
    "bound": bound,
    "is_within_bound": median >= bound if is_least else median <= bound,
  }


def spread_table(
  title: str, bound: str, rows: Mapping[str, Mapping], form: str
) -> Table:
  """Returns a table of spreads.

  Args:
    title: Title of the table.
    bound: Title of the column of bounds.
    rows: Values of `spread` by what was measured.
    form: Format of a value, e.g. ".3f".
  """
  header = ("measured", *_SPREAD[:-1], bound)
  cells = [
    (name, *(f"{row[key]:{form}}" for key in _SPREAD))
    for name, row in rows.items()
  ]
  return terminal_table(header, cells, title=title)


def keep_record(
  workdir: pathlib.Path, name: str, record: Mapping[str, Any], table: Table
) -> pathlib.Path:
  """Writes bench_NAME.json, shows the table and says where the file is.

  Args:
    workdir: Directory of the file.
    name: Name of the benchmark.
    record: All that was found, with a label that says how.
    table: The same for people.

  Returns:
    The path of the file.

  Raises:
    RecordError: The disk refused.
  """
  path = workdir / f"bench_{name}.json"
  write_json(path, record)
  Console().print(table)
  print(f"results: {path}")
  return path
