"""Long runs: what is computed from a few rounds is what all rounds give."""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox_jax.plan.operations import StoreObject, operation
from dilocox_jax.simulate.analytic import AnalyticClock, run_time
from dilocox_jax.simulate.gloo import GLOO
from dilocox_jax.simulate.long_runs import LongRunClock, simulate_run
from dilocox_jax.simulate.script import Compute, Launch, Wait
from dilocox_jax.simulate.transfer import NCCL
from tests.simulate import small

MILLION = 1_000_000
KEY = ("x", 0, 0, 0)


class CountingClock(LongRunClock):
  """Counts the ops that it walks through."""

  num_walked = 0

  def interpret(self, ops):
    ops = list(ops)
    self.num_walked += len(ops)
    super().interpret(ops)


def drifting_pair(step_s=(10.0, 11.0)):
  """The example of the module: an exchange of 2 s behind the steps of a round.

  Returns:
    A clock, and the ops of a round.
  """
  one = small.cluster(2, rtt_s=0.0, efficiency=1.0)
  costs = small.link_costs(one)
  size_bytes = int(2 * costs.rate_bytes_per_s(1)[0])
  work = small.work(one, step_s=1.0, speeds=1 / np.array(step_s))
  gather = operation("all_gather", size_bytes)
  ops = [Launch(KEY, (gather,)), Compute(1), Wait(KEY)]
  return CountingClock(costs, work), ops


@pytest.mark.parametrize(
  "round_index, times_s",
  [
    (1, (10, 11)),
    (8, (80, 88)),
    (9, (90, 99)),
    (10, (101, 110)),
    (11, (112, 121)),
    (1000, (112 + 989 * 11, 121 + 989 * 11)),
    (MILLION, (112 + 999_989 * 11, 121 + 999_989 * 11)),
  ],
)
def test_replicas_drift_apart_until_one_waits_for_the_other(
  round_index, times_s
):
  clock, ops = drifting_pair()
  clock.repeat(ops, round_index)
  found = clock.outcome()
  np.testing.assert_allclose(found.busy_until_s, times_s, rtol=1e-12)
  assert found.num_steps == round_index
  assert clock.num_walked < 40 * len(ops)


def test_a_stretch_ends_where_only_an_exchange_changes():
  """A begins 0.5 s after B, and overtakes B without ever waiting."""
  clock, ops = drifting_pair(step_s=(10.0, 10.001))
  plain = AnalyticClock(clock.link_costs, clock.work)
  for each in (clock, plain):
    each.work = dataclasses.replace(clock.work, step_s=np.array([0.5, 0.0]))
    each.interpret([Compute(1)])
    each.work = dataclasses.replace(clock.work, step_s=np.array([10.0, 10.001]))
  plain.interpret(ops * 2000)
  clock.repeat(ops, 2000)
  small.assert_agree(clock.outcome(), plain.outcome())
  # A's exchanges take 2 s before round 500, and longer and longer after it.
  longer_s = 0.001 * np.arange(1500).sum()
  assert clock.outcome().exchange_s[0] == pytest.approx(4000 + longer_s)


def test_a_stretch_ends_where_its_second_period_is_not_like_its_first():
  """A replica that comes back copies another, which delays it for a while."""
  away = {"absences": ((2, 9, 20),)}
  script, plan = small.script(
    "delayed",
    num_replicas=3,
    codec="rank 2",
    sync_interval=4,
    overlap_steps=2,
    total_steps=180,
    membership=away,
  )
  script = dataclasses.replace(script, copied_bytes=1_000_000)
  one = small.uneven([1e8, 1e7, 3e7])
  work = small.work(one, step_s=0.01, speeds=(1.0, 0.9, 1.0))
  costs = small.link_costs(one)
  found = simulate_run(costs, work, script, plan)
  small.assert_agree(found, run_time(costs, work, script.ops(plan)))


def test_what_grows_from_round_to_round_is_added_up():
  """A is ahead by 1, 2, 3 ... ms, and so much longer is each exchange of A."""
  clock, ops = drifting_pair(step_s=(10.0, 10.001))
  plain = AnalyticClock(clock.link_costs, clock.work)
  plain.interpret(ops * 5000)
  clock.repeat(ops, 5000)
  small.assert_agree(clock.outcome(), plain.outcome())
  lengths_s = 2 + 0.001 * np.arange(5000)
  assert clock.outcome().exchange_s[0] == pytest.approx(lengths_s.sum())
  assert clock.num_walked < 40 * len(ops)


def test_delays_that_go_round_a_ring_have_a_period_of_their_own():
  """Replica i takes over the time of replica i - 1: every third is alike."""
  one = small.cluster(3, bps=1e9, rtt_s=2.0)
  work = small.work(one, step_s=0.01)
  # One message step: each waits for its neighbor, which is far away.
  ring = operation("all_gather", 8)
  ops = [Launch(KEY, (ring,)), Compute(1), Wait(KEY)]
  plain = AnalyticClock(small.link_costs(one), work)
  long = CountingClock(small.link_costs(one), work)
  for clock in (plain, long):
    clock.interpret([Compute(90, taken=(0, 10, 90))])
  plain.interpret(ops * 3001)
  long.repeat(ops, 3001)
  small.assert_agree(long.outcome(), plain.outcome())
  late_s = plain.outcome().busy_until_s
  assert np.ptp(late_s) > 0.5  # The delays have not been lost.
  assert long.num_walked < 40 * len(ops)


LINKS = {
  "equal": lambda count: small.cluster(count, bps=3e7, rtt_s=0.3),
  "fast": lambda count: small.cluster(count, bps=1e10, rtt_s=0.0),
  "uneven": lambda count: small.uneven([1e7, 4e8, 6e7, 2e9, 1e8][:count]),
}
TRANSPORTS = {"whole messages": small.PLAIN, "nccl": NCCL, "gloo": GLOO}
# Named settings that each method takes.
METHODS = {
  "allreduce": (),
  "cocktail_sgd": (),
  "diloco": (),
  "dilocox": (),
  "eager": ("num_fragments",),
  "streaming_diloco": ("num_fragments", "overlap_steps"),
  "delayed": ("num_fragments", "overlap_steps"),
  "overlap_loco": ("num_fragments",),
}


@st.composite
def absences(draw, num_replicas, num_rounds):
  """Absences that leave replica 0 there."""
  found = []
  for _ in range(draw(st.integers(0, 3))):
    replica = draw(st.integers(1, num_replicas - 1))
    first = draw(st.integers(0, num_rounds))
    found.append((replica, first, first + draw(st.integers(0, num_rounds))))
  return tuple(found)


@st.composite
def paces(draw, num_replicas, interval):
  """Steps that each replica takes of H; replica 0 takes all of them."""
  others = [draw(st.integers(1, interval)) for _ in range(num_replicas - 1)]
  return (interval, *others)


@st.composite
def runs(draw, num_rounds):
  """Arguments of `simulate_run`: a cluster, a method, outages and paces."""
  count = draw(st.integers(1, 5))
  name = draw(st.sampled_from(list(METHODS)))
  changes = {"total_steps": num_rounds}
  if name not in ("allreduce", "cocktail_sgd"):
    interval = draw(st.integers(2, 9))
    changes["sync_interval"] = interval
    rest = draw(st.integers(0, interval - 1))
    changes["total_steps"] = num_rounds * interval + rest
    if "num_fragments" in METHODS[name]:
      changes["num_fragments"] = draw(st.integers(1, min(interval, 4)))
    if "overlap_steps" in METHODS[name]:
      most = interval - 1 if name == "streaming_diloco" else 3 * interval
      changes["overlap_steps"] = draw(st.integers(0, most))
    if count > 1 and name != "eager" and draw(st.booleans()):
      changes["membership"] = {
        "absences": draw(absences(count, num_rounds)),
        "inner_steps": draw(st.just(()) | paces(count, interval)),
      }
    elif draw(st.booleans()):
      changes["warm_start_steps"] = draw(st.integers(1, num_rounds))
  codec = draw(st.sampled_from(list(small.CODECS)))
  script, plan = small.script(name, count, codec, **changes)
  if draw(st.integers(0, 9)) == 0:
    traffic = dataclasses.replace(script.traffic, collective=StoreObject.kind)
    script = dataclasses.replace(script, traffic=traffic)
  cluster = LINKS[draw(st.sampled_from(list(LINKS)))](count)
  # Nearly equal replicas drift apart for a long time.
  lags = st.sampled_from([0.0, 0.0, 1e-7, 1e-4, 3e-3, 0.05, 0.5])
  work = small.work(
    cluster,
    step_s=draw(st.sampled_from([0.01, 0.05, 0.1, 0.2, 1.0])),
    codec_s=draw(st.sampled_from([0.0, 0.02])),
    speeds=[1 - draw(lags) for _ in range(count)],
  )
  transport = TRANSPORTS[draw(st.sampled_from(list(TRANSPORTS)))]
  return small.link_costs(cluster, transport), work, script, plan


@given(runs(num_rounds=50))
def test_a_run_takes_as_long_as_all_its_rounds(arguments):
  costs, work, script, plan = arguments
  found = simulate_run(costs, work, script, plan)
  small.assert_agree(found, run_time(costs, work, script.ops(plan)))


@settings(max_examples=25)
@given(runs(num_rounds=MILLION))
def test_a_run_of_a_million_rounds_walks_through_few(arguments):
  costs, work, script, plan = arguments
  clock = CountingClock(costs, work)
  num_kinds = 0
  for ops, count in script.repeated_ops(plan):
    clock.repeat(ops, count)
    num_kinds += len(ops)
  assert clock.outcome().num_steps == plan.total_steps
  # An end of a stretch takes some 20 jumps, and there are few ends.
  assert clock.num_walked < 1000 * num_kinds


@pytest.mark.parametrize(
  "absences",
  [
    ((1, 1000, 20_000), (2, 900_000, 910_000)),
    # One replica leaves while another has been away for long.
    ((1, 300_000, 950_000), (2, 450_000, 640_000)),
    ((1, 600_000, MILLION), (2, 0, 400_000)),
  ],
)
def test_a_replica_that_is_far_behind_costs_nothing(absences):
  script, plan = small.script(
    "dilocox",
    num_replicas=3,
    sync_interval=4,
    total_steps=4 * MILLION,
    membership={"absences": absences},
  )
  one = small.uneven([1e8, 3e7, 1e8])
  work = small.work(one, step_s=0.1, speeds=(1.0, 1 - 1e-4, 0.95))
  clock = CountingClock(small.link_costs(one), work)
  for ops, count in script.repeated_ops(plan):
    clock.repeat(ops, count)
  assert clock.num_walked < 1000


@pytest.mark.parametrize(
  "name, changes",
  [
    ("diloco", {"sync_interval": 30}),
    ("overlap_loco", {"sync_interval": 16}),
    ("delayed", {"sync_interval": 10, "overlap_steps": 25}),
    ("allreduce", {}),
  ],
)
def test_a_million_rounds_take_at_most_three_seconds(name, changes):
  """With outages, and with replicas that drift apart for most of the run."""
  rounds = {"absences": ((1, 1000, 20_000), (2, 900_000, 910_000))}
  if name != "allreduce":
    changes = changes | {"membership": rounds}
  interval = changes.get("sync_interval", 1)
  script, plan = small.script(
    name, 3, total_steps=MILLION * interval, **changes
  )
  one = small.cluster(3)
  work = small.work(one, speeds=(1.0, 1 - 1e-6, 0.9))
  started_s = time.process_time()
  found = simulate_run(small.link_costs(one), work, script, plan)
  assert time.process_time() - started_s < 3
  assert found.num_steps == MILLION * interval
