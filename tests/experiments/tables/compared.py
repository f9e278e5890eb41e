"""The rows of a table that stand beside a published figure."""

from experiments.tables.table import Prediction, Table


def compared(table: Table) -> list[Prediction]:
  """All rows that have something to be compared with."""
  return [row for row in table.rows if row.published]
