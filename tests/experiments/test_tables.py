"""The papers' tables: the same numbers by hand, and what the program writes."""

import csv
import json
import shutil

import pytest

from dilocox_jax.config import to_plan
from experiments import speedup_tables
from experiments.tables import (
  dilocox,
  streaming_diloco,
  utilisation,
)
from experiments.tables.dilocox import RECIPE, PaperRuns, Setting
from experiments.tables.runs import (
  GOODPUT,
  Rounds,
  config_of,
  equal_links,
  least,
)
from experiments.tables.table import (
  Figure,
  Fit,
  Prediction,
  _notes,
  beside,
  load_published,
)
from tests.experiments import programs

PUBLISHED = speedup_tables._PUBLISHED
TOKENS, INTERVAL = 32_768, 125
# Counted by hand: 78 layers, D 8192, F 49152, 8 of 64 heads of width 128.
MATRICES = 2 * 8192**2 + 3 * 8192 * 49152
NARROW = 2 * 8192 * 1024
TABLES = 2 * 152_064 * 8192
NORMS = 78 * 2 * 8192 + 8192
NUM_PARAMETERS = 78 * (MATRICES + NARROW) + TABLES + NORMS
STREAMING = {"sync_interval": 12, "num_fragments": 4, "overlap_steps": 2}
GOOD = {
  "name": "utilisation",
  "value": 90,
  "unit": "percent",
  "source": "a paper, table 1",
  "status": "published",
}


def figures(name):
  return load_published(PUBLISHED / f"{name}.json")


def runs(model="107B", setting=RECIPE):
  return PaperRuns(figures("dilocox"), model, setting)


@pytest.fixture(scope="module")
def rows():
  (table,) = dilocox.build_tables(PUBLISHED)
  return [row for row in table.rows if row.published]


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
  assert runs().allreduce().seconds == pytest.approx(step_s + sent_s, rel=1e-9)
  assert runs().speed_up() == pytest.approx(1 + sent_s / step_s, rel=1e-9)


def test_half_the_bytes_among_ten_clusters_cost_nine_tenths():
  pace = runs(setting=dilocox.PICKED[0]).allreduce()
  sent_s = 8 * 2 * NUM_PARAMETERS * 2 * 9 / 10 / 1e9
  # The tenth of a leaf has whole rows, so up to nine rows of zeros are sent.
  assert 1 <= pace.exchange_s / sent_s < 1 + 2e-5


def test_factors_of_rank_2048_are_counted_by_hand():
  wide = 2 * (8192 + 8192) + 3 * (8192 + 49152)
  factors = 2048 * (78 * wide + 2 * (152_064 + 8192))
  values = factors + 78 * NARROW + NORMS  # Narrow matrices are sent whole.
  coded_bytes = values // 2 + 2 * values // 128
  flag_bytes = 2  # Each factor's message says whether its sender takes part.
  assert runs().dilocox().sent_bytes == coded_bytes + flag_bytes


def test_without_compression_the_exchange_sets_the_pace():
  pace = runs().dilocox(is_compressed=False)
  round_s = 8 * 4 * NUM_PARAMETERS / 1e9
  assert round_s > INTERVAL * TOKENS / 3728
  assert pace.seconds * INTERVAL == pytest.approx(round_s, rel=1e-6)


def test_the_codec_is_what_the_row_without_overlap_has_left():
  one = runs()
  compute_s = INTERVAL * TOKENS / 3728
  left_s = INTERVAL * TOKENS / 2197 - compute_s - one.dilocox().exchange_s
  assert one.codec_s() == pytest.approx(left_s, rel=1e-9)
  # It has to fit in a round beside the exchange, or it could not be hidden.
  assert one.codec_s() + one.dilocox().exchange_s < compute_s


@pytest.mark.parametrize("model", dilocox.MODELS)
def test_the_exchange_of_dilocox_is_hidden_in_every_setting(model):
  for num_clusters in (2, 20):
    one = runs(model, Setting(num_clusters, efficiency=GOODPUT))
    assert one.dilocox().seconds == pytest.approx(one.step_s, rel=1e-9)


def test_no_one_compression_gives_both_rows_of_cocktail_sgd():
  dense_s = 8 * 4 * NUM_PARAMETERS / 1e9
  left_s = TOKENS / 2427 - TOKENS / 3728
  assert runs().cocktail_ratio() == pytest.approx(dense_s / left_s, rel=1e-6)
  assert runs().cocktail_ratio() > 5 * runs("OPT-1.3B").cocktail_ratio()
  fewer = runs().allreduce().sent_bytes / runs().cocktail_sgd().sent_bytes
  assert fewer == pytest.approx(117, rel=0.01)


def test_devices_achieve_a_twentieth_of_their_peak():
  flops = 6 * (NUM_PARAMETERS - TABLES / 2) + 12 * 78 * 8192 * 2048
  by_hand = 3728 * flops / (160 * 312e12)
  assert runs().implied_utilisation() == pytest.approx(by_hand, rel=1e-4)


# The other papers.


def test_covenant_uploads_its_payload_and_a_ring_sends_those_of_all_others():
  (table,) = utilisation.covenant_72b(PUBLISHED)
  share, exchange, compression, ring = table.rows
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
  (table,) = utilisation.intellect_1(PUBLISHED)
  shares = [row for row in table.rows if "utilisation" in row.name]
  assert all(abs(row.relative_error) < 0.1 for row in shares)
  derived = {row.name for row in table.rows if row.kind == Fit.NONE}
  assert derived == {"bandwidth reduction", "model FLOPS utilisation, lowest"}
  one = utilisation.Intellect1(figures("intellect_1"))
  sent_bits = 2 * 13 / 14 * 1e10 * (8 + 16 / 128)
  by_hand = sent_bits / (469 * GOODPUT) / 1e6
  # Round trips take a few seconds of the 469.
  assert by_hand < one.rate_for(469) < 1.02 * by_hand
  assert one.reduction() == pytest.approx(100 * 32 / (8 + 16 / 128), rel=1e-4)


def test_open_diloco_is_bytes_over_the_slowest_link_within_the_band():
  (table,) = utilisation.open_diloco(PUBLISHED)
  lowest, highest, exchange, needed = table.rows
  by_hand_s = 8 * 2 * 3 / 4 * 1.1e9 * 2 / (127e6 * GOODPUT)
  # The rest is round trips and slow start.
  assert by_hand_s < exchange.predicted < by_hand_s + 5
  share = 100 * 4050 / (4050 + exchange.predicted)
  assert lowest.published and highest.published
  assert lowest.published.value <= share <= highest.published.value
  assert highest.predicted == pytest.approx(share, rel=1e-3)
  by_hand = 127 * exchange.predicted / (4050 / 9)
  assert needed.predicted == pytest.approx(by_hand, rel=0.02)


def test_every_cell_of_the_streaming_table_has_a_row():
  table, hours = streaming_diloco.build_tables(PUBLISHED)
  steps = [row.grid_steps for row in table.rows]
  assert len({row.name for row in table.rows}) == len(steps) == 75
  differing = sum(" / " in cell for cells in table.cells for cell in cells)
  assert differing == 75 - steps.count(0)
  assert max(abs(row.relative_error) for row in hours.rows[:3]) < 0.03


# Rounds in their steady state.


def test_a_round_that_waits_is_steps_codec_and_exchange():
  config = config_of("diloco", sync={"sync_interval": 10})
  pace = Rounds.of(config).on(equal_links(2, 1e7), 0.3, codec_s=2.0)
  assert 10 * pace.seconds == pytest.approx(10 * 0.3 + 2 + pace.exchange_s)
  assert pace.utilisation == pytest.approx(0.3 / pace.seconds)


def test_the_bytes_of_a_round_are_those_of_its_fragments():
  config = config_of("streaming_diloco", sync=STREAMING)
  traffic = to_plan.traffic(config)
  pace = Rounds.of(config).on(equal_links(2, 1e9), 1.0)
  assert pace.sent_bytes == sum(map(traffic.exchange_bytes, range(4)))


@pytest.mark.parametrize("bps", [1e6, 1e9])
@pytest.mark.parametrize(
  "name, sync",
  [
    ("streaming_diloco", STREAMING),
    ("dilocox", {"sync_interval": 12}),
    ("eager", {"sync_interval": 12}),
    ("allreduce", {}),
  ],
)
def test_later_rounds_take_as_long_as_those_counted(name, sync, bps):
  config = config_of(name, sync=sync)
  early, late = (
    Rounds.of(config, *counts).on(equal_links(2, bps), 0.05)
    for counts in ((1, 2), (9, 5))
  )
  assert early.seconds == pytest.approx(late.seconds, rel=1e-9)


def test_the_least_value_is_found_from_above():
  assert 7 <= least(lambda value: value >= 7, 1.0, 1e6) < 7 * 1.001
  assert least(lambda value: False, 1.0, 1e6) == float("inf")


# Published figures.


def test_what_was_not_read_in_a_paper_is_not_called_published():
  for path in PUBLISHED.glob("*.json"):
    assert load_published(path)
  found = figures("dilocox")
  assert found["107B, speed-up over AllReduce"].is_verified
  assert not found["107B, AllReduce, throughput"].is_verified


@pytest.mark.parametrize(
  "change, word",
  [
    ({"status": "guessed"}, "status='guessed'"),
    ({"unit": " "}, "unit"),
    ({"unit": None}, "unit=None"),
    ({"source": ""}, "source"),
    ({"value": "90"}, "value='90'"),
    ({"value": True}, "value=True"),
    ({"value": float("nan")}, "value=nan"),
    ({"units": "percent"}, "units"),
    ({"name": "first"}, "another figure"),
  ],
)
def test_a_wrong_figure_is_refused_in_one_line(tmp_path, change, word):
  path = tmp_path / "a.json"
  entries = [GOOD | {"name": "first"}, GOOD | change]
  path.write_text(json.dumps({"paper": "a paper", "figures": entries}))
  with pytest.raises(ValueError, match=f"{path}: figure 2 .*{word}") as caught:
    load_published(path)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"paper": "x", "figures": {}}'])
def test_a_file_of_another_shape_is_refused(tmp_path, text):
  path = tmp_path / "a.json"
  with pytest.raises(ValueError, match=path.name):
    load_published(path)
  path.write_text(text)
  with pytest.raises(ValueError, match=path.name):
    load_published(path)


# What the program writes and shows.


def test_an_error_is_relative_or_in_grid_steps():
  figure = Figure("speed", 8.0, "tokens/s", "a paper, table 1", "published")
  assert beside(figure, 10.0, Fit.NONE).error == "+25.0%"
  assert beside(figure, 10.0, Fit.NONE, grid_steps=-2).error == "-2 steps"
  assert beside(figure, 10.0, Fit.NONE, grid_steps=0).error == "exact"
  assert Prediction("speed", 10.0, "tokens/s", Fit.NONE).error == ""


def test_the_page_the_files_and_the_summary_have_the_same_rows(written):
  folder, done = written
  assert done.returncode == 0, done.stderr
  text = (folder / "report.md").read_text()
  for name in _notes():
    assert f"`{name}.csv`" in text
    with (folder / f"{name}.csv").open() as file:
      found = list(csv.DictReader(file))
    assert all(row["source"] for row in found if row["published"])
  # The path of the report is as long as its folder's.
  lines = done.stdout.replace(str(folder), "").splitlines()
  assert len(lines) <= 15 and max(map(len, lines)) <= 80
  (ratio,) = [line for line in lines if "107B speed-up" in line]
  assert ratio.split()[-5:] == ["357", "396", "+10.9%", "by", "others"]
  assert any("OPT-1.3B" in line and " 32* " in line for line in lines)
  assert any("90-95" in line and "within" in line for line in lines)


def test_a_figure_that_is_missing_is_named_in_one_line(tmp_path):
  shutil.copytree(PUBLISHED, tmp_path / "figures")
  path = tmp_path / "figures" / "streaming_diloco.json"
  content = json.loads(path.read_text())
  content["figures"] = content["figures"][:-20]
  path.write_text(json.dumps(content))
  done = programs.run(
    "speedup_tables",
    f"--workdir={tmp_path / 'out'}",
    f"--published={tmp_path / 'figures'}",
    "--papers=streaming_diloco",
  )
  assert done.returncode == 2
  assert "streaming_diloco need a figure 'table " in done.one_line
