import io
import json

from rich.console import Console

from dilocox_jax.report.convergence.page import (
  print_convergence,
  write_convergence,
)
from dilocox_jax.report.convergence.tables import tables
from tests.report import convergences


def test_the_page_has_every_table_and_every_figure(tmp_path):
  found = convergences.comparison()
  page = write_convergence(found, tmp_path / "out")
  text = page.read_text()
  for table in tables(found):
    assert f"## {table.title}\n" in text
    for row in table.rows:
      assert "| " + " | ".join(row) + " |" in text
  for name in ("tokens", "bytes", "hours_near", "hours_large"):
    assert f"(figures/{name}.png)" in text
    picture = (tmp_path / "out" / "figures" / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
  assert found.corpus in text and found.command in text


def test_the_data_hold_what_the_tables_show(tmp_path):
  write_convergence(convergences.comparison(), tmp_path)
  data = json.loads((tmp_path / "convergence.json").read_text())
  methods = {each["method"]: each for each in data["methods"]}
  assert methods["diloco"]["losses"] == {"0": 1.05, "1": 1.07}
  assert methods["eager"]["seconds_to_target"]["near"] is None
  assert data["orderings"][0]["result"] == "holds"
  assert data["equal_time"][0]["methods"][0]["steps"] == 12


def test_a_sweep_that_has_just_begun_has_a_page_too(tmp_path):
  empty = convergences.comparison(entries=[], equal_time=[])
  assert "not run" in write_convergence(empty, tmp_path).read_text()


def test_notes_and_methods_that_are_left_out_are_on_the_page(tmp_path):
  found = convergences.comparison(
    notes=("Clocks are free.",), untuned=("lost",)
  )
  text = write_convergence(found, tmp_path).read_text()
  assert "- Clocks are free." in text
  assert "- Not in this report because they are not tuned: lost." in text


def test_the_terminal_shows_the_tables_in_eighty_columns():
  text = io.StringIO()
  print_convergence(convergences.comparison(), Console(file=text, width=80))
  lines = text.getvalue().splitlines()
  assert max(map(len, lines)) <= 80
  assert any("Clock 'near': tiny on 1gbit" in line for line in lines)
  assert any("+4.95 ± 0.05 %" in line for line in lines)
  assert not any("pair by pair" in line for line in lines)
