"""Tables as text: for pages of a report, and for programs that read them."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def markdown_table(
  header: Sequence[str], rows: Iterable[Sequence[Any]]
) -> list[str]:
  """Lines of a table; a bar inside a cell is escaped."""
  table = [list(header), ["---"] * len(header), *map(list, rows)]
  return [
    "| " + " | ".join(str(cell).replace("|", r"\|") for cell in row) + " |"
    for row in table
  ]


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Comma-separated values at full precision.

  Args:
    rows: By column. Columns come in the order in which rows first name them,
      and a row that lacks one has an empty cell.
  """
  columns = list(dict.fromkeys(name for row in rows for name in row))
  text = io.StringIO()
  writer = csv.DictWriter(text, columns, lineterminator="\n")
  writer.writeheader()
  writer.writerows(rows)
  return text.getvalue()
