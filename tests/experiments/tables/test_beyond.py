"""Every method at 107B: links, slow sites, and bandwidth needed."""

import math

import pytest

from experiments import speedup_tables
from experiments.tables import beyond
from experiments.tables.dilocox_runs import METHOD_CONFIGS, Large

LARGE = Large(speedup_tables._PUBLISHED)
NUM_PARAMETERS = 108_491_153_408


def test_every_link_setting_has_all_numbers_of_clusters():
  for links in beyond.LINKS:
    for count in beyond.CLUSTER_COUNTS:
      assert beyond.even(links, count).num_replicas == count


def test_methods_are_those_of_their_configs():
  for method, name in METHOD_CONFIGS.items():
    if method != "Delayed, 4 steps":
      settings = LARGE.rounds(method, 2).traffic
      assert settings.num_replicas == 2, name
  streaming = LARGE.rounds("Streaming DiLoCo", 2).traffic.fragments
  assert streaming.layer_table.shape == (26, 3)


def test_what_waits_needs_its_bytes_in_a_hundredth_of_the_time():
  needed = beyond.needed_bps(LARGE, "DiLoCo", 2)
  waits_s = LARGE.interval * LARGE.step_s / 99
  # An exchange is three collectives of two rounds of 40 ms, and slow start.
  least = 8 * 4 * NUM_PARAMETERS / (waits_s - 0.24) / (1448 / 1514)
  assert least < needed < 1.15 * least


def test_what_is_hidden_needs_its_bytes_in_a_round():
  needed = beyond.needed_bps(LARGE, "DiLoCoX", 2)
  sent_bits = 8 * LARGE.rounds("DiLoCoX", 2).traffic.exchange_bytes(0)
  round_s = LARGE.interval * LARGE.step_s / 0.99
  assert needed == pytest.approx(sent_bits / round_s * 1514 / 1448, rel=0.04)


def test_no_bandwidth_makes_up_for_round_trips_at_every_step():
  assert beyond.needed_bps(LARGE, "AllReduce", 2) == math.inf


def test_the_needed_bandwidth_is_enough_and_less_is_not():
  for method in ("OpenDiLoCo", "Eager"):
    needed = beyond.needed_bps(LARGE, method, 4)
    assert LARGE.at(method, 4, needed).utilisation >= beyond.TARGET
    assert LARGE.at(method, 4, 0.95 * needed).utilisation < beyond.TARGET


def test_a_site_at_half_speed_halves_what_was_bound_by_compute():
  cluster = beyond.even("dtfm_worldwide", 10)
  slow = beyond.strained(cluster)
  assert [site.speed for site in slow.sites[:2]] == [0.5, 1.0]
  even_s = LARGE.on("DiLoCoX", cluster).seconds
  assert even_s == pytest.approx(LARGE.step_s)
  strained_s = LARGE.on("DiLoCoX", slow).seconds
  assert strained_s == pytest.approx(2 * even_s, rel=0.02)
  assert strained_s == LARGE.on("DiLoCoX", beyond.strained(cluster)).seconds


def test_a_rate_is_said_in_its_unit():
  assert beyond._rate(1.25e8) == "125 Mbit/s"
  assert beyond._rate(2.5e9) == "2.5 Gbit/s"
  assert beyond._rate(math.inf) == "none"
