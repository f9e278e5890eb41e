"""What gloo's requests cost: by formula, request by request, and by hand."""

import dataclasses
import statistics

import numpy as np
import pytest

from dilocox_jax.plan.operations import operation
from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.simulate.gloo import GLOO, num_segments, request_waits_s
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.script import Launch, Wait
from dilocox_jax.simulate.transfer import NCCL
from tests.oracles.gloo_ring import Ring
from tests.simulate import small

SEGMENT_S = 0.01
MIB = 2**20
WARM = dataclasses.replace(GLOO, starts_slowly=False)


@pytest.mark.parametrize(
  "num_processes, tolerance", [(2, 0.15), (4, 0.08), (8, 0.08)]
)
@pytest.mark.parametrize("rtt_s", [0.001, 0.006, 0.015, 0.024, 0.06])
def test_two_segments_take_what_a_simulation_of_all_requests_says(
  num_processes, tolerance, rtt_s
):
  num_sent = 160
  times_s = [
    Ring(
      num_processes=num_processes,
      num_segments=num_sent,
      segment_s=SEGMENT_S,
      rtt_s=rtt_s,
      adding_s=0.05 * SEGMENT_S,
      seed=seed,
    ).run()
    for seed in range(3)
  ]
  wait_s, last_s = request_waits_s(
    segment_s=np.array([SEGMENT_S]),
    rtt_s=np.array([rtt_s]),
    num_replicas=num_processes,
  )
  predicted_s = num_sent * (SEGMENT_S + wait_s[0]) + last_s[0]
  assert predicted_s == pytest.approx(statistics.median(times_s), rel=tolerance)


@pytest.mark.parametrize(
  "num_replicas, segment_s, rtt_s, wait_s, last_s",
  [
    (4, 0.01, 0.0, 0.0, 0.0),  # The line is always busy.
    (4, 0.0, 0.04, 0.02, 0.0),  # Two segments a round trip.
    (4, 0.0, 0.0, 0.0, 0.0),
    # They overlap with the next two by 10 * 30 / (10 + 30) ms.
    (4, 0.01, 0.03, (0.03 - 0.0075) / 2, 0.0075),
    (2, 0.01, 0.03, (0.03 - 0.0075) / 2, 0.0075),
    # The request waits in the same connection for two segments.
    (2, 0.01, 0.015, 0.0075, 0.0),
  ],
)
def test_a_round_trip_passes_for_two_segments(
  num_replicas, segment_s, rtt_s, wait_s, last_s
):
  found = request_waits_s(
    np.array([segment_s]), np.array([rtt_s]), num_replicas
  )
  np.testing.assert_allclose(found, [[wait_s], [last_s]])


def test_slices_have_segments_of_a_mebibyte_and_two_at_least():
  assert num_segments(1000, MIB) == 2
  assert num_segments(2 * MIB, MIB) == 2
  assert num_segments(2 * MIB + 1, MIB) == 3
  assert num_segments(32 * MIB, MIB) == 32


def over_a_gigabit(num_replicas, rtt_s, kind, size=128 * MIB):
  """Seconds of a collective over warm connections."""
  one = small.cluster(num_replicas, bps=1e9, rtt_s=rtt_s)
  key = ("x", 0, 0, 0)
  ops = [Launch(key, (operation(kind, size),)), Wait(key)]
  costs = small.link_costs(one, WARM)
  return run_time(costs, small.work(one), ops).total_s


MEBIBYTE_S = MIB / (1e9 * 1448 / 1514 / 8)
ACKNOWLEDGED_S = MEBIBYTE_S * (1 + 66 / 3028)
OVERLAP_S = ACKNOWLEDGED_S * 0.02 / (ACKNOWLEDGED_S + 0.02)
PAIR_S = 2 * ACKNOWLEDGED_S + 0.02 - OVERLAP_S


@pytest.mark.parametrize(
  "num_replicas, rtt_s, kind, size, seconds",
  [
    # 2 (M - 1) slices of 32 segments.
    (4, 0.02, "all_reduce", 128 * MIB, 6 * 16 * PAIR_S + OVERLAP_S),
    # Slices of a few bytes still are two segments: a round trip each.
    (4, 0.02, "all_reduce", 4096, 6 * 0.02),
    (2, 0.04, "all_reduce", 4096, 2 * 0.04),
    # M - 1 operands, of which each half is a segment.
    (4, 0.02, "all_gather", 2 * MIB, 3 * PAIR_S + OVERLAP_S),
    # Nobody waits for a round trip but at the beginning.
    (4, 0.02, "all_to_all", 4 * MIB, 3 * MEBIBYTE_S * (1 + 2 / 3) + 0.02),
  ],
)
def test_collectives_take_what_was_worked_out(
  num_replicas, rtt_s, kind, size, seconds
):
  found = over_a_gigabit(num_replicas, rtt_s, kind, size)
  assert found == pytest.approx(seconds, rel=2e-3)


def test_more_replicas_wait_for_no_more_round_trips():
  waits_s = [
    over_a_gigabit(count, 0.02, "all_reduce")
    - over_a_gigabit(count, 0.0, "all_reduce")
    for count in (4, 8, 16)
  ]
  # Each sends 2 (M - 1) / M of the operand.
  shares = np.array([6 / 4, 14 / 8, 30 / 16])
  np.testing.assert_allclose(
    waits_s / shares, waits_s[0] / shares[0], rtol=0.01
  )


def test_a_pair_has_one_connection_whatever_the_links_allow():
  lossy = small.cluster(4, bps=1e9, rtt_s=0.04, loss=1e-3, streams=8)
  one, many = (
    LinkCosts(lossy, transport).rate_bytes_per_s(1)
    for transport in (GLOO, NCCL)
  )
  np.testing.assert_allclose(many, 8 * one)


@pytest.mark.parametrize(
  "kind, num_replicas, factor",
  [
    ("all_to_all", 2, 2),
    ("all_to_all", 3, 1 + 2 / 3),
    ("all_to_all", 4, 1 + 2 / 3),
    ("all_to_all", 5, 1 + 4 / 7),
    ("all_to_all", 100, 1 + 4 / 7),
    ("all_gather", 2, 1.5),
    ("broadcast", 2, 1),
  ],
)
def test_a_factor_is_that_of_the_next_number_of_replicas(
  kind, num_replicas, factor
):
  assert GLOO.slowness(kind, num_replicas) == pytest.approx(factor)
