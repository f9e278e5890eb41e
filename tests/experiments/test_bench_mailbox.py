"""An event takes five latencies and few requests, however many take part."""

import pytest

from experiments.tools import bench_mailbox
from tests.experiments import programs

LATENCY_S = 0.05


@pytest.mark.parametrize("num_replicas", [2, 8, 32])
def test_an_event_takes_five_latencies(num_replicas):
  cost = bench_mailbox.simulated_cost(
    num_replicas, num_events=8, latency_s=LATENCY_S
  )
  # A replica that comes second waits 0.01 s before it reads the decision.
  assert cost.event_s <= 5 * LATENCY_S + 0.011
  assert cost.requests <= num_replicas + 6.5
  assert cost.entry_requests <= 12


def test_names_that_are_absent_cost_nothing():
  alone = bench_mailbox.simulated_cost(4, num_events=10)
  beside = bench_mailbox.simulated_cost(4, num_absent=16, num_events=10)
  assert beside.event_s <= 1.05 * alone.event_s
  assert beside.requests <= 1.05 * alone.requests


def test_signing_is_measured():
  signed, checked = bench_mailbox.signing_rates(2_000_000, repeats=1)
  assert signed > 0 and checked > 0
