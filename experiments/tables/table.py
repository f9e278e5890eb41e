"""Tables of predictions: their rows, and functions that print and write them.

A prediction proves nothing if it was fitted on the published number in the same
row. So every XX
"""

import dataclasses
import enum
import functools
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure as Picture

from dilocox_jax.metrics.lines import write_atomically
from dilocox_jax.report.page import picture, write_page
from dilocox_jax.report.tables import csv_table, markdown_table
from experiments.tables.published import Figure


class Fit(enum.StrEnum):
  """On which published numbers the constants of a prediction were fitted."""

  NONE = "derived"
  HERE = "fitted on this row"
  ELSEWHERE = "fitted elsewhere"


@dataclasses.dataclass(frozen=True)
class Prediction:
  """A predicted number, beside the figure of a paper if there is one.

  Attributes:
    name: Name of the number.
    predicted: Predicted value in `unit`.
    unit: Unit, written as in `Figure`.
    kind: Where its constants were fitted.
    basis: A few words that say what was fitted or assumed.
    published: Figure of the paper; None for a number that no paper states.
    grid_steps: Error in steps of the paper's grid of settings, or None if the
      paper has no grid.
  """

  name: str
  predicted: float
  unit: str
  kind: Fit
  basis: str = ""
  published: Figure | None = None
  grid_steps: int | None = None

  @property
  def relative_error(self) -> float:
    """(predicted - published) / published; NaN if no paper has a figure."""
    published = self.published.value if self.published else math.nan
    return self.predicted / published - 1

  @property
  def error(self) -> str:
    """Text of the error: in grid steps if there is a grid, else in percent."""
    if self.grid_steps is not None:
      return f"{self.grid_steps:+d} steps" if self.grid_steps else "exact"
    return f"{self.relative_error:+.1%}" if self.published else ""


def beside(
  figure: Figure,
  predicted: float,
  kind: Fit,
  basis: str = "",
  grid_steps: int | None = None,
) -> Prediction:
  """Returns a prediction of a published figure, with its name and unit."""
  return Prediction(
    figure.name, predicted, figure.unit, kind, basis, figure, grid_steps
  )


@dataclasses.dataclass(frozen=True)
class Table:
  """One table: its rows, its notes, and the cells that readers see.

  Attributes:
    name: Name of the table's files, of letters and underscores.
    title: Title for readers.
    rows: All rows, which are written to CSV.
    paragraphs: Notes that say what was assumed, what the rows mean, and what
      they cannot test.
    header: Header of the table for readers. If it is empty, readers see `rows`.
    cells: Cells below `header`, one sequence for each line.
    pictures: (caption, figure) by name of the picture's file without suffix.
  """

  name: str
  title: str
  rows: Sequence[Prediction]
  paragraphs: Sequence[str]
  header: Sequence[str] = ()
  cells: Sequence[Sequence[str]] = ()
  pictures: Mapping[str, tuple[str, Picture]] = dataclasses.field(
    default_factory=dict
  )

  def shown(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Returns the header and the cells of the table for readers."""
    if self.header:
      return self.header, self.cells
    header = ("figure", "published", "predicted", "error", "kind", "basis")
    return header, [_cells(row) for row in self.rows]


def described(
  name: str,
  rows: Sequence[Prediction],
  header: Sequence[str] = (),
  cells: Sequence[Sequence[str]] = (),
  pictures: Mapping[str, tuple[str, Picture]] | None = None,
  **numbers: Any,
) -> Table:
  """Returns a table with its title and its notes from `notes.md`.

  Args:
    name: Name of the table.
    rows: All rows.
    header: Header of the table for readers. If it is empty, readers see `rows`.
    cells: Cells below `header`, one sequence for each line.
    pictures: (caption, figure) by name of the picture's file without suffix.
    **numbers: Values that replace the names in braces in that section.
  """
  texts = [text.format(**numbers) for text in _notes()[name]]
  title, *paragraphs = texts
  return Table(name, title, rows, paragraphs, header, cells, pictures or {})


@functools.cache
def _notes() -> dict[str, list[str]]:
  """Returns the title and paragraphs of each section of `notes.md`, by name."""
  text = pathlib.Path(__file__).with_name("notes.md").read_text("utf-8")
  sections = (section.split("\n\n") for section in text.split("\n## ")[1:])
  return {
    name: [" ".join(paragraph.split()) for paragraph in paragraphs]
    for name, *paragraphs in sections
  }


def rows_beside(
  figures: Mapping[str, Figure], *rows: tuple[str, float, Fit, str]
) -> list[Prediction]:
  """Returns rows that compare predictions with published figures.

  Args:
    figures: Figures of the paper, by name.
    *rows: (name of the figure, predicted value, kind, basis) of each row.
  """
  return [
    beside(figures[name], predicted, kind, basis)
    for name, predicted, kind, basis in rows
  ]


def _cells(row: Prediction) -> tuple[str, ...]:
  """Returns the texts of a row in the table for readers."""
  predicted, figure = short(row.predicted), row.published
  if figure is None:
    return row.name, "", f"{predicted} {row.unit}", "", row.kind, row.basis
  value = f"{figure.value:g} {figure.unit}"
  return (
    re.sub(r"^table \d+, ", "", figure.name),
    value if figure.is_verified else f"{value} (unverified)",
    predicted,
    row.error,
    row.kind,
    row.basis,
  )


def short(value: float) -> str:
  """Returns a number of about four digits."""
  return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.4g}"


_READING = (
  "Kinds: *derived* - nothing was fitted; *fitted on this row* - a constant"
  " was chosen to match it, alone or together with others; *fitted elsewhere*"
  " - its constants were chosen to match other rows. Figures marked unverified"
  " were not read in their paper."
)


def _data(row: Prediction) -> dict[str, Any]:
  """Returns a row's values by name of the column; None where there is none."""
  figure = row.published
  return {
    "figure": row.name,
    "unit": row.unit,
    "published": figure and figure.value,
    "predicted": row.predicted,
    "relative_error": figure and row.relative_error,
    "grid_steps": row.grid_steps,
    "kind": row.kind,
    "basis": row.basis,
    "source": figure and figure.source,
    "status": figure and figure.status,
    "note": figure and figure.note,
  }


def write_tables(
  tables: Sequence[Table], out_dir: pathlib.Path, command: str
) -> pathlib.Path:
  """Writes `report.md`, a CSV for each table, and `figures/`.

  Args:
    tables: Tables in the order in which they are shown.
    out_dir: Directory to which the files are written. It must exist.
    command: Command line that made the tables, which the page shows.

  Returns:
    The path of `report.md`.

  Raises:
    RecordError: If the disk is full or refuses to write.
  """
  lines = [_READING, ""]
  for table in tables:
    lines += [f"## {table.title}", "", *markdown_table(*table.shown()), ""]
    for name, (caption, figure) in table.pictures.items():
      lines += picture(figure, out_dir, name, caption)
      lines += [f"*{caption}*", ""]
    for paragraph in table.paragraphs:
      lines += [paragraph, ""]
    lines += [f"Every row, with its source: `{table.name}.csv`.", ""]
    rows = csv_table([*map(_data, table.rows)])
    write_atomically(out_dir / f"{table.name}.csv", rows)
  return write_page(out_dir, "Speed, published and predicted", lines, command)
