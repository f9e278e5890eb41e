"""Pages of sweeps and of runs side by side."""

import csv
import dataclasses
import io
import math

import pytest
from rich.console import Console

from dilocox_jax.metrics import Timing, read_rows
from dilocox_jax.report import compare, load_run, print_table
from dilocox_jax.report.sweep import SweepPage, print_sweep, write_sweep
from dilocox_jax.report.units import human_bytes, human_gap, human_ratio
from tests.report.frames import ALLREDUCE, BOTH, DILOCO, NOISY, frame, setting

SHORT = setting("diloco, 50 steps", [2.5, 4.5], 500, steps=50)


def table_of(path):
  return list(csv.DictReader(path.read_text().splitlines()))


def printed(show, what):
  text = io.StringIO()
  show(what, Console(file=text, width=160))
  return text.getvalue()


def test_a_sweep_has_tables_differences_settings_pictures_and_data(tmp_path):
  changed = dataclasses.replace(DILOCO, changed="sync_interval=25")
  found = frame(ALLREDUCE, changed, NOISY, SHORT, target=2.5)
  failure = {"run": "muloco, seed 1", "reason": "killed", "log": "x.log"}
  page = SweepPage("small", found, "Two seeds.", ["Read it."], [failure], "cmd")
  text = write_sweep(page, tmp_path).read_text()
  assert "| diloco | 3.0500 ± 0.9900 | +1.67 ± 1.00 % | allreduce |" in text
  assert "| diloco, 50 steps | 3.5000" in text
  # The gap of muloco is within its error, so nothing is said of it.
  assert "diloco ends 1.7 ± 1.0 % higher than allreduce" in text
  assert "muloco ends" not in text
  for part in ("    cmd", "Two seeds.", "- Read it.", "sync_interval=25 |"):
    assert part in text
  assert "| muloco, seed 1 | killed | x.log |" in text
  for name in ("tokens", "bytes", "hours_1gbit"):
    picture = tmp_path / "figures" / f"{name}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"(figures/{name}.png)" in text
  rows = {row["run"]: row for row in table_of(tmp_path / "table.csv")}
  assert float(rows["diloco"]["gap_standard_error"]) == pytest.approx(0.01)
  assert float(rows["diloco"]["seconds:1gbit"]) == 100
  assert rows["diloco"]["is_on_pareto_front"] == "True"
  assert "diloco" in printed(print_sweep, page)


def test_a_sweep_without_runs_has_a_page(tmp_path):
  empty = frame(dataclasses.replace(ALLREDUCE, traces=()), clocks={})
  text = write_sweep(SweepPage("empty", empty), tmp_path).read_text()
  assert "allreduce (0 of 2 seeds) | none yet" in text


def with_clock(run, seconds_a_step, clock="cluster 1gbit"):
  timings = [
    Timing(e.step, "evaluation", 1.0, math.nan, e.step * seconds_a_step)
    for e in run.evaluations
  ]
  record = run.record | {"clock": clock}
  return dataclasses.replace(run, timings=run.timings + timings, record=record)


def test_the_numbers_of_a_comparison_are_those_of_the_rows(write_run, tmp_path):
  workdirs = [
    write_run(tmp_path / "a"),
    write_run(tmp_path / "b", method="allreduce", floor=1.8),
  ]
  page = compare(workdirs, tmp_path / "out")
  table = table_of(page.parent / "comparison.csv")
  assert [entry["run"] for entry in table] == ["diloco", "allreduce"]
  finals = [read_rows(each / "metrics.jsonl")[-1] for each in workdirs]
  for row, final in zip(table, finals, strict=True):
    assert float(row["loss"]) == final["outer_loss"]
    assert float(row["sent_bytes"]) == final["total_sent_bytes"]
    assert int(row["tokens"]) == final["tokens"]
  own, base = finals
  cells = (
    "diloco",
    f"{own['outer_loss']:.4f}",
    human_gap(own["outer_loss"] / base["outer_loss"] - 1),
    human_bytes(own["total_sent_bytes"]),
    human_ratio(base["total_sent_bytes"] / own["total_sent_bytes"]),
  )
  assert f"| {' | '.join(cells)} |" in page.read_text()
  shown = printed(print_table, list(map(load_run, workdirs)))
  assert all(cell in shown for cell in cells)
  picture = page.parent / "comparison.png"
  assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
  "field, says", [("digest", "bbbb"), ("held_out", "different windows")]
)
@pytest.mark.parametrize("is_page", [True, False])
def test_runs_on_different_texts_are_refused_in_one_line(
  write_run, tmp_path, is_page, field, says
):
  workdirs = [
    write_run(tmp_path / "a", **{field: "aaaa"}),
    write_run(tmp_path / "b", **{field: "bbbb"}),
  ]
  with pytest.raises(ValueError) as error:
    if is_page:
      compare(workdirs, tmp_path / "out")
    else:
      printed(print_table, list(map(load_run, workdirs)))
  text = str(error.value)
  assert says in text and "\n" not in text
  assert all(str(workdir) in text for workdir in workdirs)
  assert not (tmp_path / "out").exists()


def test_a_page_says_what_a_reader_would_take_to_be_alike(write_run, tmp_path):
  first = write_run(tmp_path / "a")
  same = write_run(tmp_path / "b", method="allreduce")
  other = write_run(tmp_path / "c", num_steps=300, num_replicas=3)
  text = compare([first, same], tmp_path / "out").read_text()
  assert "the same budget of 1.23 M tokens" in text
  text = compare([first, other], tmp_path / "out").read_text()
  assert "different budgets" in text and "differ in their replicas" in text
  assert "diloco (a)" in text and "diloco (c)" in text


def test_one_run_is_compared_with_fp32_gradients_and_not_with_itself(
  write_run, tmp_path
):
  run = load_run(write_run(tmp_path / "a", finish=False))
  page = compare([run.workdir], tmp_path / "out").read_text()
  # Two replicas: 4 bytes a value and step.
  fewer = human_ratio(600 * 4 * 871_168 / run.total_sent_bytes)
  for shown in (printed(print_table, [run]), page):
    assert fewer in shown and "fp32 gradients" in shown
    assert "gap" not in shown and "diloco (not finished)" in shown


def test_a_loss_that_is_not_finite_is_a_word(write_run, tmp_path):
  page = compare([write_run(tmp_path / "a", floor=math.nan)], tmp_path / "out")
  assert "not finite" in page.read_text()
  with pytest.raises(ValueError, match="at least one run"):
    compare([], tmp_path / "out")


@pytest.mark.parametrize(
  ("clocks", "has_times"),
  [(["1gbit", "1gbit"], True), (["1gbit", "10gbit"], False)],
)
def test_only_times_of_one_cluster_are_compared(
  write_run, tmp_path, clocks, has_times
):
  runs = [
    with_clock(load_run(write_run(tmp_path / name, method=name)), step_s, clock)
    for name, step_s, clock in (
      ("allreduce", 0.5, clocks[0]),
      ("diloco", 0.1, clocks[1]),
    )
  ]
  shown = printed(print_table, runs)
  assert "5 min" in shown and "1 min" in shown
  assert ("(10gbit)" in shown) == (not has_times)


def test_settings_of_equal_tokens_are_those_that_most_have():
  page = SweepPage("x", frame(*BOTH.settings, SHORT))
  assert [each.name for each in page.others] == ["diloco, 50 steps"]
  assert len(page.equal.settings) == 3
