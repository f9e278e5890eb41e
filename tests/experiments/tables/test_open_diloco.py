"""OpenDiLoCo's band follows from its inputs."""

import re

import pytest

from experiments import speedup_tables
from experiments.tables import open_diloco
from experiments.tables.table import Fit

(TABLE,) = open_diloco.build_tables(speedup_tables._PUBLISHED)
LOWEST, HIGHEST, EXCHANGE, NEEDED = TABLE.rows
COMPUTE_S = 67.5 * 60


def test_the_band_holds_the_prediction_and_nothing_was_fitted():
  assert LOWEST.predicted == HIGHEST.predicted
  figures = [row.published for row in TABLE.rows if row.published]
  low, high = (figure.value for figure in figures[:2])
  assert low <= LOWEST.predicted <= high
  assert {row.kind for row in TABLE.rows} == {Fit.NONE}


def test_the_exchange_is_bytes_over_the_slowest_link():
  sent_bytes = 2 * 3 / 4 * 1.1e9 * 2
  by_hand_s = sent_bytes * 8 / (127e6 * 1448 / 1514)
  # The rest is round trips and slow start.
  assert by_hand_s < EXCHANGE.predicted < by_hand_s + 5
  share = COMPUTE_S / (COMPUTE_S + EXCHANGE.predicted)
  assert HIGHEST.predicted == pytest.approx(100 * share, rel=1e-3)


def test_the_needed_link_gives_nine_tenths():
  by_hand = 127 * EXCHANGE.predicted / (COMPUTE_S / 9)
  assert NEEDED.predicted == pytest.approx(by_hand, rel=0.02)
  assert re.search(f"Down to {NEEDED.predicted:.0f} Mbit", TABLE.paragraphs[1])
