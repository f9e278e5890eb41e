"""Tables as Markdown for pages, and as CSV for programs."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def markdown_table(
  header: Sequence[str], rows: Iterable[Sequence[Any]]
) -> list[str]:
  """Returns the lines of a Markdown table; a bar inside a cell is escaped."""
  table = [list(header), ["---"] * len(header), *map(list, rows)]
  return [
    "| " + " | ".join(str(cell).replace("|", r"\|") for cell in row) + " |"
    for row in table
  ]


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
