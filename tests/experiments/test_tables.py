"""The papers' tables: the same numbers by hand, and what the program writes."""

import csv
import json
import math

import pytest

from experiments.tables import (
  all_reduces,
  dilocox,
  streaming_diloco,
  table,
  utilization,
)
from experiments.tables.dilocox import PaperRuns
from experiments.tables.runs import GOODPUT
from experiments.tables.table import PUBLISHED, Fit, load_published
from tests import damage
from tests.experiments import programs

TOKENS = 32_768
INTERVAL = 125
# Counted by hand: 78 layers, D 8192, F 49152, 8 of 64 heads of width 128.
MATRICES = 2 * 8192**2 + 3 * 8192 * 49152
NARROW = 2 * 8192 * 1024
TABLES = 2 * 152_064 * 8192
NORMS = 78 * 2 * 8192 + 8192
NUM_PARAMETERS = 78 * (MATRICES + NARROW) + TABLES + NORMS


def runs(model="107B"):
  return PaperRuns(load_published("dilocox"), model)


@pytest.fixture(scope="module")
def rows():
  (made,) = dilocox.build_tables()
  return [row for row in made.rows if row.published]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  folder = tmp_path_factory.mktemp("tables")
  return folder, programs.run("speedup_tables", f"--workdir={folder}")


# DiLoCoX.


@pytest.mark.parametrize(
  "name, bound",
  [
    ("OPT-1.3B, AllReduce, throughput", 0.12),
    ("107B, AllReduce, throughput", 0.12),
    ("OPT-1.3B, speed-up over AllReduce", 0.05),
    ("107B, speed-up over AllReduce", 0.15),
    ("107B, DiLoCoX without compression, throughput", 0.05),
  ],
)
def test_one_recipe_keeps_the_bounds_of_both_models(rows, name, bound):
  row = next(row for row in rows if row.name == name)
  assert row.kind == Fit.ELSEWHERE and abs(row.relative_error) < bound


def test_what_was_fitted_on_its_row_is_that_row(rows):
  fitted = [row for row in rows if row.kind == Fit.HERE]
  assert {row.name for row in fitted} == {
    "OPT-1.3B, DiLoCoX, throughput",
    "107B, DiLoCoX, throughput",
    "107B, DiLoCoX without overlap, throughput",
    "107B, speed-up over AllReduce",
  }
  for row in fitted:
    bound = 0.05 if "picked" in row.basis else 1e-9
    assert abs(row.relative_error) < bound


def test_an_allreduce_step_is_compute_and_all_bytes_in_turn():
  step_s = TOKENS / 3728
  sent_s = 8 * 4 * NUM_PARAMETERS / 1e9  # Two clusters: 2 (D - 1) / D = 1.
  assert runs().allreduce().step_s == pytest.approx(step_s + sent_s, rel=1e-9)
  assert runs().speed_up() == pytest.approx(1 + sent_s / step_s, rel=1e-9)


def test_factors_of_rank_2048_are_counted_by_hand():
  wide = 2 * (8192 + 8192) + 3 * (8192 + 49152)
  factors = 2048 * (78 * wide + 2 * (152_064 + 8192))
  values = factors + 78 * NARROW + NORMS  # Narrow matrices are sent whole.
  # Each of two factors' messages says whether its sender takes part.
  expected_bytes = values // 2 + 2 * values // 128 + 2
  sent_bytes = INTERVAL * runs().dilocox().sent_bytes
  assert sent_bytes == pytest.approx(expected_bytes, abs=0.1)


def test_without_compression_the_exchange_sets_the_pace():
  found = runs().dilocox(codec="")
  round_s = 8 * 4 * NUM_PARAMETERS / 1e9
  assert round_s > INTERVAL * TOKENS / 3728
  assert found.step_s * INTERVAL == pytest.approx(round_s, rel=1e-6)


def test_the_codec_is_what_the_row_without_overlap_has_left():
  one = runs()
  compute_s = INTERVAL * TOKENS / 3728
  exchange_s = INTERVAL * one.dilocox().exchange_s
  left_s = INTERVAL * TOKENS / 2197 - compute_s - exchange_s
  assert one.codec_s() == pytest.approx(left_s, rel=1e-9)
  # It has to fit in a round beside the exchange, or it could not be hidden.
  assert one.codec_s() + exchange_s < compute_s


# The other papers.


def test_covenant_uploads_its_payload_and_a_ring_sends_those_of_all_others():
  (made,) = utilization.covenant_72b()
  share, exchange, compression, ring = made.rows
  assert abs(share.relative_error) < 0.1
  assert abs(compression.relative_error) < 0.01
  payload_bits = 72.7e9 * 64 / 4096 * (12 + 2)
  upload_s = payload_bits / (110e6 * GOODPUT)
  assert upload_s < exchange.predicted < upload_s + 2
  by_hand = 1200 / (1200 + exchange.predicted)
  assert share.predicted == pytest.approx(100 * by_hand, rel=1e-3)
  by_hand = 1200 / (1200 + 19 * upload_s)
  assert ring.predicted == pytest.approx(100 * by_hand, rel=0.01)


def test_intellect_fits_a_rate_on_each_allreduce_and_derives_two_rows():
  (made,) = utilization.intellect_1()
  shares = [row for row in made.rows if "utilization" in row.name]
  assert all(abs(row.relative_error) < 0.1 for row in shares)
  derived = {row.name for row in made.rows if row.kind == Fit.NONE}
  assert derived == {"bandwidth reduction", "model FLOPS utilization, lowest"}
  sent_bits = 2 * 13 / 14 * 1e10 * (8 + 16 / 128)
  by_hand = sent_bits / (469 * GOODPUT) / 1e6
  # Round trips take a few seconds of the 469.
  rates = [float(x.split(" (")[0]) for x in made.numbers["rates"].split(", ")]
  assert any(by_hand - 1 < rate < 1.02 * by_hand + 1 for rate in rates)
  (reduction,) = (x for x in made.rows if x.name == "bandwidth reduction")
  by_hand = 100 * 32 / (8 + 16 / 128)
  assert reduction.predicted == pytest.approx(by_hand, rel=1e-4)


def test_open_diloco_is_bytes_over_the_slowest_link_within_the_band():
  (made,) = utilization.open_diloco()
  lowest, highest, exchange, needed = made.rows
  by_hand_s = 8 * 2 * 3 / 4 * 1.1e9 * 2 / (127e6 * GOODPUT)
  # The rest is round trips and slow start.
  assert by_hand_s < exchange.predicted < by_hand_s + 5
  share = 100 * 4050 / (4050 + exchange.predicted)
  assert lowest.published and highest.published
  assert lowest.published.value <= share <= highest.published.value
  assert highest.predicted == pytest.approx(share, rel=1e-3)
  by_hand = 127 * exchange.predicted / (4050 / 9)
  assert needed.predicted == pytest.approx(by_hand, rel=0.02)


def test_the_tables_of_streaming_diloco_are_reproduced():
  made, hours = streaming_diloco.build_tables()
  steps = [row.grid_steps for row in made.rows]
  assert len({row.name for row in made.rows}) == len(steps) == 75
  assert steps.count(0) >= 63 and set(steps) == {-1, 0, 1}
  for row in made.rows:
    assert row.grid_steps == 0 or "Streaming" in row.name
  differing = sum(" / " in cell for cells in made.cells for cell in cells)
  assert differing == 75 - steps.count(0)
  assert max(abs(row.relative_error) for row in hours.rows[:3]) < 0.03


def test_measured_allreduces_are_met_without_any_fitted_constant():
  (made,) = all_reduces.build_tables()
  assert {row.kind for row in made.rows} == {Fit.NONE}
  assert len({row.name for row in made.rows}) == 2 * 3 * 4
  for row in made.rows:
    bound = 0.1 if row.name.startswith("gloo") else 0.03
    assert abs(row.relative_error) < bound, row.name
  figures = load_published("tc_cluster_setting")
  assert figures["gloo, 16 machines, 1 Gbit/s, 10 ms"].value == 3873
  assert all(figure.is_verified for figure in figures.values())


def test_without_its_round_trips_gloo_would_take_as_long_as_nccl(monkeypatch):
  """So the table tests what the simulator knows of gloo."""
  monkeypatch.setitem(all_reduces.TRANSPORTS, "gloo", all_reduces.NCCL)
  (made,) = all_reduces.build_tables()
  gloo = [row for row in made.rows if row.name.startswith("gloo")]
  assert max(row.relative_error for row in gloo) < -0.25


# What the program writes and shows.


def test_the_page_the_files_and_the_summary_have_the_same_rows(written):
  folder, done = written
  assert done.returncode == 0, done.stderr
  text = (folder / "report.md").read_text()
  for name in table._notes():
    assert f"`{name}.csv`" in text
    with (folder / f"{name}.csv").open() as file:
      found = list(csv.DictReader(file))
    assert all(row["source"] for row in found if row["published"])
  # The path of the report is as long as its folder's.
  lines = done.stdout.replace(str(folder), "").splitlines()
  assert len(lines) <= 17 and max(map(len, lines)) <= 80
  (ratio,) = [line for line in lines if "107B speed-up" in line]
  assert ratio.split()[-5:] == ["357", "396", "+10.9%", "by", "others"]
  assert any("OPT-1.3B" in line and " 32* " in line for line in lines)
  assert any("90-95" in line and "within" in line for line in lines)


def test_a_damaged_file_of_published_figures_is_one_line(tmp_path):
  whole = json.loads(PUBLISHED.read_text())
  figures = whole["cocktail_sgd"]["figures"][:2]
  path = tmp_path / "published.json"
  path.write_text(json.dumps({"a": {"figures": figures}}))
  before = load_published("a", path)
  assert [*before] == [each["name"] for each in figures]
  for what, text in damage.in_fields({"a": {"figures": figures}}):
    path.write_text(text)
    found = damage.outcome(what, lambda: load_published("a", path))
    for figure in (found or {}).values():
      assert math.isfinite(figure.value), what
  path.write_text(json.dumps({"a": {"figures": figures[:1] * 2}}))
  with pytest.raises(ValueError, match="is damaged: a: .* is there twice"):
    load_published("a", path)
