"""The binary of the papers' tables: what it writes, shows and refuses."""

import csv
import importlib
import json
import shutil

import pytest

from dilocox_jax.report.line_panels import Panel, draw
from experiments import speedup_tables
from experiments.tables import covenant_72b, open_diloco, streaming_diloco
from experiments.tables.published import Figure
from experiments.tables.table import (
  Fit,
  Prediction,
  Table,
  _data,
  _notes,
  beside,
  described,
  rows_beside,
  write_tables,
)
from tests.experiments import programs
from tests.experiments.tables.compared import compared

PUBLISHED = speedup_tables._PUBLISHED
FIGURE = Figure("speed", 8.0, "tokens/s", "a paper, table 1", "published")


def run(*arguments):
  return programs.run("speedup_tables", *arguments)


def test_an_error_is_relative_or_in_grid_steps():
  assert beside(FIGURE, 10.0, Fit.NONE).error == "+25.0%"
  assert beside(FIGURE, 10.0, Fit.NONE, grid_steps=-2).error == "-2 steps"
  assert beside(FIGURE, 10.0, Fit.NONE, grid_steps=0).error == "exact"


def test_every_paper_has_a_module_that_builds_tables():
  for name in (*speedup_tables.PAPERS, *speedup_tables.OURS):
    module = importlib.import_module(f"experiments.tables.{name}")
    assert callable(module.build_tables)


def test_notes_are_filled_with_numbers_and_none_may_be_missing():
  table = described("open_diloco", [], share=0.5, slower=0.25, mbps=61.4)
  assert table.title == "OpenDiLoCo: compute utilisation over three countries"
  assert table.paragraphs[0].startswith("The prediction, 50.0%, lies in the")
  assert "Down to 61 Mbit/s the run would stay at 90 %." in table.paragraphs[1]
  with pytest.raises(KeyError, match="slower"):
    described("open_diloco", [], share=0.5, mbps=61.4)


def test_every_section_of_the_notes_belongs_to_a_table():
  folder = PUBLISHED.parents[1] / "experiments" / "tables"
  code = "".join(path.read_text() for path in folder.glob("*.py"))
  assert [name for name in _notes() if f'"{name}"' not in code] == []


def test_rows_stand_beside_the_figures_of_their_names():
  (row,) = rows_beside(
    {"speed": FIGURE}, ("speed", 10.0, Fit.NONE, "free links")
  )
  assert row == beside(FIGURE, 10.0, Fit.NONE, "free links")
  with pytest.raises(KeyError, match="pace"):
    rows_beside({"speed": FIGURE}, ("pace", 10.0, Fit.NONE, ""))


def test_what_cannot_be_reached_is_no_number():
  endless = Prediction("bandwidth", float("inf"), "Mbit/s", Fit.NONE)
  assert _data(endless)["predicted"] is None
  assert _data(endless).keys() == _data(beside(FIGURE, 1, Fit.NONE)).keys()


def test_every_cell_of_the_streaming_table_has_a_row():
  table, hours = streaming_diloco.build_tables(PUBLISHED)
  rows = compared(table)
  assert len({row.name for row in rows}) == 75
  assert all(isinstance(row.kind, Fit) for row in (*table.rows, *hours.rows))
  exact = sum(row.grid_steps == 0 for row in rows)
  assert f"{exact} of 75 cells are exact" in table.paragraphs[0]
  differing = sum(" / " in cell for cells in table.cells for cell in cells)
  assert differing == 75 - exact


def test_the_page_and_the_data_hold_the_same_predictions(tmp_path):
  done = run(f"--workdir={tmp_path}", "--papers=covenant_72b,open_diloco")
  assert done.returncode == 0, done.stderr
  data = json.loads((tmp_path / "tables.json").read_text())
  text = (tmp_path / "report.md").read_text()
  tables = covenant_72b.build_tables(PUBLISHED) + open_diloco.build_tables(
    PUBLISHED
  )
  built = {table.name: table for table in tables}
  assert set(data) == set(built)
  for name, rows in data.items():
    assert [row["predicted"] for row in rows] == [
      row.predicted for row in built[name].rows
    ]
    with (tmp_path / f"{name}.csv").open() as file:
      lines = list(csv.DictReader(file))
    assert [float(line["predicted"]) for line in lines] == [
      row["predicted"] for row in rows
    ]
    assert f"`{name}.csv`" in text


def test_a_picture_is_drawn_beside_its_caption(tmp_path):
  drawn = draw("Lines", [Panel("rank", "simulated", (1, 2), {"a": [0.1, 0.2]})])
  rows = [Prediction("speed", 8.0, "tokens/s", Fit.NONE)]
  table = Table("t", "T", rows, (), pictures={"lines": ("Some lines.", drawn)})
  text = write_tables([table], tmp_path, "python -m x").read_text()
  assert "![Some lines.](figures/lines.png)" in text
  assert "| speed |  | 8 tokens/s |  | derived |  |" in text
  assert (tmp_path / "figures" / "lines.png").stat().st_size > 0


def test_a_figure_that_is_missing_is_named_in_one_line(tmp_path):
  shutil.copytree(PUBLISHED, tmp_path / "figures")
  path = tmp_path / "figures" / "streaming_diloco.json"
  content = json.loads(path.read_text())
  content["figures"] = content["figures"][:-20]
  path.write_text(json.dumps(content))
  done = run(
    f"--workdir={tmp_path / 'out'}",
    f"--published={tmp_path / 'figures'}",
    "--papers=streaming_diloco",
  )
  assert done.returncode == 2
  assert "tables of streaming_diloco need a figure 'table " in done.stderr
  assert done.stderr.count("\n") == 1


def test_a_paper_without_tables_is_refused(tmp_path):
  done = run(f"--workdir={tmp_path}", "--papers=nobody")
  assert done.returncode == 2
  assert done.stderr == (
    "error: --papers=nobody must name some of"
    f" {', '.join(speedup_tables.PAPERS + speedup_tables.OURS)}\n"
  )


def test_the_terminal_shows_a_summary(tmp_path):
  done = run(f"--workdir={tmp_path}")
  assert done.returncode == 0, done.stderr
  # The path of the report is as long as its folder's.
  lines = done.stdout.replace(str(tmp_path), "").splitlines()
  assert len(lines) <= 15 and max(map(len, lines)) <= 80
  (ratio,) = [line for line in lines if "107B speed-up" in line]
  assert ratio.split()[-5:] == ["357", "396", "+10.9%", "by", "others"]
  (recalled,) = [line for line in lines if "OPT-1.3B speed-up" in line]
  assert " 32* " in recalled
  assert "## DiLoCoX" in (tmp_path / "report.md").read_text()


def test_a_paper_alone_is_summed_up_alone(tmp_path):
  done = run(f"--workdir={tmp_path}", "--papers=open_diloco")
  assert "DiLoCoX" not in done.stdout
  assert "within derived" in done.stdout
