"""What both paths of the simulator are told to add up."""

import dataclasses

import numpy as np
import pytest

from dilocox_jax.plan.collective import Collective
from dilocox_jax.simulate.analytic import AnalyticClock, run_time
from dilocox_jax.simulate.interpreter import Interpreter
from dilocox_jax.simulate.link_costs import LinkCosts, message_steps
from dilocox_jax.simulate.script import Compute, Join, Launch, Wait
from dilocox_jax.simulate.sites import Jitter
from dilocox_jax.simulate.transfer import (
  GLOO,
  RETRANSMISSION_TIMEOUT_S,
)
from tests.oracles.events import lower, simulate
from tests.simulate import small
from tests.simulate.test_agreement import assert_agree, both

KEY = ("x", 0, 0, 0)
LONG_S = 1.5 * RETRANSMISSION_TIMEOUT_S
FAR = small.cluster(2, bps=1e10, rtt_s=0.1)


class Recorder(Interpreter[int]):
  """Writes down its calls; a moment is the number of the last call."""

  def __init__(self, *arguments):
    super().__init__(*arguments)
    self.calls = []

  def _call(self, name, *details):
    self.calls.append((name, *details))
    return len(self.calls)

  def _take_steps(self, op, seconds):
    self._call("steps", seconds.tolist())

  def _run_codec(self, name, seconds):
    self._call(name, seconds.tolist())

  def _free_from(self):
    return self._call("free")

  def _send(self, name, step, sizes_bytes, slow_s, start, links):
    sizes = sizes_bytes.tolist()
    told = self._call("send", step.hop, sizes, bool(slow_s.any()), start)
    return told, told

  def _later(self, first, second):
    return max(first, second)

  def _join(self, op):
    self._call("join", op.returning, op.donor)

  def _occupy_channel(self, start, end):
    self._call("occupy", start, end)

  def _wait(self, back):
    self._call("wait", back)


def recorder(num_replicas=2, jitter=None, transport=small.PLAIN, codec_s=0.2):
  one = small.cluster(num_replicas, jitter, bps=1e10, rtt_s=0.1)
  work = small.work(one, 0.5, codec_s)
  return Recorder(small.link_costs(one, transport), work)


def test_the_codec_runs_half_before_an_exchange_and_half_after_it():
  ops = [
    Launch(KEY, (Collective("all_reduce", 80), Collective("broadcast", 4))),
    Compute(3),
    Wait(KEY),
  ]
  told = recorder()
  told.interpret(ops)
  half = [0.1, 0.1]
  assert told.calls == [
    ("encode", half),
    ("free",),
    # Each message step starts when the one before it is over.
    ("send", 1, [40.0, 40.0], False, 2),
    ("send", 1, [40.0, 40.0], False, 3),
    ("send", 1, [4.0, 4.0], False, 4),
    ("occupy", 2, 5),
    ("steps", [1.5, 1.5]),
    ("wait", 5),
    ("decode", half),
  ]
  assert told.num_steps == 3 and told.sent_bytes == 80 + 4


def test_only_the_first_message_after_idle_time_starts_slowly():
  told = recorder(3, transport=GLOO)
  collective = Collective("all_reduce", 30_000_000)
  ops = [Launch(KEY, (collective, collective)), Wait(KEY)]
  told.interpret([Compute(1), *ops, *ops, Compute(1), *ops])
  slow = [call[3] for call in told.calls if call[0] == "send"]
  exchange = [False] * 8
  assert slow == [True, *exchange[1:], *exchange, True, *exchange[1:]]


def test_every_pair_of_an_all_to_all_has_a_connection_of_its_own():
  told = recorder(4, transport=GLOO)
  scatter = Collective("all_to_all", 30_000_000)
  gather = Collective("all_gather", 10_000_000)
  ops = [Launch(KEY, (scatter, gather)), Wait(KEY)]
  told.interpret([Compute(1), *ops, *ops, Compute(1), *ops])
  slow = [call[3] for call in told.calls if call[0] == "send"]
  # Three hops to others, then a ring over the first hop's connections.
  after_idle, warm = [True] * 3 + [False] * 3, [False] * 6
  assert slow == [*after_idle, *warm, *after_idle]


def test_who_comes_back_has_cold_connections():
  told = recorder(3, transport=GLOO)
  gather = (Collective("all_gather", 10_000_000),)
  ring = [Compute(1), Launch(KEY, gather), Wait(KEY)]
  pair = [Compute(1, taken=(1, 1, 0)), Launch(KEY, gather, (0, 1)), Wait(KEY)]
  copy = Launch(KEY, (Collective("broadcast", 9_000_000),), (0, 2))
  told.interpret([*ring, *pair, Join((2,), 0), copy, Wait(KEY)])
  slow = [call[3] for call in told.calls if call[0] == "send"]
  # The donor has just sent, but not to the one that comes back.
  assert slow == [True, False, True, True]


def test_a_stretch_may_have_a_step_of_a_slow_replica_alone():
  told = recorder(3)
  told.interpret([Compute(0, taken=(0, 1, 0)), Compute(2, taken=(2, 1, 2))])
  assert told.calls == [
    ("steps", [0.0, 0.5, 0.0]),
    ("steps", [1.0, 0.5, 1.0]),
  ]
  assert told.num_steps == 2


def test_jitter_is_drawn_for_every_message_of_every_replica():
  told = recorder(3, Jitter(transfer_sigma=0.5, seed=1))
  told.interpret([Launch(KEY, (Collective("all_reduce", 300),))])
  sizes = [size for call in told.calls if call[0] == "send" for size in call[2]]
  assert len(set(sizes)) == 4 * 3
  assert np.mean(sizes) == pytest.approx(100, rel=0.5)


def test_a_script_may_be_interpreted_in_pieces():
  script, plan = small.script("streaming_diloco", 2, total_steps=30)
  ops = list(script.ops(plan))
  jitter = Jitter(0.3, 0.3, 5)
  whole, pieces = recorder(2, jitter), recorder(2, jitter)
  whole.interpret(ops)
  pieces.interpret(ops[:11])
  pieces.interpret(ops[11:])
  assert whole.calls == pieces.calls


def test_a_flush_of_one_replica_names_every_node_once():
  # Nothing but waits lies between the launches of a flush.
  ops = []
  for fragment in range(60):
    key = ("fragment", fragment, 0, 0)
    ops += [Launch(key, (Collective("all_reduce", 8),)), Wait(key)]
  one = small.cluster(1)
  lowered = lower(small.link_costs(one), small.work(one), [Compute(2), *ops])
  assert lowered.now == lowered.channel == [[0]]


@pytest.mark.parametrize("step_s, times", [(LONG_S, 9), (LONG_S / 2, 1)])
def test_slow_start_is_paid_after_a_silence_alone(step_s, times):
  script, plan = small.script("allreduce", total_steps=9)
  work = small.work(FAR, step_s)
  slow, events = both(FAR, script, plan, work, transport=GLOO)
  assert_agree(slow, events)
  never = LinkCosts(FAR, dataclasses.replace(GLOO, starts_slowly=False))
  fast = run_time(never, work, script.ops(plan))
  first = message_steps(script.traffic.gradient()[0], 2)[0]
  once_s = small.link_costs(FAR, GLOO).slow_start_s(first)[0]
  assert once_s > 0
  assert slow.total_s - fast.total_s == pytest.approx(times * once_s)


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_both_paths_know_the_transport_between_two(kind):
  pair = small.cluster(2, rtt_s=0.0)
  ops = [Launch(KEY, (Collective(kind, 10_000_000),)), Wait(KEY)]
  work = small.work(pair)
  times = [
    (run_time(costs, work, ops).total_s, simulate(costs, work, ops))
    for costs in (small.link_costs(pair), LinkCosts(pair, GLOO))
  ]
  (full_s, _), (gloo_s, events) = times
  assert gloo_s == pytest.approx(GLOO.slowness(kind, 2) * full_s)
  assert events.total_s == pytest.approx(gloo_s)


def test_a_clock_remembers_its_idle_time():
  script, plan = small.script("allreduce", total_steps=6)
  link_costs, work = small.link_costs(FAR, GLOO), small.work(FAR, LONG_S / 2)
  ops = list(script.ops(plan))
  first, second = (
    AnalyticClock(link_costs, work),
    AnalyticClock(link_costs, work),
  )
  first.walk(ops[:7])
  second.set_state(first.get_state())
  assert second.walk(ops[7:]).now_s == run_time(link_costs, work, ops).now_s
