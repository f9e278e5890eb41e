"""INTELLECT-1: utilisations, and the little that is derived."""

import pytest

from experiments import speedup_tables
from experiments.tables import intellect_1
from experiments.tables.published import load_published
from experiments.tables.table import Fit
from tests.experiments.tables.compared import compared

FIGURES = load_published(speedup_tables._PUBLISHED / "intellect_1.json")
(TABLE,) = intellect_1.build_tables(speedup_tables._PUBLISHED)


def test_all_utilisations_are_within_a_tenth():
  rows = [row for row in compared(TABLE) if "utilisation" in row.name]
  assert len(rows) == 6
  assert all(abs(row.relative_error) < 0.1 for row in rows)


def test_what_depends_on_a_fitted_rate_is_not_called_derived():
  derived = {r.name for r in compared(TABLE) if r.kind == Fit.NONE}
  assert derived == {
    "bandwidth reduction",
    "model FLOPS utilisation, lowest",
  }


def test_a_fitted_rate_is_that_of_a_ring_of_fourteen():
  runs = intellect_1._Runs(FIGURES)
  sent_bits = 2 * 13 / 14 * 1e10 * (8 + 16 / 128)
  by_hand = sent_bits / (469 * 1448 / 1514) / 1e6
  # Round trips take a few seconds of the 469.
  assert by_hand < runs.rate_for(469) < 1.02 * by_hand
  assert runs.at(runs.rate_for(469)).exchange_s == pytest.approx(469, rel=1e-3)


def test_the_reduction_is_a_hundred_steps_of_four_bytes_for_one():
  runs = intellect_1._Runs(FIGURES)
  assert runs.reduction() == pytest.approx(100 * 32 / (8 + 16 / 128), rel=1e-4)
