"""Tables on the terminal, as a page, and as data, all from the same rows."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from dilocox_jax.metrics.lines import one_line, write_atomically, write_json
from dilocox_jax.report.page import PAGE, save_figure
from dilocox_jax.report.text_tables import csv_table, markdown_table
from experiments.tables.rows import Prediction, Table, TableRow

_READING = (
  "Kinds: *derived* - nothing was fitted; *fitted on this row* - a constant"
  " was chosen to match it, alone or together with others; *fitted elsewhere*"
  " - its constants were chosen to match other rows. Figures marked unverified"
  " were not read in their paper."
)


_FIELDS: tuple[str, ...] = (
  "figure",
  "unit",
  "published",
  "predicted",
  "relative_error",
  "grid_steps",
  "kind",
  "basis",
  "source",
  "status",
  "note",
)


def _data(row: TableRow | Prediction) -> dict[str, Any]:
  """A row by `_FIELDS`; what a prediction lacks is None."""
  if isinstance(row, Prediction):
    known = {
      "figure": row.name,
      "unit": row.unit,
      "predicted": _number(row.predicted),
      "kind": row.kind,
      "basis": row.basis,
    }
    return dict.fromkeys(_FIELDS) | known
  figure = row.published
  return {
    "figure": figure.name,
    "unit": figure.unit,
    "published": figure.value,
    "predicted": float(row.predicted),
    "relative_error": float(row.relative_error),
    "grid_steps": row.grid_steps,
    "kind": row.kind,
    "basis": row.basis,
    "source": figure.source,
    "status": figure.status,
    "note": figure.note,
  }


def _number(value: float) -> float | None:
  # JSON has no infinity: what cannot be reached is no number.
  return float(value) if math.isfinite(value) else None


def write_tables(
  tables: Sequence[Table], out_dir: pathlib.Path, command: str
) -> pathlib.Path:
  """Writes `report.md`, `tables.json`, a CSV a table, and `figures/`.

  Args:
    tables: In the order they are shown.
    out_dir: Where to; it must exist.
    command: The command line, for the record.

  Returns:
    The path of `report.md`.

  Raises:
    RecordError: The disk refused.
  """
  lines = ["# Speed, published and predicted", "", f"    {command}", ""]
  lines += [_READING, ""]
  for table in tables:
    lines += [f"## {table.title}", "", *markdown_table(*table.shown()), ""]
    for name, (caption, figure) in table.pictures.items():
      save_figure(figure, out_dir / "figures" / f"{name}.png")
      lines += [f"![{caption}](figures/{name}.png)", "", f"*{caption}*", ""]
    for paragraph in table.paragraphs:
      lines += [paragraph, ""]
    lines += [f"Every row, with its source: `{table.name}.csv`.", ""]
  data = {table.name: list(map(_data, table.rows)) for table in tables}
  with one_line(out_dir):
    for name, rows in data.items():
      write_atomically(out_dir / f"{name}.csv", csv_table(rows))
    write_json(out_dir / "tables.json", data)
    path = out_dir / PAGE
    write_atomically(path, "\n".join(lines).rstrip() + "\n")
  return path


def print_tables(tables: Sequence[Table], console: Console) -> None:
  """Prints the tables.

  Args:
    tables: In order.
    console: Where to print.
  """
  for table in tables:
    header, cells = table.shown()
    grid = Grid(title=table.title, title_justify="left")
    for column in header:
      grid.add_column(column, overflow="fold")
    for row in cells:
      grid.add_row(*map(escape, row))
    console.print(grid)
