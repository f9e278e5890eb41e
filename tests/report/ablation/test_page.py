import csv
import io
import json

import pytest
from matplotlib.image import imread
from rich.console import Console

from dilocox_jax.report import TrialOutcome, print_ablation, write_ablation


def outcome(workdir, name, seed=0, failure="", **settings):
  log = workdir.parent / f"{name}.log"
  return TrialOutcome(
    name, seed, workdir, settings, settings, 2.5, failure, log
  )


@pytest.fixture(name="outcomes")
def outcomes_fixture(write_run, tmp_path):
  """Two ranks with two seeds each, and one that failed."""
  made = [
    outcome(
      write_run(tmp_path / f"{rank}-{seed}", floor=floor + seed / 100),
      f"rank [{rank}]",
      seed,
      rank=rank,
    )
    for rank, floor in ((8, 2.2), (16, 2.0))
    for seed in (0, 1)
  ]
  failed = outcome(tmp_path / "x", "too hot", failure="not finite", rank=1)
  return [*made, failed]


def printed(outcomes):
  console = Console(file=io.StringIO(), width=160)
  print_ablation(outcomes, console)
  return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_page_table_and_data_say_the_same(outcomes, tmp_path):
  page = write_ablation(outcomes, tmp_path / "out", "the command")
  text = page.read_text()
  document = json.loads((page.parent / "ablation.json").read_text())
  lines = (page.parent / "ablation.csv").read_text().splitlines()
  rows = list(csv.DictReader(lines))
  assert [row["run"] for row in rows] == ["rank [16]", "rank [8]"]
  for data, row in zip(document["runs"], rows, strict=True):
    assert data["num_seeds"] == 2 and len(data["losses"]) == 2
    mean = sum(data["losses"].values()) / 2
    assert data["validation_loss"] == pytest.approx(mean)
    assert float(row["validation_loss"]) == data["validation_loss"]
    assert int(row["total_sent_bytes"]) == data["total_sent_bytes"]
    assert int(row["setting:rank"]) == data["settings"]["rank"]
    loss = f"{data['validation_loss']:.4f} ± {data['standard_error']:.4f}"
    for shown in (text, printed(outcomes)):
      assert loss in shown and data["run"] in shown and "2.50x" in shown
  assert "the command" in text


def test_the_front_is_told(outcomes, tmp_path):
  page = write_ablation(outcomes, tmp_path / "out")
  rows = json.loads((page.parent / "ablation.json").read_text())["runs"]
  front = {row["run"]: row["is_on_pareto_front"] for row in rows}
  assert front == {"rank [16]": True, "rank [8]": False}  # The same bytes.
  assert "fewest bytes first: rank [16]." in page.read_text()


def test_what_failed_is_told_with_reason_and_log(outcomes, tmp_path):
  page = write_ablation(outcomes, tmp_path / "out")
  document = json.loads((page.parent / "ablation.json").read_text())
  log = str(tmp_path / "too hot.log")
  (failed,) = document["failed"]
  assert (failed["reason"], failed["log"]) == ("not finite", log)
  assert f"| too hot | 0 | not finite | {log} |" in page.read_text()
  assert f"too hot, seed 0: not finite (log: {log})" in printed(outcomes)


def test_the_page_shows_a_figure_for_what_varies(outcomes, tmp_path):
  page = write_ablation(outcomes, tmp_path / "out")
  for name in ("pareto", "rank"):
    assert f"(figures/{name}.png)" in page.read_text()
    pixels = imread(page.parent / "figures" / f"{name}.png")
    assert min(pixels.shape[:2]) > 400 and pixels.std() > 0.05


def test_corpora_are_never_in_one_table(write_run, tmp_path):
  outcomes = [
    outcome(write_run(tmp_path / name, digest=digest), name)
    for name, digest in (("a", "aaaa"), ("b", "bbbb"))
  ]
  page = write_ablation(outcomes, tmp_path / "out")
  one, other = page.read_text().split("## On ")[1:]
  assert "aaaa" in one and "| a |" in one and "| b |" not in one
  assert "bbbb" in other and "| b |" in other and "| a |" not in other
  assert "pareto-corpus1.png" in one and "pareto-corpus2.png" in other
  assert printed(outcomes).count("validation loss") == 2


def test_a_setting_without_all_its_seeds_says_so(outcomes):
  lost = outcomes[0]
  failed = [
    TrialOutcome(
      lost.name, 0, lost.workdir, {}, lost.settings, 1.0, "gone", lost.log
    ),
    *outcomes[1:],
  ]
  assert "rank [8] (1 of 2 seeds)" in printed(failed)


def test_an_ablation_where_all_failed_still_has_a_page(tmp_path):
  outcomes = [outcome(tmp_path / "a", "a", failure="no memory")]
  page = write_ablation(outcomes, tmp_path / "out")
  assert "no memory" in page.read_text() and "no memory" in printed(outcomes)
  assert (page.parent / "ablation.csv").exists()
