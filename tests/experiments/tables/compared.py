"""The rows of a table that stand beside a published figure."""

from experiments.tables.table import Table, TableRow


def compared(table: Table) -> list[TableRow]:
  """All rows that have something to be compared with."""
  return [row for row in table.rows if isinstance(row, TableRow)]
