"""Sweeps of the 107B model: which way they go, and a point by hand."""

import pytest

from experiments import speedup_tables
from experiments.tables import sweeps
from experiments.tables.dilocox_runs import METHOD_CONFIGS, Large
from experiments.tables.table import Fit


@pytest.fixture(scope="module")
def tables():
  built = sweeps.build_tables(speedup_tables._PUBLISHED)
  return {table.name: table for table in built}


def line(table, name, varied):
  return [
    row.predicted
    for row in table.rows
    if row.name.startswith(f"{name}, {varied}")
  ]


def test_more_bandwidth_never_makes_a_method_slower(tables):
  for method in METHOD_CONFIGS:
    shares = line(tables["sweep_bandwidth"], method, "bandwidth")
    assert len(shares) == len(sweeps.BANDWIDTHS_BPS)
    assert shares == pytest.approx(sorted(shares), rel=1e-12)


def test_longer_rounds_smaller_ranks_and_fewer_bits_help(tables):
  table = tables["sweep_exchange"]
  by_interval = line(table, "30 Mbit/s", "H")
  assert by_interval == sorted(by_interval)
  for varied in ("rank", "bits"):
    shares = line(table, "30 Mbit/s", varied)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 3 * shares[-1]


def test_below_the_bend_utilisation_is_compute_over_exchange(tables):
  large = Large(speedup_tables._PUBLISHED)
  compute_s = 60 * large.step_s
  sent_bits = 8 * large.rounds("DiLoCoX", 2).traffic.exchange_bytes(0)
  share = compute_s / (sent_bits / (30e6 * 1448 / 1514))
  found = line(tables["sweep_exchange"], "30 Mbit/s", "H (inner steps) 60")
  assert found == pytest.approx([100 * share], rel=1e-3)


def test_round_trips_hurt_where_packets_are_lost(tables):
  table = tables["sweep_network"]
  assert line(table, "no loss", "round trip") == pytest.approx([100.0] * 6)
  lossy = line(table, "loss 1e-3", "round trip")
  assert lossy == sorted(lossy, reverse=True) and lossy[-1] < 10


def test_every_sweep_has_a_figure_and_says_what_was_fitted(tables):
  for name, table in tables.items():
    assert list(table.pictures) == [name]
    assert {row.kind for row in table.rows} == {Fit.ELSEWHERE}
    assert all(len(cells) == len(table.header) for cells in table.cells)
