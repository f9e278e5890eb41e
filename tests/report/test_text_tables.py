"""Tables as text lose no cell and invent no column."""

import csv
import io

from rich.console import Console

from dilocox_jax.report.text_tables import (
  csv_table,
  header_and_cells,
  html_table,
  markdown_table,
  terminal_table,
)


def test_an_html_table_has_no_markup_from_its_cells():
  found = html_table(("a", "b"), ("<i>", 1))
  assert found.count("<tr>") == 2 and "<td>&lt;i&gt;</td><td>1</td>" in found


def test_a_bar_in_a_cell_does_not_end_it():
  assert markdown_table(["a"], [["x|y"]])[-1] == r"| x\|y |"


def test_columns_are_all_that_some_row_names_in_that_order():
  rows = [{"b": 1, "a": "x, y"}, {"b": 2, "c": 0.1 + 0.2}]
  found = list(csv.reader(io.StringIO(csv_table(rows))))
  assert found == [
    ["b", "a", "c"],
    ["1", "x, y", ""],
    ["2", "", "0.30000000000000004"],
  ]


def test_a_terminal_shows_cells_without_reading_markup_in_them():
  text = io.StringIO()
  header, cells = header_and_cells([{"a": "[bold]x", "b": "1.5"}])
  table = terminal_table(header, cells, title="what is shown")
  Console(file=text, width=40).print(table)
  assert "[bold]x" in text.getvalue() and "what is shown" in text.getvalue()
  assert [column.justify for column in table.columns] == ["left", "right"]
