"""The law of the gap: doublings lost, and their line in M."""

import csv
import dataclasses
import math
import pathlib
import re
from typing import Any

import pytest

from dilocox_jax.gap.expected import expected_gap
from dilocox_jax.plan.schedule.methods import METHODS
from experiments.gaps import law, tuning
from experiments.gaps.doublings import costs, gap_of
from experiments.gaps.rows import GapRow, by_setting, read
from experiments.gaps.settings import Rates, Setting
from tests.experiments.programs import run as run_program

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
CENTER = Setting("26k", replicas=4, batch=4, steps=96, interval=16)
RATES = {0: Rates(0.02), 1: Rates(0.02, outer=1.0)}
SEED_NOISE = (0.0, 0.004, -0.004)


def finished(setting, loss):
  """Rows of a setting whose best rates were found at once."""
  rates = RATES[0 if setting.is_allreduce else 1]
  rows = []
  for seeds in (tuning.TUNING_SEEDS, tuning.RESULT_SEEDS):
    for seed, noise in zip(seeds, SEED_NOISE, strict=True):
      values: dict[str, Any] = {
        field.name: "" for field in dataclasses.fields(GapRow)
      }
      losses = dict.fromkeys(
        ("loss_newest", "loss_average", "judge_newest", "judge_average"),
        loss * (1 + noise),
      )
      values |= dataclasses.asdict(setting) | losses
      values |= {
        "seed": seed,
        "inner_rate": rates.inner,
        "outer_rate": rates.outer,
      }
      rows.append(GapRow(**values))
  return rows


def allreduce(batch):
  return Setting("26k", replicas=1, batch=batch, steps=96)


def allreduce_rows(losses):
  rows = []
  for batch, loss in losses.items():
    rows += finished(allreduce(batch), loss)
  return rows


def divided(replicas):
  return dataclasses.replace(CENTER, replicas=replicas, batch=16 // replicas)


@pytest.mark.parametrize(
  "column, value, message",
  [
    ("size", "9x", "unknown size '9x'"),
    ("batch", "0", "batch=0 must be at least 1"),
    ("interval", "-1", "interval=-1 must be at least 0"),
    ("judge_average", "0.0", "judge_average=0.0 must be above 0"),
    ("loss_newest", "inf", "loss_newest=inf must be above 0 and below inf"),
    ("revision", None, "a line is shorter than the first one"),
  ],
)
@pytest.mark.parametrize(
  "program", ["fit_gaps --workdir={}/fit", "train_gaps --list"]
)
def test_a_damaged_line_is_named_in_one_line(
  program, column, value, message, tmp_path
):
  with (DOCS / "results/gap_law.csv").open() as file:
    names, line = list(csv.reader(file))[:2]
  cells = dict(zip(names, line, strict=True)) | {column: value}
  texts = [cell for cell in cells.values() if cell is not None]
  path = tmp_path / "rows.csv"
  path.write_text(f"{','.join(names)}\n{','.join(texts)}\n")
  name, flag = program.format(tmp_path).split()
  done = run_program(name, f"--rows={path}", flag)
  assert done.returncode == 1
  assert f"{path} is no table of gaps" in done.one_line
  assert message in done.one_line


def test_the_example_of_the_docstring():
  rows = allreduce_rows({4: 1.86, 8: 1.69, 16: 1.59}) + finished(CENTER, 1.71)
  (cost,) = costs(by_setting(rows), "judge_average")
  assert cost.setting == CENTER
  assert cost.by_curve == pytest.approx(1.12, abs=0.01)
  assert cost.gain == pytest.approx(1 - 1.59 / 1.69)
  # The last doubling gains less than the one from 4 to 8.
  assert cost.by_last_doubling == pytest.approx(1.19, abs=0.01)
  assert cost.gap.mean == pytest.approx(1.71 / 1.59 - 1)
  assert cost.gap.error == pytest.approx(0)  # The seeds are paired.
  assert gap_of(cost.by_last_doubling, cost.gain) == pytest.approx(
    cost.gap.mean
  )


def test_a_setting_is_left_out_until_allreduce_is_finished():
  rows = allreduce_rows({16: 1.59}) + finished(CENTER, 1.71)
  assert not costs(by_setting(rows), "judge_average")
  half = allreduce_rows({8: 1.69})
  assert len(costs(by_setting(rows + half), "judge_average")) == 1
  # A result seed of AllReduce is missing.
  assert not costs(by_setting(rows + half[:-1]), "judge_average")
  other_steps = [dataclasses.replace(row, steps=192) for row in half]
  assert not costs(by_setting(rows + other_steps), "judge_average")


def test_a_loss_above_all_of_allreduce_has_no_doublings_on_the_curve():
  rows = allreduce_rows({8: 1.69, 16: 1.59}) + finished(CENTER, 1.8)
  (cost,) = costs(by_setting(rows), "judge_average")
  assert math.isnan(cost.by_curve)
  assert not law.lines(rows, "judge_average")


def test_the_line_is_found_and_what_is_held_out_is_not_read():
  def loss(batch):
    return 2 * batch**-0.1

  rows = allreduce_rows({batch: loss(batch) for batch in (2, 4, 8, 16)})
  for replicas in (2, 4, 8):
    lost = 0.7 * math.log2(replicas) - 0.4
    rows += finished(divided(replicas), loss(16 / 2**lost))
  rows += finished(divided(16), 3.0)  # Held out.
  (line,) = law.lines(rows, "judge_average")
  assert line.num_points == 3
  assert line.slope.mean == pytest.approx(0.7)
  assert line.offset.mean == pytest.approx(0.4)
  assert line.slope.error == pytest.approx(0, abs=1e-9)
  assert max(map(abs, line.misses.values())) < 1e-9


def test_a_line_has_no_error_if_two_seeds_lack_points():
  rows = allreduce_rows({2: 1.9, 4: 1.8, 8: 1.7, 16: 1.6})
  rows += finished(divided(2), 1.62)
  # With four and eight replicas the first two seeds end above all losses of
  # AllReduce, and the mean does not. So these seeds have only one point.
  for replicas, last_loss in ((4, 1.5), (8, 1.6)):
    losses = dict(
      zip(tuning.RESULT_SEEDS, (1.95, 1.95, last_loss), strict=True)
    )
    rows += [
      dataclasses.replace(row, judge_average=losses.get(row.seed, 1.8))
      for row in finished(divided(replicas), 1.8)
    ]
  (line,) = law.lines(rows, "judge_average")
  assert line.num_points == 3
  assert math.isnan(line.slope.error) and math.isnan(line.offset.error)
  assert line.correlation == 0


def test_the_page_is_written_from_the_committed_rows(tmp_path):
  done = run_program("fit_gaps", f"--workdir={tmp_path}")
  assert done.returncode == 0, done.stderr
  assert "| 59k-diloco-4x4-576steps-H16 | +7.23 ± 0.40 % |" in done.stdout
  assert (tmp_path / "report.md").is_file()


def test_a_file_without_runs_is_one_line(tmp_path):
  rows = tmp_path / "none.csv"
  done = run_program("fit_gaps", f"--workdir={tmp_path}/x", f"--rows={rows}")
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert "has no finished runs: train some by" in line


def test_the_pages_have_the_gaps_of_the_other_texts():
  rows_by_setting = by_setting(read(DOCS / "results/gap_texts.csv"))
  found = {
    cost.setting.source: cost
    for cost in costs(rows_by_setting, "judge_average")
    if cost.setting.method == "diloco"
  }
  guide = (DOCS / "guides/what_replicas_cost.md").read_text()
  predictions = (DOCS / "results/predictions.md").read_text()
  titles = {
    "c_headers": "C headers",
    "manual_pages": "manual pages",
    "perl_modules": "Perl modules",
    "javascript": "JavaScript",
  }
  assert found.keys() == titles.keys()
  for source, cost in found.items():
    gap = f"{100 * cost.gap.mean:+.2f} ± {100 * cost.gap.error:.2f} %"
    row = (
      f"| `{source}` | {100 * cost.gain:.1f} % | {gap} |"
      f" {cost.by_last_doubling:.2f} |"
    )
    assert row in predictions
    (line,) = (
      line
      for line in guide.splitlines()
      if line.startswith(f"| {titles[source]} ")
    )
    assert gap in line
    # The last column says whether the range of the prediction has the gap.
    low, high = line.partition("% (+")[2].partition(")")[0].split(" to +")
    agrees = float(low) <= 100 * cost.gap.mean <= float(high)
    assert line.endswith("| yes |" if agrees else "| no |")


def test_the_guide_has_the_expected_gaps_of_the_law():
  guide = (DOCS / "guides/what_replicas_cost.md").read_text()
  _, _, example = guide.partition("--losses=1.69,1.59")
  own, _, every = example.partition("Expected gap of every method (%)")

  def expected(method, interval, replicas):
    return expected_gap(
      [1.69, 1.59],
      num_replicas=replicas,
      sync_interval=interval,
      method=method,
      steps=2000,
    )

  def percent(share):
    return f"{100 * share:+.1f}"

  rows = re.findall(r"^ +(\d+) +\d+ +16 +(\S+) % +(\S+) to (\S+) ", own, re.M)
  assert len(rows) == 4
  for replicas, *cells in rows:
    found = expected("overlap_loco", 16, int(replicas))
    assert cells == [
      percent(each) for each in (found.gap, found.low, found.high)
    ]
  rows = re.findall(r"^ +([a-z_]+) +(\d+)((?: +\+[\d.]+){4}) ", every, re.M)
  with_rounds = {
    name
    for name, build in METHODS.items()
    if build().exchanged == "pseudo_gradient"
  }
  assert {method for method, _, _ in rows} == with_rounds
  for method, interval, cells in rows:
    gaps = [expected(method, int(interval), n).gap for n in (2, 4, 8, 16)]
    assert cells.split() == list(map(percent, gaps)), method
