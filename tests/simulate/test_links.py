"""Messages of collectives: their steps, their links, and when they start."""

import dataclasses
import math

import numpy as np
import pytest

from dilocox_jax.plan.operations import operation
from dilocox_jax.simulate.analytic import AnalyticClock
from dilocox_jax.simulate.cluster import Route
from dilocox_jax.simulate.gloo import GLOO
from dilocox_jax.simulate.link_costs import LinkCosts, message_steps
from dilocox_jax.simulate.script import Compute, Join, Launch, Wait
from dilocox_jax.simulate.transfer import (
  NCCL,
  Transport,
  limit_bytes_per_s,
  slow_start_s,
)
from tests.simulate import small

KINDS = ("all_reduce", "all_gather", "all_to_all", "broadcast")
ROUTE = Route(("up:a", "down:b"), 0.04, 0.0, 1)
GIGABIT = 125e6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_replica_gets_everything_and_sends_what_the_plan_says(
  kind, count
):
  # What each replica holds: parts that it has heard of, by who made them.
  held = [{replica} for replica in range(count)]
  if kind == "broadcast":
    held = [{0}, *(set() for _ in range(count - 1))]
  sent = np.zeros(count)
  for each in message_steps(operation(kind, 840), count):
    assert each.is_relayed  # Whole messages wait for each other.
    before = [set(one) for one in held]
    for sender in range(count) if each.sender is None else [each.sender]:
      sent[sender] += each.size_bytes
      news = {sender} if kind == "all_to_all" else before[sender]
      held[(sender + each.hop) % count] |= news
  everything = {0} if kind == "broadcast" else set(range(count))
  assert all(one == everything for one in held)
  assert max(sent) == pytest.approx(operation(kind, 840).sent_bytes(count))


def test_a_rate_is_that_of_the_narrowest_link_and_shared():
  share = 1448 / 1514 / 8
  costs = LinkCosts(small.uneven([1e8, 5e6, 4e8]))
  expected = share * np.array([5e6, 5e6, 1e8])
  np.testing.assert_allclose(costs.rate_bytes_per_s(1), expected)
  rtts_s = np.array([0.01, 0.2, 0.0025])
  ways_s = (rtts_s + np.roll(rtts_s, -1)) / 4
  np.testing.assert_allclose(costs.latency_s(1), ways_s)
  np.testing.assert_allclose(
    dataclasses.replace(costs, transport=GLOO).latency_s(1), 2 * ways_s
  )
  shared = LinkCosts(small.cluster(2, placement=(0, 1, 0, 1)))
  np.testing.assert_allclose(shared.rate_bytes_per_s(1), 1e8 * share / 2)


@pytest.mark.parametrize(
  "changes, mbit_per_s",
  [
    # 1448 bytes sqrt(1.5) / (40 ms sqrt(0.001)).
    ({"loss": 1e-3}, 11.217),
    ({"loss": 1e-3, "streams": 8}, 8 * 11.217),
    ({"loss": 1e-5}, 10 * 11.217),
    ({}, math.inf),
    ({"rtt_s": 0.0, "loss": 0.1}, math.inf),
  ],
)
def test_loss_limits_a_transfer(changes, mbit_per_s):
  route = dataclasses.replace(ROUTE, **changes)
  found = 8e-6 * limit_bytes_per_s(route)
  assert found == pytest.approx(mbit_per_s, rel=1e-4)


NEAR = dataclasses.replace(ROUTE, rtt_s=0.0)
NEVER = dataclasses.replace(NCCL, starts_slowly=False)


@pytest.mark.parametrize(
  "transport, route, rate, size, seconds",
  [
    # 5 MB in flight are 345 times 10 segments: 8.43 round trips, in which
    # 7.2 MB go out that would else have taken 57.5 ms.
    (NCCL, ROUTE, GIGABIT, 1e9, 0.3373 - 0.0575),
    (NCCL, ROUTE, GIGABIT, 1e8, 0.3373 - 0.0575),
    (NCCL, ROUTE, 1e3, 1e9, 0.0),
    (NEVER, ROUTE, GIGABIT, 1e9, 0.0),
    (NCCL, NEAR, math.inf, 1e9, 0.0),
    # Ten segments over ln 2 go out in the first round trip, at any rate.
    (NCCL, ROUTE, math.inf, 14480 / math.log(2), 0.04),
    (NCCL, ROUTE, 1e10, 14480 / math.log(2), 0.04 - 1.448e-6 / math.log(2)),
  ],
)
def test_slow_start_doubles_ten_segments_until_the_line_is_full(
  transport, route, rate, size, seconds
):
  found = slow_start_s(transport, route, rate, size)
  assert found == pytest.approx(seconds, abs=1e-4 if size > 1e6 else 1e-9)


KEY = ("x", 0, 0, 0)
SUM = operation("all_reduce", 30_000_000)
GATHER = operation("all_gather", 10_000_000)
SCATTER = operation("all_to_all", 30_000_000)


class Recorder(AnalyticClock):
  """Writes down its calls; a moment is the number of the last call."""

  def __init__(self, num_replicas, transport=small.PLAIN):
    one = small.cluster(num_replicas, bps=1e10, rtt_s=0.1)
    work = small.work(one, 0.5, 0.2)
    super().__init__(small.link_costs(one, transport), work)
    self.calls = []

  def _call(self, *call):
    self.calls.append(call)
    return len(self.calls)

  def _take_steps(self, seconds):
    self._call("steps", seconds.tolist())

  def _run_codec(self, seconds):
    self._call("codec", seconds.tolist())

  def _channel_free_at(self):
    return self._call("free")

  def _send(self, step, size_bytes, slow_s, ready, links):
    slow = bool(slow_s.any())
    told = self._call("send", step.hop, size_bytes, slow, ready)
    return told, told

  def _later(self, first, second):
    return max(first, second)

  def _join(self, op):
    self._call("join", op.returning, op.source_replica)

  def _occupy_channel(self, start, end):
    self._call("occupy", start, end)

  def _wait(self, exchange_end):
    self._call("wait", exchange_end)


def exchange(*operations, members=None):
  return [Launch(KEY, operations, members), Wait(KEY, members)]


def test_the_codec_runs_half_before_an_exchange_and_half_after_it():
  operations = operation("all_reduce", 80), operation("broadcast", 4)
  launch, wait = exchange(*operations)
  told = Recorder(2)
  told.interpret([launch, Compute(3), wait])
  half = [0.1, 0.1]
  assert told.calls == [
    ("codec", half),
    ("free",),
    # Each message step starts when the one before it is over.
    ("send", 1, 40.0, False, 2),
    ("send", 1, 40.0, False, 3),
    ("send", 1, 4.0, False, 4),
    ("occupy", 2, 5),
    ("steps", [1.5, 1.5]),
    ("wait", 5),
    ("codec", half),
  ]
  assert told.num_steps == 3 and told.sent_bytes == 80 + 4


@pytest.mark.parametrize(
  "num_replicas, ops, slow",
  [
    # After idle time the first message alone starts slowly.
    (3, [*exchange(SUM, SUM), *exchange(SUM, SUM)], [1] + 15 * [0]),
    (3, [*exchange(SUM), Compute(1), *exchange(SUM)], 2 * [1, 0, 0, 0]),
    # Every pair has a connection of its own.
    (4, 2 * exchange(SCATTER, GATHER), 3 * [1] + 9 * [0]),
    # The source replica has just sent, but not to the one that comes back.
    (
      3,
      [
        *exchange(GATHER),
        Compute(1, taken=(1, 1, 0)),
        *exchange(GATHER, members=(0, 1)),
        Join((2,), 0),
        *exchange(operation("broadcast", 9_000_000), members=(0, 2)),
      ],
      [1, 0, 1, 1],
    ),
  ],
)
def test_only_a_message_after_idle_time_starts_slowly(num_replicas, ops, slow):
  told = Recorder(num_replicas, Transport())  # Whole messages.
  told.interpret([Compute(1), *ops])
  assert [call[3] for call in told.calls if call[0] == "send"] == slow


def test_a_stretch_may_have_a_step_of_a_slow_replica_alone():
  told = Recorder(3)
  told.interpret([Compute(0, taken=(0, 1, 0)), Compute(2, taken=(2, 1, 2))])
  steps = [("steps", [0.0, 0.5, 0.0]), ("steps", [1.0, 0.5, 1.0])]
  assert told.calls == steps and told.num_steps == 2
