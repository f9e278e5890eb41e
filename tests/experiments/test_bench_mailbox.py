"""An event takes five latencies and few requests, however many take part."""

import pytest

from experiments.tools import mailbox_events
from experiments.tools.mailbox_events import (
  Exchanges,
  processes_cost,
  signing_rates,
  simulated_cost,
)
from tests.experiments import programs

LATENCY_S = 0.05


@pytest.mark.parametrize("num_replicas", [2, 8, 32])
def test_an_event_takes_five_latencies(num_replicas):
  cost = simulated_cost(
    Exchanges(num_replicas, num_events=6, latency_s=LATENCY_S)
  )
  # A replica that comes second waits 0.01 s before it reads the decision.
  assert cost.event_s <= 5 * LATENCY_S + 0.011
  assert cost.requests <= num_replicas + 6.5
  assert cost.entry_requests <= 12


def test_absent_replicas_cost_nothing():
  alone = simulated_cost(Exchanges(4, num_events=10))
  beside = simulated_cost(Exchanges(4, num_events=10, num_absent=16))
  assert beside.event_s <= 1.05 * alone.event_s
  assert beside.requests <= 1.05 * alone.requests


def test_replicas_may_be_processes():
  cost = processes_cost(Exchanges(2, num_events=6, latency_s=0.001))
  assert 5 * 0.001 < cost.event_s
  assert 7 <= cost.requests


def test_signing_is_measured():
  signed_gb, checked_gb = signing_rates(2_000_000, repeats=1)
  assert signed_gb > 0
  assert checked_gb > 0


def test_the_program_prints_what_it_measured():
  done = programs.run(
    "tools.bench_mailbox", "simulate", "--num_replicas=2", "--num_events=6"
  )
  assert done.returncode == 0
  assert "time of an event: 25" in done.stdout
  assert "requests of a replica in an event: 7" in done.stdout
  assert "\nrequests of a replica that enters last: " in done.stdout


def test_processes_print_the_most_requests_of_all_that_enter(monkeypatch):
  cost = mailbox_events.Cost(event_s=0.1, requests=7, entry_requests=11)
  monkeypatch.setattr(mailbox_events, "processes_cost", lambda exchanges: cost)
  done = programs.run("tools.bench_mailbox", "processes")
  assert "\nmost requests with which a replica enters: 11\n" in done.stdout
  assert "last" not in done.stdout


def test_a_bench_that_is_not_there_is_refused():
  done = programs.run("tools.bench_mailbox", "fly")
  assert done.returncode == 2
  assert "bench" in done.one_line
