"""Covenant-72B: what an upload costs, and what a ring would."""

import pytest

from experiments import speedup_tables
from experiments.tables import covenant_72b
from experiments.tables.published import load_published
from tests.experiments.tables.compared import compared

FIGURES = load_published(speedup_tables._PUBLISHED / "covenant_72b.json")
(TABLE,) = covenant_72b.build_tables(speedup_tables._PUBLISHED)
UTILISATION, EXCHANGE, COMPRESSION, RING = TABLE.rows
PAYLOAD_BITS = 72.7e9 * 64 / 4096 * (12 + 2)
GOODPUT = 1448 / 1514


def test_utilisation_is_within_a_tenth_and_compression_within_a_hundredth():
  errors = {row.name: row.relative_error for row in compared(TABLE)}
  assert abs(errors["utilisation"]) < 0.1
  assert abs(errors["compression"]) < 0.01


def test_an_upload_is_the_payload_over_the_uplink():
  by_hand_s = PAYLOAD_BITS / (110e6 * GOODPUT)
  assert by_hand_s < EXCHANGE.predicted < by_hand_s + 2
  share = 1200 / (1200 + EXCHANGE.predicted)
  assert UTILISATION.predicted == pytest.approx(100 * share, rel=1e-3)


def test_a_ring_sends_the_payloads_of_all_others():
  by_hand_s = 19 * PAYLOAD_BITS / (110e6 * GOODPUT)
  share = 1200 / (1200 + by_hand_s)
  assert RING.predicted == pytest.approx(100 * share, rel=0.01)


def test_the_published_seconds_are_those_of_half_the_bytes():
  half = covenant_72b._Runs(FIGURES).among(2, share=0.5)
  assert half.exchange_s == pytest.approx(EXCHANGE.predicted / 2, rel=0.02)
  published_s = FIGURES["communication of a round"].value
  assert half.exchange_s == pytest.approx(published_s, rel=0.1)
  assert f"{half.utilisation:.1%}" in TABLE.paragraphs[0]
