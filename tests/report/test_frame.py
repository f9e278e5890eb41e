"""Numbers of frames and their tables, and how numbers are written."""

import csv
import io
import math

import pytest
from rich.console import Console

from dilocox_jax.report import tables
from dilocox_jax.report.frame import Frame, Setting
from tests.report.frames import (
  ALLREDUCE,
  BOTH,
  CLOCK,
  DILOCO,
  NOISY,
  frame,
  seed_run,
  setting,
)

NAN = math.nan
INF = math.inf


@pytest.mark.parametrize(
  ("changed", "gap", "error"),
  [
    (DILOCO, 6.1 / 6 - 1, 0.01),  # Paired: 3 % and 1 %.
    (NOISY, 0.0, 0.075),  # 10 % above and 5 % below.
    (ALLREDUCE, NAN, NAN),
    (setting("one seed", [2.06], 10), 0.03, NAN),
    (setting("diverged", [2.0, NAN], 10), INF, NAN),
    (setting("alone", [2.0], 10, baseline="gone"), NAN, NAN),
    (setting("longer", [2.0], 10, steps=200), NAN, NAN),
  ],
)
def test_gaps_are_paired_by_seed(changed, gap, error):
  found = frame(ALLREDUCE, changed).gap(changed)
  assert found == pytest.approx((gap, error), nan_ok=True)


@pytest.mark.parametrize(
  ("losses", "sent", "name"),
  [
    ([2.06, 4.04], 1_500, "diloco"),  # It sends more.
    ([2.06, 4.04], 500, "other"),
    ([2.9, 4.9], 500, "diloco"),  # It is more than a tenth above.
    ([2.06], 500, "diloco"),  # A seed is missing.
  ],
)
def test_the_cheapest_is_near_its_baseline_and_complete(losses, sent, name):
  found = frame(ALLREDUCE, DILOCO, setting("other", losses, sent)).cheapest()
  assert found and found.name == name


def test_nothing_on_the_front_is_beaten_in_loss_and_bytes():
  points = {"a": (3, 10), "b": (2, 20), "worse": (2.5, 30), "c": (1, 40)}
  settings = [setting(k, [x, x], y) for k, (x, y) in points.items()]
  settings.append(setting("diverged", [NAN, 1.0], 1))
  front = frame(*reversed(settings)).pareto_front()
  assert [each.name for each in front] == ["a", "b", "c"]


@pytest.mark.parametrize(
  ("losses", "target", "seconds"),
  [
    ((2.0, 1.0), 1.25, 17.5),  # 2 at 10 s, 1 at 20 s.
    ((2.0, 1.0), 2.0, 10.0),
    ((2.0, 1.0), 0.5, INF),
    ((1.0, 2.0), 1.5, 10.0),
  ],
)
def test_a_loss_is_reached_between_two_evaluations(losses, target, seconds):
  run = seed_run(0, losses[-1], 10, losses=losses, seconds=20.0)
  assert Setting("a", [run]).seconds_to(CLOCK, target) == [seconds]


def test_a_table_has_means_errors_and_times():
  some = frame(*BOTH.settings, setting("late", [5.0], 10), target=2.1)
  columns = ("run", "loss", "gap", "sent bytes", "fewer bytes")
  rows = tables.table(some, columns, clock=CLOCK)
  assert rows[1] == {
    "run": "diloco",
    "loss": "3.0500 ± 0.9900",
    "gap": "+1.67 ± 1.00 %",
    "sent bytes": "1.00 kB",
    "fewer bytes": "8.00x",
    "utilization": "50.0 %",
    "simulated time": "1.67 min",
    "to loss 2.1": "1 of 2 seeds",
  }
  assert rows[0]["gap"] == "-" and rows[0]["fewer bytes"] == "1.00x"
  assert rows[-1]["run"] == "late (1 of 2 seeds)"
  assert rows[-1]["to loss 2.1"] == "not reached"


def test_losses_at_equal_time_are_those_when_the_first_setting_is_done():
  settings = [
    Setting(
      name,
      [seed_run(0, 1.0, 1, steps=10, losses=losses, seconds=end_s)],
      seconds={CLOCK: end_s},
    )
    for name, losses, end_s in (
      ("done", (2.0, 1.0), 20.0),
      ("behind", (6.0, 2.0), 30.0),  # At 15 and 30 s.
      ("not evaluated yet", (1.0,), 200.0),
    )
  ]
  shown = tables.table(Frame(settings), (), clock=CLOCK)
  cells = [row["loss at 20 s"] for row in shown]
  assert cells == ["1.0000", "4.6667", "1 step"]


@pytest.mark.parametrize(
  ("settings", "words"),
  [
    ([ALLREDUCE, DILOCO], ["8.00x less", "AllReduce", "1.7 ± 1.0 % higher"]),
    ([ALLREDUCE, NOISY], ["same within its error"]),
    ([ALLREDUCE], []),
    ([ALLREDUCE, setting("same bytes", [2.0, 4.0], 8_000)], []),
    ([ALLREDUCE, setting("silent", [2.0, 4.0], 0)], ["sends nothing"]),
    ([ALLREDUCE, setting("x", [2.1], 9, steps=50)], []),
  ],
)
def test_the_price_says_no_more_than_the_numbers(settings, words):
  found = tables.price(frame(*settings))
  assert all(word in found for word in words) and bool(found) == bool(words)


def test_text_tables_lose_no_cell_and_invent_no_column():
  assert tables.markdown_table(["a"], [["x|y"]])[-1] == r"| x\|y |"
  rows = [
    {"b": 1, "a": "x, y"},
    {"b": 2, "c": 0.1 + 0.2},
    {"b": None, "a": "two\nlines", "c": NAN},
  ]
  found = list(csv.reader(io.StringIO(tables.csv_table(rows))))
  tenth = "0.30000000000000004"
  assert found == [
    ["b", "a", "c"],
    ["1", "x, y", ""],
    ["2", "", tenth],
    ["", r"two\nlines", "nan"],
  ]
  text = io.StringIO()
  header, cells = tables.header_and_cells([{"a": "[bold]x", "b": "1.5"}])
  table = tables.terminal_table(header, cells, title="what is shown")
  Console(file=text, width=40).print(table)
  assert "[bold]x" in text.getvalue() and "what is shown" in text.getvalue()
  assert [column.justify for column in table.columns] == ["left", "right"]
