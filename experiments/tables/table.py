"""Published figures, and tables of predictions beside them.

Some figures that people quote were never checked in the paper. So every figure
must name its source and its status, and a file in which one of them is missing
is refused. The caller says where the files are.

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

from dilocox_jax.checks import (
  in_front,
  json_object,
  known,
  of_type,
  one_of,
  require,
)
from dilocox_jax.metrics.lines import write_atomically
from dilocox_jax.report.page import picture, write_page
from dilocox_jax.report.tables import csv_table, markdown_table

STATUSES = ("published", "recalled, unverified")


@dataclasses.dataclass(frozen=True)
class Figure:
  """Holds one number of a paper.

  Attributes:
    name: Name of the figure, unique in its file.
    value: Value of the figure, in `unit`.
    unit: Unit as printed in the paper, e.g. "Gbit/s"; "ratio" for a number
      without a unit.
    source: Paper, and the table or section with the figure.
    status: Whether the figure was read in the paper, one of `STATUSES`.
    note: Remark for readers; may be empty.
  """

  name: str
  value: float
  unit: str
  source: str
  status: str
  note: str = ""

  def __post_init__(self):
    for field in ("name", "unit", "source"):
      require(getattr(self, field).strip() != "", f"{field} is missing")
    require(math.isfinite(self.value), f"value={self.value} must be finite")
    one_of("status", self.status, STATUSES)

  @property
  def is_verified(self) -> bool:
    """Whether the figure was read in its source."""
    return self.status == STATUSES[0]


def load_published(path: pathlib.Path) -> dict[str, Figure]:
  """Reads the figures of one paper.

  Args:
    path: Path of a JSON file {"paper": citation, "figures": [figure, ...]}.
      Every figure has the fields of `Figure`; the note may be left out.

  Returns:
    Figures by name, in the order of the file.

  Raises:
    ValueError: If the file cannot be read, or a field is missing, unknown or
      wrong. The message is one line that names the file and the figure.
  """
  with in_front(f"{path}: "):
    return _figures(path)


def _figures(path: pathlib.Path) -> dict[str, Figure]:
  try:
    content = json_object(path.read_text(encoding="utf-8"), "the file")
  except OSError as error:
    raise ValueError(error.strerror or "cannot be read") from error
  entries = content.get("figures")
  is_whole = set(content) == {"paper", "figures"} and isinstance(entries, list)
  require(is_whole, 'the file must be {"paper": citation, "figures": [...]}')
  figures: dict[str, Figure] = {}
  for number, entry in enumerate(entries or (), start=1):
    name = entry.get("name") if isinstance(entry, dict) else None
    with in_front(f"figure {number} ({name!r}): "):
      figure = _figure(entry)
      is_new = figure.name not in figures
      require(is_new, "another figure has this name: rename one")
    figures[figure.name] = figure
  return figures


def _figure(entry: Any) -> Figure:
  """Returns the figure that a JSON object describes.

  Args:
    entry: Content of the JSON object.

  Raises:
    ValueError: If a field is missing, unknown or of the wrong type.
  """
  of_type("a figure", entry, dict)
  fields = {field.name: field for field in dataclasses.fields(Figure)}
  for name in entry:
    known("field", name, fields)
  for name, field in fields.items():
    is_given = name in entry or field.default is not dataclasses.MISSING
    require(is_given, f"{name} is missing")
  kinds = {name: float if name == "value" else str for name in entry}
  return Figure(**{n: of_type(n, v, kinds[n]) for n, v in entry.items()})


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
