import pytest

from dilocox_jax.simulate.transfer import GLOO
from experiments.real_links import speedup
from experiments.real_links.changing_link import OPEN_BIT_PER_S


def test_the_round_is_the_shortest_that_hides_its_exchange():
  assert speedup.hiding_interval(lambda h: max(1.0, 40 / h)) == 48
  assert speedup.hiding_interval(lambda h: 1.0) == 16


def test_a_row_compares_what_was_measured_and_predicted():
  row = speedup.SpeedupRow(32, 15e6, 16, 0.06, 1.98, 2.0, 0.0625, 0.06, 1.07)
  assert row.speedup == pytest.approx(31.68)
  assert row.utilisation == pytest.approx(0.96)


def test_a_longer_exchange_needs_a_longer_round():
  short, long = (speedup.shortest_round(ratio, GLOO) for ratio in (32, 357))
  assert short == 16 < long <= 32


def test_the_link_is_open_until_the_seconds_of_a_round_are_known():
  link = speedup.SlowsDown(6, lambda round_s: 1e6 / round_s)
  walls_s = [9.0, 9.0, 9.0, 9.0, 1.0, 3.0]
  assert link(walls_s[:5]) == OPEN_BIT_PER_S and not link.rate_bps
  assert link(walls_s) == link([*walls_s, 50.0]) == link.rate_bps == 5e5
