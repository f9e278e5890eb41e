import pytest

from experiments.real_links import speedup


def test_the_round_is_the_shortest_that_hides_its_exchange():
  assert speedup.hiding_interval(lambda h: max(1.0, 40 / h)) == 48
  assert speedup.hiding_interval(lambda h: 1.0) == 16


def test_a_row_compares_what_was_measured_and_predicted():
  row = speedup.SpeedupRow(32, 15e6, 16, 0.06, 1.98, 2.0, 0.0625, 0.06, 1.07)
  assert row.speedup == pytest.approx(31.68)
  assert row.utilisation == pytest.approx(0.96)
