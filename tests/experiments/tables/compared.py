"""The rows of a table that stand beside a published figure."""

from experiments.tables.rows import Row, Table


def compared(table: Table) -> list[Row]:
  """All rows that have something to be compared with."""
  return [row for row in table.rows if isinstance(row, Row)]
