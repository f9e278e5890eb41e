import csv
import io
import json
import math

import pytest
from matplotlib.image import imread
from rich.console import Console

from dilocox_jax.metrics import read_rows
from dilocox_jax.report import compare, load_run, print_table
from dilocox_jax.report.units import human_bytes


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
    cells = (
      entry["method"],
      f"{final['outer_loss']:.4f}",
      human_bytes(final["total_sent_bytes"]),
      f"{final['step']:,}",
      f"{final['tokens']:,}",
      f"{wall_s:.1f}",
    )
    assert f"| {' | '.join(cells)} |" in page.read_text()
    printed = _printed([load_run(workdir)])
    assert all(cell in printed for cell in cells)


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
