"""DiLoCoX's tables: the bounds they keep, and the same numbers by hand."""

import pytest

from experiments import speedup_tables
from experiments.tables import dilocox
from experiments.tables.dilocox_runs import (
  RECIPE,
  PaperRuns,
  Setting,
)
from experiments.tables.published import load_published
from experiments.tables.runs import GOODPUT
from experiments.tables.table import Fit

FIGURES = load_published(speedup_tables._PUBLISHED / "dilocox.json")
TOKENS, INTERVAL = 32_768, 125
# Counted by hand: 78 layers, D 8192, F 49152, 8 of 64 heads of width 128.
MATRICES = 2 * 8192**2 + 3 * 8192 * 49152
NARROW = 2 * 8192 * 1024
TABLES = 2 * 152_064 * 8192
NORMS = 78 * 2 * 8192 + 8192
NUM_PARAMETERS = 78 * (MATRICES + NARROW) + TABLES + NORMS


@pytest.fixture(scope="module")
def tables():
  return dilocox.build_tables(speedup_tables._PUBLISHED)


@pytest.fixture(scope="module")
def rows(tables):
  return [row for row in tables[0].rows if row.published]


def named(rows, name):
  return [row for row in rows if row.name == name]


def runs(model="107B", setting=RECIPE):
  return PaperRuns(FIGURES, model, setting)


def test_one_recipe_keeps_the_bounds_of_both_models(rows):
  def error(name):
    row = named(rows, name)[0]
    assert row.kind == Fit.ELSEWHERE
    return abs(row.relative_error)

  assert error("OPT-1.3B, AllReduce, throughput") < 0.12
  assert error("107B, AllReduce, throughput") < 0.12
  assert error("OPT-1.3B, speed-up over AllReduce") < 0.05
  assert error("107B, speed-up over AllReduce") < 0.15
  assert error("107B, DiLoCoX without compression, throughput") < 0.05


def test_settings_picked_for_357_give_it_and_say_so(rows):
  picked = named(rows, "107B, speed-up over AllReduce")[1:]
  assert len(picked) == 2
  for row in picked:
    assert abs(row.relative_error) < 0.05
    assert row.kind == Fit.HERE and "picked" in row.basis


def test_only_the_step_and_the_codec_are_fitted_on_rows_of_throughput(rows):
  fitted = [row for row in rows if row.kind == Fit.HERE]
  names = {row.name.removesuffix(", throughput") for row in fitted}
  assert names == {
    "OPT-1.3B, DiLoCoX",
    "107B, DiLoCoX",
    "107B, DiLoCoX without overlap",
    "107B, speed-up over AllReduce",
  }
  for row in fitted:
    if "throughput" in row.name:
      assert row.predicted == pytest.approx(row.published.value, rel=1e-9)


def test_an_allreduce_step_is_compute_and_all_bytes_in_turn():
  one = runs()
  step_s = TOKENS / 3728
  sent_s = 8 * 4 * NUM_PARAMETERS / 1e9  # Two clusters: 2 (D - 1) / D = 1.
  speed = one.tokens_per_s(one.allreduce())
  assert speed == pytest.approx(TOKENS / (step_s + sent_s), rel=1e-9)
  assert one.speed_up() == pytest.approx((step_s + sent_s) / step_s, rel=1e-9)


def test_half_the_bytes_among_ten_clusters_cost_nine_tenths():
  pace = runs(setting=dilocox.PICKED[0]).allreduce()
  sent_s = 8 * 2 * NUM_PARAMETERS * 2 * 9 / 10 / 1e9
  # The tenth of a leaf has whole rows, so up to nine rows of zeros are sent.
  assert 1 <= pace.exchange_s / sent_s < 1 + 2e-5


def test_factors_of_rank_2048_are_counted_by_hand():
  one = runs()
  wide = 2 * (8192 + 8192) + 3 * (8192 + 49152)
  factors = 2048 * (78 * wide + 2 * (152_064 + 8192))
  values = factors + 78 * NARROW + NORMS  # Narrow matrices are sent whole.
  coded_bytes = values // 2 + 2 * values // 128
  flag_bytes = 2  # Each factor's message says whether its sender takes part.
  assert one.dilocox().sent_bytes == coded_bytes + flag_bytes
  config_traffic_s = 8 * coded_bytes / 1e9
  assert one.dilocox().exchange_s == pytest.approx(config_traffic_s, rel=1e-6)


def test_without_compression_the_exchange_sets_the_pace():
  pace = runs().dilocox(is_compressed=False)
  round_s = 8 * 4 * NUM_PARAMETERS / 1e9
  assert round_s > INTERVAL * TOKENS / 3728
  assert pace.seconds * INTERVAL == pytest.approx(round_s, rel=1e-6)


def test_the_codec_is_what_the_row_without_overlap_has_left():
  one = runs()
  round_s = INTERVAL * TOKENS / 2197
  compute_s = INTERVAL * TOKENS / 3728
  left_s = round_s - compute_s - one.dilocox().exchange_s
  assert one.codec_s() == pytest.approx(left_s, rel=1e-9)
  # It has to fit in a round beside the exchange, or it could not be hidden.
  assert one.codec_s() + one.dilocox().exchange_s < compute_s


def test_the_exchange_of_dilocox_is_hidden_in_every_setting():
  for model in dilocox.MODELS:
    published = FIGURES[f"{model}, DiLoCoX, throughput"].value
    for num_clusters in (2, 3, 10, 20):
      setting = Setting(num_clusters=num_clusters, efficiency=GOODPUT)
      one = runs(model, setting)
      speed = one.tokens_per_s(one.dilocox())
      assert speed == pytest.approx(published, rel=1e-9)


def test_headers_off_the_rate_leave_the_bound_of_the_large_model(tables):
  one = runs(setting=Setting(efficiency=GOODPUT))
  speed = one.tokens_per_s(one.allreduce())
  assert speed / one.published("AllReduce").value - 1 < -0.12
  assert "13 % too slow" in " ".join(tables[1].paragraphs)


def test_no_one_compression_gives_both_rows_of_cocktail_sgd():
  dense_s = 8 * 4 * NUM_PARAMETERS / 1e9
  left_s = TOKENS / 2427 - TOKENS / 3728
  assert runs().cocktail_ratio() == pytest.approx(dense_s / left_s, rel=1e-6)
  assert runs().cocktail_ratio() > 5 * runs("OPT-1.3B").cocktail_ratio()
  pace = runs().cocktail_sgd()
  dense_bytes = runs().allreduce().sent_bytes
  assert dense_bytes / pace.sent_bytes == pytest.approx(117, rel=0.01)


def test_devices_achieve_a_twentieth_of_their_peak():
  flops = 6 * (NUM_PARAMETERS - TABLES / 2) + 12 * 78 * 8192 * 2048
  by_hand = 3728 * flops / (160 * 312e12)
  assert runs().implied_utilisation() == pytest.approx(by_hand, rel=1e-4)


def test_the_table_of_settings_holds_the_recipe_and_the_picked(tables):
  assert RECIPE in dilocox.SCANNED
  assert dilocox.PICKED[0] in dilocox.SCANNED
  assert len(tables[1].cells) == len(dilocox.SCANNED) == 16
