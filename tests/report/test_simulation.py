import io
import json

from matplotlib.patches import Rectangle
from rich.console import Console

from dilocox_jax.report import simulation
from dilocox_jax.report.simulation import Bar, SimulatedRun

RUN = SimulatedRun(
  title="dilocox on 1gbit",
  quantities=[("seconds a step", "1.25", "derived: formula")],
  links={"up:a": (8e6, 2_500_000.0, 0.25)},
  numbers={"seconds_a_step": 1.25},
  notes=["Nothing is known about the sea."],
  bars=[
    Bar("replica 0", 0, 0.0, 3.0, "steps"),
    Bar("up:a", 0, 3.0, 4.0, "exchange"),
    Bar("up:a", 1, 3.5, 4.5, "exchange"),
  ],
)


def test_the_page_holds_costs_links_and_assumptions(tmp_path):
  page = simulation.write_simulation(RUN, tmp_path, "python -m x").read_text()
  assert page.startswith("# dilocox on 1gbit\n\n    python -m x\n")
  assert "| seconds a step | 1.25 | derived: formula |" in page
  assert "| up:a | 1.00 MB/s | 2.50 MB | 25.0% |" in page
  assert "- Nothing is known about the sea." in page
  assert (tmp_path / "figures" / "gantt.png").stat().st_size > 0
  numbers = json.loads((tmp_path / "simulation.json").read_text())
  assert numbers == {"seconds_a_step": 1.25}


def test_without_bars_there_is_no_picture(tmp_path):
  import dataclasses

  page = simulation.write_simulation(
    dataclasses.replace(RUN, bars=[]), tmp_path
  )
  assert "gantt" not in page.read_text()
  assert not (tmp_path / "figures").exists()


def test_every_bar_is_drawn_where_and_when_it_was():
  (ax,) = simulation.gantt(RUN).axes
  drawn = {
    (round(patch.get_x(), 6), round(patch.get_width(), 6), patch.get_y() + 0.4)
    for patch in ax.patches
    if isinstance(patch, Rectangle)
  }
  assert drawn == {(0.0, 3.0, 0.0), (3.0, 1.0, 1.0), (3.5, 1.0, 2.0)}
  assert [t.get_text() for t in ax.get_yticklabels()] == [
    "replica 0",
    "up:a",
    "",
  ]


def test_the_terminal_shows_every_quantity_and_how_it_is_known():
  text = io.StringIO()
  simulation.print_simulation(RUN, Console(file=text, width=80))
  assert "seconds a step" in text.getvalue()
  assert "derived: formula" in text.getvalue()
