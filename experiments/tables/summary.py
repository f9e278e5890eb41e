"""What the papers' tables come to, in at most fifteen lines."""

import csv
import pathlib
from collections.abc import Iterator, Sequence

from experiments.tables.table import Fit, Prediction, Table, short

_CELLS = "streaming_diloco_table_4"
_LINE = "{:<12} {:<26} {:>9} {:>9} {:>8} {}"
_HEADER = ("paper", "figure", "published", "predicted", "error", "kind")
_KINDS = {Fit.NONE: "derived", Fit.HERE: "fitted", Fit.ELSEWHERE: "by others"}
_FOOTNOTE = "* recalled. fitted: on this figure; by others: on its others."


def summary(tables: Sequence[Table]) -> list[str]:
  """Returns the lines that a terminal shows of the tables of papers."""
  by_name = {table.name: table for table in tables}
  lines = [_LINE.format(*_HEADER), "-" * 80]
  text = pathlib.Path(__file__).with_name("summary.csv").read_text("utf-8")
  for shown in csv.DictReader(text.splitlines(), delimiter=";"):
    if table := by_name.get(shown["table"]):
      ends = shown["figure"], shown["upper_end"]
      found = [next(r for r in table.rows if r.name == e) for e in ends if e]
      cells = shown["paper"], shown["label"], *_cells(found)
      lines.append(_LINE.format(*cells))
  if table := by_name.get(_CELLS):
    steps = [abs(row.grid_steps or 0) for row in table.rows]
    counts = len(steps), steps.count(0), f"{max(steps)} step", "fitted"
    lines.append(_LINE.format("Streaming", "bandwidths, exact cells", *counts))
  return [*lines, _FOOTNOTE]


def _cells(rows: Sequence[Prediction]) -> Iterator[str]:
  """Yields the cells of a figure, or of the two ends of a range."""
  figures = [row.published for row in rows if row.published]
  values = [figure.value for figure in figures]
  is_read = all(figure.is_verified for figure in figures)
  yield "-".join(f"{v:g}" for v in values) + ("" if is_read else "*")
  yield short(rows[0].predicted)
  is_within = min(values) <= rows[0].predicted <= max(values)
  yield rows[0].error if len(rows) == 1 else ("no", "within")[is_within]
  yield _KINDS[rows[0].kind]
