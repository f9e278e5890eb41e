"""Cells of the papers' tables: errors, units, ranges, and two derived rows."""

import pytest

from dilocox_jax.plan.model.presets import MODEL_PRESETS
from dilocox_jax.plan.model.shapes import flops_per_token
from experiments.tables import layers, runs, table
from experiments.tables.dilocox import PaperRuns
from experiments.tables.table import Figure, Fit, Prediction, load_published

READ = Figure("table 1, speed", 10.0, "tokens/s", "a paper", "published")
RECALLED = Figure("other", 20.0, "ratio", "memory", "recalled, unverified")


def beside(figure, predicted, **others):
  return Prediction(
    figure.name, predicted, figure.unit, Fit.NONE, "b", figure, **others
  )


@pytest.mark.parametrize(
  ("predicted", "others", "error"),
  [
    (12.0, {}, "+20.0%"),
    (9.0, {}, "-10.0%"),
    (10.0 - 1e-9, {}, "+0.0%"),
    (12.0, {"grid_steps": 2}, "+2 steps"),
    (9.0, {"grid_steps": -1}, "-1 steps"),
    (9.0, {"grid_steps": 0}, "exact"),
  ],
)
def test_an_error_is_relative_to_what_was_published(predicted, others, error):
  assert beside(READ, predicted, **others).error == error


def test_a_row_shows_what_was_published_and_whether_it_was_read():
  assert beside(READ, 12345.6).cells() == (
    "speed",
    "10 tokens/s",
    "12,346",
    "+123356.0%",
    "derived",
    "b",
  )
  assert beside(RECALLED, 20.126).cells()[1:3] == (
    "20 ratio (unverified)",
    "20.13",
  )
  alone = Prediction("free", 1.5, "h", Fit.HERE)
  assert alone.cells() == ("free", "", "1.5 h", "", "fitted on this row", "")
  data = beside(READ, 12.0).data()
  assert (data["published"], data["predicted"]) == (10.0, 12.0)
  assert data["relative_error"] == pytest.approx(0.2)
  assert (data["source"], data["status"]) == ("a paper", "published")


@pytest.mark.parametrize(
  ("predicted", "cells"),
  [
    (15.0, ["10-20*", "15", "within", "derived"]),
    (10.0, ["10-20*", "10", "within", "derived"]),
    (20.0, ["10-20*", "20", "within", "derived"]),
    (9.9, ["10-20*", "9.9", "outside", "derived"]),
    (20.1, ["10-20*", "20.1", "outside", "derived"]),
  ],
)
def test_a_range_holds_what_is_between_its_ends(predicted, cells):
  ends = [beside(READ, predicted), beside(RECALLED, predicted)]
  line = table._summary_line("a paper", "figure", ends)
  assert line.split()[3:] == cells


def test_the_share_of_the_peak_is_that_of_all_devices():
  paper = PaperRuns(load_published("dilocox"), "107B")
  # 3,728 tokens a second on 160 devices of 312 TFLOP/s.
  flops = 3728 * flops_per_token(MODEL_PRESETS["qwen_107b"], 2048)
  assert paper.implied_utilization() == pytest.approx(flops / (160 * 312e12))
  # Six operations a parameter and token are most of them.
  most = 3728 * 6 * 107e9 / (160 * 312e12)
  assert most < paper.implied_utilization() < 1.1 * most


def test_cocktail_sgd_sends_in_the_time_that_its_steps_leave():
  paper = PaperRuns(load_published("dilocox"), "107B")
  left_s = 32_768 / 2427 - 32_768 / 3728
  assert paper.cocktail_ratio() == pytest.approx(
    paper.allreduce().exchange_s / left_s
  )


def test_the_least_value_is_found_from_above():
  assert runs.least(lambda x: x >= 37.0, 1.0, 1000.0) == pytest.approx(37, 2e-3)
  assert runs.least(lambda x: x >= 37.0, 1.0, 1000.0) >= 37.0
  assert runs.least(lambda x: x >= 1001.0, 1.0, 1000.0) == float("inf")
  assert runs.least(lambda x: x >= 1000.0, 1.0, 1000.0) == 1000.0


def test_links_that_are_alike_go_both_ways():
  both = runs.equal_links(2, 1e9).sites[1].link
  assert (both.up_bps, both.down_bps) == (1e9, 1e9)
  one = runs.equal_links(2, 1e9, 2e9, rtt_s=0.1).sites[0].link
  assert (one.up_bps, one.down_bps, one.rtt_s) == (1e9, 2e9, 0.1)


def test_the_grid_is_known_by_its_nearest_value():
  # A tenth of a Gbit/s to a thousand in 50 values.
  assert layers.grid_index(0.1e9) == 0 and layers.grid_index(1000e9) == 49
  ratio = 10 ** (4 / 49)
  assert layers.grid_index(0.1e9 * ratio**1.4) == 1
  assert layers.grid_index(0.1e9 * ratio**1.6) == 2


def test_the_nodes_of_a_step_are_those_of_the_closed_form():
  model = layers.LayerModel(num_parameters=8.0, num_layers=2, step_s=1.0)
  starts, stops = layers._node_times(model)
  # Two forward passes of 0.1 s; three nodes of 0.267 s follow from 0.2 s on.
  assert starts == pytest.approx([0.0, 0.1])
  assert stops == pytest.approx([1.0, 1 - 0.8 / 3])
