"""Tables as Markdown for pages, as CSV for programs, and for terminals."""

import csv
import html
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table


def markdown_table(
  header: Sequence[str], rows: Iterable[Sequence[Any]]
) -> list[str]:
  """Returns the lines of a Markdown table; a bar inside a cell is escaped."""
  table = [list(header), ["---"] * len(header), *map(list, rows)]
  return [
    "| " + " | ".join(str(cell).replace("|", r"\|") for cell in row) + " |"
    for row in table
  ]


def html_table(*rows: Sequence[Any]) -> str:
  """Returns a small HTML table, e.g. for a notebook; the first row is a header.

  Args:
    *rows: Cells, shown as text without markup.
  """
  header, *others = (map(html.escape, map(str, row)) for row in rows)
  lines = [f"<th>{'</th><th>'.join(header)}</th>"]
  lines += [f"<td>{'</td><td>'.join(row)}</td>" for row in others]
  return f"<table><tr>{'</tr><tr>'.join(lines)}</tr></table>"


def header_and_cells(
  rows: Sequence[Mapping[str, Any]],
) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
  """Splits rows, at least one, that all have the same columns in one order."""
  return tuple(rows[0]), [tuple(row.values()) for row in rows]


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns comma-separated values at full precision.

  Args:
    rows: Values by column. Columns have the order in which rows first name
      them. A row without a column has an empty cell there.
  """
  columns = list(dict.fromkeys(name for row in rows for name in row))
  text = io.StringIO()
  writer = csv.DictWriter(text, columns, lineterminator="\n")
  writer.writeheader()
  writer.writerows(rows)
  return text.getvalue()


def terminal_table(
  header: Sequence[str],
  rows: Iterable[Sequence[str]],
  left: Collection[int] = (0,),
  **look: Any,
) -> Table:
  """Returns a table for a terminal; cells that are too wide are folded.

  It has no frame, so that more fits into 80 columns.

  Args:
    header: Names of the columns.
    rows: Cells, shown as they are, without markup.
    left: Indices of the columns of text. The others hold numbers, which are
      aligned on the right.
    **look: Arguments of `rich.table.Table`, e.g. its title.
  """
  look = {"title_justify": "left", "caption_justify": "left"} | look
  table = Table(box=box.SIMPLE_HEAD, pad_edge=False, **look)
  for index, column in enumerate(header):
    side = "left" if index in left else "right"
    table.add_column(column, justify=side, overflow="fold")
  for row in rows:
    table.add_row(*map(escape, row))
  return table
