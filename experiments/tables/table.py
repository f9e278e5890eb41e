"""Published numbers of papers, and tables of predictions beside them.

A *figure* is one published number, with its source, and with its status: was it
read in the paper, or only recalled? A row of a table says whether the constants
of its prediction were fitted on the same row, on other rows or not at all
(`Fit`).
"""

import csv
import dataclasses
import enum
import functools
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure as Picture

from dilocox_jax.checks import (
  dataclass_from,
  in_front,
  json_file,
  known,
  of_type,
  require,
)
from dilocox_jax.metrics.lines import write_atomically
from dilocox_jax.report.page import picture, write_page
from dilocox_jax.report.tables import csv_table, markdown_table

PUBLISHED = pathlib.Path(__file__).parents[2] / "third_party/published.json"
_HEADER = ("figure", "published", "predicted", "error", "kind", "basis")
_READING = (
  "Kinds: *derived* - nothing was fitted; *fitted on this row* - a constant"
  " was chosen to match it, alone or together with others; *fitted elsewhere*"
  " - its constants were chosen to match other rows. Figures marked unverified"
  " were not read in their paper."
)


@dataclasses.dataclass(frozen=True)
class Figure:
  """One published number of a paper.

  Attributes:
    name: Name of the figure, unique in its paper.
    value: The number, in `unit`.
    unit: Unit as printed in the paper, e.g. "Gbit/s"; "ratio" for a number
      without a unit.
    source: Paper, and the table or section with the figure.
    status: "published" if the figure was read in the paper, or "recalled,
      unverified".
    note: Remark; may be empty.
  """

  name: str
  value: float
  unit: str
  source: str
  status: str
  note: str = ""

  @property
  def is_verified(self) -> bool:
    """Whether the number was read in its source."""
    return self.status == "published"


Figures = Mapping[str, Figure]  # By name.
_REQUIRED_KEYS = {"name", "value", "unit", "source", "status"}


def load_published(
  paper: str, path: pathlib.Path = PUBLISHED
) -> dict[str, Figure]:
  """Reads the published numbers of one paper, by name.

  Args:
    paper: Name of the paper in the file, e.g. "dilocox".
    path: JSON file with an object for each paper. Its key "figures" has a list
      of objects with the fields of `Figure`.

  Raises:
    ValueError: If the file is damaged or lacks the paper.
  """
  papers = json_file(path)
  known("paper", paper, papers)
  figures: dict[str, Figure] = {}
  with in_front(f"{path} is damaged: {paper}: "):
    section = of_type("it", papers[paper], dict)
    entries = of_type("figures", section.get("figures"), list)
    for number, entry in enumerate(entries):
      of_type(f"figures[{number}]", entry, dict)
      missing = _REQUIRED_KEYS - entry.keys()
      require(not missing, f"figures[{number}] lacks {', '.join(missing)}")
      figure = dataclass_from(Figure, entry, f"figures[{number}].")
      is_new = figure.name not in figures
      require(is_new, f"the figure {figure.name!r} is there twice")
      figures[figure.name] = figure
  return figures


class Fit(enum.StrEnum):
  """Where the constants of a prediction were fitted.

  Attributes:
    NONE: No constant was fitted on a published number.
    HERE: On the published number of the same row, alone or together with
      others.
    ELSEWHERE: On the published numbers of other rows.
  """

  NONE = "derived"
  HERE = "fitted on this row"
  ELSEWHERE = "fitted elsewhere"


@dataclasses.dataclass(frozen=True)
class Prediction:
  """A row of a table: a predicted number, and the published one if any.

  Attributes:
    name: Name of the number.
    predicted: Predicted value, in `unit`.
    unit: Unit, written as in `Figure`.
    kind: Where the constants of the prediction were fitted.
    basis: A few words that say what was fitted or assumed; may be empty.
    published: The published number; None for a number that no paper states.
    grid_steps: Predicted minus published, counted in steps of the grid from
      which the paper takes its values; None: there is no grid.
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
    """Relative error, (predicted - published) / published.

    NaN if no paper states the number.
    """
    published = self.published.value if self.published else math.nan
    return self.predicted / published - 1

  @property
  def error(self) -> str:
    """The error as text, e.g. "+10.9%".

    If the paper takes its values from a grid, the text is "exact" or e.g.
    "-1 steps". It is empty if there is neither a grid nor a published number.
    """
    if self.grid_steps == 0:
      return "exact"
    if self.grid_steps is not None:
      return f"{self.grid_steps:+d} steps"
    if self.published is None:
      return ""
    # Adding zero turns the -0.0 of a small negative error into 0.0.
    return f"{round(self.relative_error, 6) + 0.0:+.1%}"

  def cells(self) -> tuple[str, ...]:
    """Returns the texts of the row for the table on the page.

    They are name, published value, predicted value, error, kind and basis. The
    number of the paper's table is left out of the name. Without a published
    number, the published value and the error are empty.
    """
    predicted = _short(self.predicted)
    figure = self.published
    if figure is None:
      with_unit = f"{predicted} {self.unit}"
      return self.name, "", with_unit, "", self.kind, self.basis
    # The title of the page's section says which table of the paper it is.
    name = re.sub(r"^table \d+, ", "", figure.name)
    published = f"{figure.value:g} {figure.unit}"
    if not figure.is_verified:
      published += " (unverified)"
    return name, published, predicted, self.error, self.kind, self.basis

  def data(self) -> dict[str, Any]:
    """Returns the values of the row by column of the CSV file.

    None stands for an empty cell.
    """
    figure = self.published
    return {
      "figure": self.name,
      "unit": self.unit,
      "published": figure and figure.value,
      "predicted": self.predicted,
      "relative_error": figure and self.relative_error,
      "grid_steps": self.grid_steps,
      "kind": self.kind,
      "basis": self.basis,
      "source": figure and figure.source,
      "status": figure and figure.status,
      "note": figure and figure.note,
    }


def _short(value: float) -> str:
  """Returns a number as text, e.g. "31.68" or "1.2e+08", of at most 4 digits.

  Numbers from 1000 to 10 million are whole, e.g. "12,346".
  """
  if 1000 <= value < 1e7:
    return f"{value:,.0f}"
  return f"{value:.4g}"


def beside(
  figures: Figures,
  name: str,
  predicted: float,
  kind: Fit,
  basis: str = "",
  grid_steps: int | None = None,
) -> Prediction:
  """Returns a row with a prediction beside a published number.

  Args:
    figures: Published numbers of the paper, by name.
    name: Name of the published number, which becomes the name of the row.
    predicted: Predicted value, in the unit of the published number.
    kind: As in `Prediction`.
    basis: As in `Prediction`.
    grid_steps: As in `Prediction`.

  Raises:
    KeyError: If the paper has no such published number.
  """
  figure = figures[name]
  return Prediction(
    name=name,
    predicted=predicted,
    unit=figure.unit,
    kind=kind,
    basis=basis,
    published=figure,
    grid_steps=grid_steps,
  )


@dataclasses.dataclass(frozen=True)
class Table:
  """A table of predictions. Its title and notes are in `notes.md`.

  Attributes:
    name: Name of the table's CSV file and of its section in `notes.md`.
    rows: All rows, which are written to the CSV file.
    numbers: Values that replace names in braces in the notes, by name.
    header: Header of a table with its own layout for the page; empty: the page
      shows `rows`.
    cells: Cells below `header`, one sequence for each line of the table.
    pictures: Caption and matplotlib figure, by the name of the picture's file
      without suffix.
  """

  name: str
  rows: Sequence[Prediction]
  numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  header: Sequence[str] = ()
  cells: Sequence[Sequence[str]] = ()
  pictures: Mapping[str, tuple[str, Picture]] = dataclasses.field(
    default_factory=dict
  )

  def lines(self, out_dir: pathlib.Path) -> Iterator[str]:
    """Yields the lines of the table's section on the page.

    As the lines are read, the table's pictures are written into the folder
    `figures` of `out_dir`, the directory of the page.
    """
    title, *paragraphs = _notes()[self.name]
    if self.header:
      table = markdown_table(self.header, self.cells)
    else:
      table = markdown_table(_HEADER, [row.cells() for row in self.rows])
    yield from (f"## {title}", "", *table, "")
    for name, (caption, figure) in self.pictures.items():
      yield from picture(figure, out_dir, name, caption)
      yield from (f"*{caption}*", "")
    for paragraph in paragraphs:
      yield from (paragraph.format(**self.numbers), "")
    yield from (f"Every row, with its source: `{self.name}.csv`.", "")


@functools.cache
def _notes() -> dict[str, list[str]]:
  """Reads `notes.md`: title and paragraphs of each table, by its name."""
  text = pathlib.Path(__file__).with_name("notes.md").read_text("utf-8")
  sections = (section.split("\n\n") for section in text.split("\n## ")[1:])
  return {
    name: [" ".join(paragraph.split()) for paragraph in paragraphs]
    for name, *paragraphs in sections
  }


def write_tables(
  tables: Sequence[Table], out_dir: pathlib.Path, command: str
) -> pathlib.Path:
  """Writes tables to `report.md`, with pictures and a CSV file for each table.

  The directory must exist. The page shows `command`, the command line that made
  it. Returns the path of `report.md`.

  Raises:
    RecordError: If a file cannot be written.
  """
  for table in tables:
    rows = csv_table([row.data() for row in table.rows])
    write_atomically(out_dir / f"{table.name}.csv", rows)
  lines = [_READING, ""]
  for table in tables:
    lines += table.lines(out_dir)
  title = "Speed, published and predicted"
  return write_page(out_dir, title, lines, command)


_GRID_TABLE = (
  "streaming_diloco_table_4"  # Its errors are counted in grid steps.
)
_LINE = "{:<12} {:<26} {:>9} {:>9} {:>8} {}"
_COLUMNS = _LINE.format(
  "paper", "figure", "published", "predicted", "error", "kind"
)
_KINDS = {Fit.NONE: "derived", Fit.HERE: "fitted", Fit.ELSEWHERE: "by others"}
_FOOTNOTE = (
  "* recalled. fitted: on this figure;"
  " by others: on other figures of the paper."
)


def summary(tables: Sequence[Table]) -> Iterator[str]:
  """Yields the lines of a short table of predictions for the terminal.

  The file `summary.csv` beside this module lists published numbers and ranges.
  Each of them gets a line. One more line counts the cells of Table 4 of
  Streaming DiLoCo that are predicted exactly. Lines about tables that `tables`
  lacks are left out.
  """
  by_name = {table.name: table for table in tables}
  yield _COLUMNS
  yield "-" * 80
  text = pathlib.Path(__file__).with_name("summary.csv").read_text("utf-8")
  for entry in csv.DictReader(text.splitlines(), delimiter=";"):
    table = by_name.get(entry["table"])
    if not table:
      continue
    rows = [_first_row(table, entry["figure"])]
    if entry["upper_end"]:
      rows.append(_first_row(table, entry["upper_end"]))
    yield _summary_line(entry["paper"], entry["label"], rows)
  table = by_name.get(_GRID_TABLE)
  if table:
    grid_errors = [abs(row.grid_steps or 0) for row in table.rows]
    yield _LINE.format(
      "Streaming",
      "bandwidths, exact cells",
      len(grid_errors),
      grid_errors.count(0),
      f"{max(grid_errors)} step",
      "fitted",
    )
  yield _FOOTNOTE


def _first_row(table: Table, name: str) -> Prediction:
  """Returns the first row of a table that predicts the number `name`."""
  # Later rows predict the same number from other assumptions.
  return next(row for row in table.rows if row.name == name)


def _summary_line(paper: str, label: str, rows: Sequence[Prediction]) -> str:
  """Returns the line of the summary for a published number or range.

  A number has one row. A range has two rows, one for each end, with the same
  prediction, and "within" or "outside" in place of an error.
  """
  prediction = rows[0]
  figures = [row.published for row in rows if row.published]
  values = [figure.value for figure in figures]
  published = "-".join(f"{value:g}" for value in values)
  if not all(figure.is_verified for figure in figures):
    published += "*"
  error = prediction.error
  if len(rows) > 1:
    is_within = min(values) <= prediction.predicted <= max(values)
    error = "within" if is_within else "outside"
  return _LINE.format(
    paper,
    label,
    published,
    _short(prediction.predicted),
    error,
    _KINDS[prediction.kind],
  )
