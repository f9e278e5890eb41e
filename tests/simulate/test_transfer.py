"""What a route leaves of a link, against figures worked out by hand."""

import dataclasses
import math

import pytest

from dilocox_jax.simulate.cluster import Route
from dilocox_jax.simulate.transfer import (
  GLOO,
  NCCL,
  Transport,
  limit_bytes_per_s,
  slow_start_s,
)

ROUTE = Route(("up:a", "down:b"), 0.04, 0.0, 1, None)
GIGABIT = 125e6


def test_loss_limits_one_stream_to_what_the_formula_of_mathis_gives():
  lossy = dataclasses.replace(ROUTE, loss=1e-3)
  # 1448 bytes sqrt(1.5) / (40 ms sqrt(0.001)), worked out by hand.
  assert 8e-6 * limit_bytes_per_s(lossy) == pytest.approx(11.2, abs=0.05)
  eight = dataclasses.replace(lossy, streams=8)
  assert limit_bytes_per_s(eight) == 8 * limit_bytes_per_s(lossy)
  rarer = dataclasses.replace(lossy, loss=1e-5)
  assert limit_bytes_per_s(rarer) == pytest.approx(
    10 * limit_bytes_per_s(lossy)
  )


def test_a_window_passes_once_a_round_trip():
  windowed = dataclasses.replace(ROUTE, window_bytes=3.15e6)
  assert 8e-6 * limit_bytes_per_s(windowed) == pytest.approx(630)
  both = dataclasses.replace(windowed, loss=1e-3)
  lossy = dataclasses.replace(ROUTE, loss=1e-3)
  assert limit_bytes_per_s(both) == limit_bytes_per_s(lossy)


def test_nothing_limits_a_clean_route_or_one_without_distance():
  assert limit_bytes_per_s(ROUTE) == math.inf
  near = dataclasses.replace(ROUTE, rtt_s=0.0, loss=0.1)
  assert limit_bytes_per_s(near) == math.inf


def test_slow_start_doubles_ten_segments_until_the_pipe_is_full():
  # 5 MB in flight are 345 times 10 segments: 8.43 round trips, in which 7.2 MB
  # go out that would else have taken 57.5 ms.
  extra_s = slow_start_s(NCCL, ROUTE, GIGABIT, 1e9)
  assert extra_s == pytest.approx(0.3373 - 0.0575, abs=1e-4)
  assert slow_start_s(NCCL, ROUTE, GIGABIT, 1e8) == extra_s
  assert slow_start_s(NCCL, ROUTE, 1e3, 1e9) == 0
  assert slow_start_s(Transport(starts_slowly=False), ROUTE, GIGABIT, 1e9) == 0
  near = dataclasses.replace(ROUTE, rtt_s=0.0)
  assert slow_start_s(NCCL, near, math.inf, 1e9) == 0


def test_a_small_message_ends_before_the_pipe_is_full():
  # Ten segments over ln 2 go out in the first round trip.
  size = 14480 / math.log(2)
  for rate in (GIGABIT, 100 * GIGABIT, math.inf):
    total_s = slow_start_s(NCCL, ROUTE, rate, size) + size / rate
    assert total_s == pytest.approx(0.04)


@pytest.mark.parametrize("size", [10.0, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("streams", [1, 8])
def test_more_bandwidth_never_makes_a_first_message_slower(size, streams):
  route = dataclasses.replace(ROUTE, streams=streams)
  rates = [1.3**n for n in range(20, 110)]
  times = [slow_start_s(NCCL, route, r, size) + size / r for r in rates]
  for slower, faster in zip(times, times[1:], strict=False):
    assert faster <= slower * (1 + 1e-12)


def test_gloo_is_slower_than_a_link_with_payload_alone():
  # 66 bytes for two frames of 1514.
  assert GLOO.slowness("all_reduce", 2) == pytest.approx(1.0218, abs=1e-4)
  assert GLOO.slowness("all_to_all", 2) > GLOO.slowness("all_to_all", 3) > 1
  assert GLOO.slowness("broadcast", 2) == NCCL.slowness("all_gather", 2) == 1
