import csv
import dataclasses
import io
import json
import math
import re

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from dilocox_jax.metrics import Timing, read_rows
from dilocox_jax.report import compare, load_run, print_table
from dilocox_jax.report.compare import comparison_figure
from dilocox_jax.report.units import human_bytes, human_gap, human_ratio


def _printed(runs):
  console = Console(file=io.StringIO(), width=160)
  print_table(runs, console)
  return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_the_numbers_of_the_comparison_are_those_of_the_rows(
  write_run, tmp_path
):
  workdirs = [
    write_run(tmp_path / "a"),
    write_run(tmp_path / "b", method="allreduce", floor=1.8),
  ]
  page = compare(workdirs, tmp_path / "out")
  document = json.loads((page.parent / "comparison.json").read_text())
  lines = (page.parent / "comparison.csv").read_text().splitlines()
  table = list(csv.DictReader(lines))
  assert document["corpus_digest"] == "9f3a61c2d07e"
  assert [entry["method"] for entry in table] == ["diloco", "allreduce"]
  for workdir, entry, line in zip(
    workdirs, document["runs"], table, strict=True
  ):
    final = read_rows(workdir / "metrics.jsonl")[-1]
    wall_s = sum(row["wall_s"] for row in read_rows(workdir / "timing.jsonl"))
    assert entry["validation_loss"] == final["outer_loss"]
    assert entry["total_sent_bytes"] == final["total_sent_bytes"]
    assert (entry["steps"], entry["tokens"]) == (final["step"], final["tokens"])
    assert entry["wall_s"] == pytest.approx(wall_s)
    assert float(line["validation_loss"]) == final["outer_loss"]
    assert int(line["total_sent_bytes"]) == final["total_sent_bytes"]
    base = document["runs"][1]
    gap = final["outer_loss"] / base["validation_loss"] - 1
    fewer = base["total_sent_bytes"] / final["total_sent_bytes"]
    cells = (
      entry["method"],
      f"{final['outer_loss']:.4f}",
      human_gap(gap),
      human_bytes(final["total_sent_bytes"]),
      human_ratio(fewer),
      f"{final['step']:,}",
      f"{final['tokens']:,}",
      f"{wall_s:.1f}",
    )
    assert f"| {' | '.join(cells)} |" in page.read_text()
    printed = _printed(list(map(load_run, workdirs)))
    assert all(cell in printed for cell in cells if cell != cells[-2])


def test_the_comparison_has_a_picture(write_run, tmp_path):
  page = compare([write_run(tmp_path / "a")], tmp_path / "out")
  assert "(comparison.png)" in page.read_text()
  pixels = imread(page.parent / "comparison.png")
  assert min(pixels.shape[:2]) > 400 and pixels.std() > 0.05


@pytest.mark.parametrize(
  "field, says", [("digest", "bbbb"), ("held_out", "different windows")]
)
@pytest.mark.parametrize("way", ["page", "table"])
def test_runs_on_different_texts_are_refused_in_one_line(
  write_run, tmp_path, way, field, says
):
  workdirs = [
    write_run(tmp_path / "a", **{field: "aaaa"}),
    write_run(tmp_path / "b", **{field: "bbbb"}),
  ]
  with pytest.raises(ValueError) as error:
    if way == "page":
      compare(workdirs, tmp_path / "out")
    else:
      print_table([load_run(workdir) for workdir in workdirs], Console())
  text = str(error.value)
  assert says in text and "\n" not in text
  assert all(str(workdir) in text for workdir in workdirs)
  assert not (tmp_path / "out").exists()


def test_different_budgets_are_pointed_out(write_run, tmp_path):
  first = write_run(tmp_path / "a")
  same = write_run(tmp_path / "b", method="allreduce")
  other = write_run(tmp_path / "c", num_steps=300)
  text = compare([first, same], tmp_path / "out").read_text()
  assert "the same budget of 1.23 M tokens" in text
  text = compare([first, other], tmp_path / "out").read_text()
  assert "different budgets of tokens" in text


def test_runs_of_one_method_are_told_apart_by_their_directories(
  write_run, tmp_path
):
  runs = [write_run(tmp_path / name) for name in ("h30", "h60")]
  text = compare(runs, tmp_path / "out").read_text()
  assert "diloco (h30)" in text and "diloco (h60)" in text


def test_one_run_is_compared_with_fp32_gradients_and_not_with_itself(
  write_run, tmp_path
):
  run = load_run(write_run(tmp_path / "a"))
  page = compare([run.workdir], tmp_path / "out").read_text()
  # Two replicas: 4 bytes a value and step.
  fewer = 600 * 4 * 871_168 / run.total_sent_bytes
  for shown in (_printed([run]), page):
    assert human_ratio(fewer) in shown and "fp32 gradients" in shown
    assert "+0.00 %" not in shown and "gap" not in shown


def test_an_unfinished_run_is_marked(write_run, tmp_path):
  run = load_run(write_run(tmp_path / "a", finish=False))
  assert "diloco (not finished)" in _printed([run])


def test_a_loss_that_is_not_finite_is_null_in_the_data(write_run, tmp_path):
  page = compare([write_run(tmp_path / "a", floor=math.nan)], tmp_path / "out")
  (entry,) = json.loads((page.parent / "comparison.json").read_text())["runs"]
  assert entry["validation_loss"] is None
  assert "not finite" in page.read_text()


def test_nothing_to_compare_is_said(tmp_path):
  with pytest.raises(ValueError, match="at least one run"):
    compare([], tmp_path / "out")


def _with_clock(run, seconds_a_step):
  timings = [
    Timing(e.step, "evaluation", 1.0, math.nan, e.step * seconds_a_step)
    for e in run.evaluations
  ]
  return dataclasses.replace(run, timings=run.timings + timings)


def _x(ax, name):
  (line,) = [line for line in ax.lines if line.get_gid() == name]
  return np.asarray(line.get_xdata())


def test_a_run_that_sends_nothing_is_left_out_of_the_bytes_panel(
  write_run, tmp_path
):
  runs = {
    "single": load_run(
      write_run(tmp_path / "a", num_replicas=1, method="single")
    ),
    "diloco": load_run(write_run(tmp_path / "b")),
  }
  tokens, sent = comparison_figure(runs).axes
  assert np.size(_x(tokens, "single")) == np.size(_x(sent, "diloco")) == 10
  assert "single" not in [line.get_gid() for line in sent.lines]
  alone = comparison_figure({"single": runs["single"]})
  assert alone.axes[1].texts[0].get_text() == "nothing to show"


def test_the_axis_of_bytes_is_labelled_in_bytes(write_run, tmp_path):
  runs = {
    method: load_run(write_run(tmp_path / method, method=method))
    for method in ("diloco", "allreduce")
  }
  figure = comparison_figure(runs)
  figure.draw_without_rendering()
  sent = figure.axes[1]
  assert sent.get_xscale() == "log"
  labels = [tick.get_text() for tick in sent.get_xticklabels()]
  assert "100 MB" in labels


def test_the_title_says_what_the_cheapest_run_pays(write_run, tmp_path):
  runs = {
    "allreduce": load_run(write_run(tmp_path / "a", method="allreduce")),
    "diloco": load_run(write_run(tmp_path / "b", floor=1.995)),
    # It sends less, but its loss is more than a tenth higher.
    "bad": load_run(write_run(tmp_path / "c", floor=2.5, interval=60)),
  }
  title = comparison_figure(runs).get_suptitle()
  # 600 exchanges of AllReduce and its flush against 20 and a flush.
  assert title == (
    "diloco sends 28.6x less than allreduce; its loss is 5.0 % higher"
  )


def test_simulated_time_comes_first_if_all_runs_have_a_clock(
  write_run, tmp_path
):
  base = load_run(write_run(tmp_path / "a", method="allreduce"))
  other = load_run(write_run(tmp_path / "b"))
  clocks = {
    "allreduce": _with_clock(base, 0.5),
    "diloco": _with_clock(other, 0.1),
  }
  first = comparison_figure(clocks).axes[0]
  assert first.get_xlabel() == "simulated time (min)\nthe given cluster"
  assert _x(first, "diloco")[-1] == pytest.approx(1)  # 600 steps of 0.1 s.
  assert _x(first, "allreduce")[-1] == pytest.approx(5)
  mixed = comparison_figure({**clocks, "diloco": other})
  assert [len(mixed.axes), len(comparison_figure(clocks).axes)] == [2, 3]


def test_the_picture_says_whose_time_it_is(write_run, tmp_path):
  run = _with_clock(load_run(write_run(tmp_path / "a")), 0.5)
  record = run.record | {"clock": "cluster 1gbit"}
  run = dataclasses.replace(run, record=record)
  label = comparison_figure({"diloco": run}).axes[0].get_xlabel()
  assert label == "simulated time (min)\ncluster 1gbit"


def test_times_of_different_clusters_are_not_set_against_each_other(
  write_run, tmp_path
):
  def timed(run, step_s, clock):
    run = _with_clock(load_run(run), step_s)
    return dataclasses.replace(run, record=run.record | {"clock": clock})

  one = {
    "allreduce": timed(
      write_run(tmp_path / "a", method="allreduce"), 0.5, "cluster 100mbit"
    ),
    "diloco": timed(write_run(tmp_path / "b"), 0.1, "cluster 10gbit"),
  }
  figure = comparison_figure(one)
  assert "simulated" not in figure.get_suptitle()
  assert len(figure.axes) == 2
  printed = _printed(list(one.values()))
  assert "5 min (cluster 100mbit)" in printed
  assert "1 min (cluster 10gbit)" in printed


def test_a_title_says_if_one_run_saw_fewer_tokens(write_run, tmp_path):
  base = load_run(write_run(tmp_path / "a", method="allreduce"))
  short = load_run(write_run(tmp_path / "b"))
  short = dataclasses.replace(
    short, rounds=short.rounds[:-1], evaluations=short.evaluations[:-1]
  )
  figure = comparison_figure({"allreduce": base, "diloco": short})
  title = figure.get_suptitle().replace("\n", " ")
  assert re.search(r"after \S+ [kM] tokens instead of \S+ [kM] tokens$", title)


def test_at_most_six_of_many_runs_are_in_front(write_run, tmp_path):
  runs = {
    f"run {n}": load_run(write_run(tmp_path / str(n), floor=1.9 + n / 100))
    for n in range(9)
  }
  ax = comparison_figure(runs).axes[0]
  names = [str(line.get_label()) for line in ax.lines]
  front = [name for name in names if name.startswith("run")]
  assert len(front) == 6 and "3 other methods" in names


def test_clocks_of_one_cluster_with_other_steps_are_kept_apart(
  write_run, tmp_path
):
  def timed(run, seconds_a_step, digest):
    run = _with_clock(load_run(run), seconds_a_step)
    clock = {"clock": "cluster 1gbit", "clock_digest": digest}
    return dataclasses.replace(run, record=run.record | clock)

  base = write_run(tmp_path / "a", method="allreduce")
  other = write_run(tmp_path / "b")
  for digest, is_compared in (("aa", True), ("bb", False)):
    runs = {
      "allreduce": timed(base, 0.5, "aa"),
      "diloco": timed(other, 0.1, digest),
    }
    title = comparison_figure(runs).get_suptitle()
    assert ("of simulated time instead" in title) is is_compared
    printed = _printed(list(runs.values()))
    assert ("1 min (cluster 1gbit, bb)" in printed) is not is_compared


def test_what_else_differs_between_runs_is_said(write_run, tmp_path):
  alike = [write_run(tmp_path / "a"), write_run(tmp_path / "b", "allreduce")]
  page = compare(alike, tmp_path / "alike").read_text()
  assert "differ in their" not in page and "an average" not in page
  assert (
    "tokens" not in _printed([load_run(run) for run in alike]).split("Gap")[0]
  )
  config = json.loads((alike[0] / "config.json").read_text())
  config["outer"]["average_power"] = 14.0
  (alike[0] / "config.json").write_text(json.dumps(config))
  runs = [alike[0], write_run(tmp_path / "c", "allreduce", num_replicas=4)]
  page = compare(runs, tmp_path / "other").read_text()
  printed = _printed([load_run(run) for run in runs])
  for text in (page, printed):
    assert "The runs differ in their replicas: diloco 2, allreduce 4." in text
    assert "Evaluated on an average of the parameters: diloco." in text
  assert "tokens" in printed.split("Gap")[0]
