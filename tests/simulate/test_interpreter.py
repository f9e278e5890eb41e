"""What both ways of adding up times are told: codec, slow start, messages."""

import pytest

from dilocox_jax.plan.collective import Collective
from dilocox_jax.simulate.analytic import AnalyticClock
from dilocox_jax.simulate.script import Compute, Join, Launch, Wait
from dilocox_jax.simulate.transfer import GLOO
from tests.oracles.events import lower
from tests.simulate import small

KEY = ("x", 0, 0, 0)
SUM = Collective("all_reduce", 30_000_000)
GATHER = Collective("all_gather", 10_000_000)
SCATTER = Collective("all_to_all", 30_000_000)


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

  def _free_from(self):
    return self._call("free")

  def _send(self, step, size_bytes, slow_s, ready, links):
    slow = bool(slow_s.any())
    told = self._call("send", step.hop, size_bytes, slow, ready)
    return told, told

  def _later(self, first, second):
    return max(first, second)

  def _join(self, op):
    self._call("join", op.returning, op.donor)

  def _occupy_channel(self, start, end):
    self._call("occupy", start, end)

  def _wait(self, exchange_end):
    self._call("wait", exchange_end)


def exchange(*operations, members=None):
  return [Launch(KEY, operations, members), Wait(KEY, members)]


def test_the_codec_runs_half_before_an_exchange_and_half_after_it():
  operations = Collective("all_reduce", 80), Collective("broadcast", 4)
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
    # The donor has just sent, but not to the one that comes back.
    (
      3,
      [
        *exchange(GATHER),
        Compute(1, taken=(1, 1, 0)),
        *exchange(GATHER, members=(0, 1)),
        Join((2,), 0),
        *exchange(Collective("broadcast", 9_000_000), members=(0, 2)),
      ],
      [1, 0, 1, 1],
    ),
  ],
)
def test_only_a_message_after_idle_time_starts_slowly(num_replicas, ops, slow):
  told = Recorder(num_replicas, GLOO)
  told.interpret([Compute(1), *ops])
  assert [call[3] for call in told.calls if call[0] == "send"] == slow


def test_a_stretch_may_have_a_step_of_a_slow_replica_alone():
  told = Recorder(3)
  told.interpret([Compute(0, taken=(0, 1, 0)), Compute(2, taken=(2, 1, 2))])
  steps = [("steps", [0.0, 0.5, 0.0]), ("steps", [1.0, 0.5, 1.0])]
  assert told.calls == steps and told.num_steps == 2


def test_a_flush_of_one_replica_names_every_node_once():
  # Nothing but waits lies between the launches of a flush.
  one, flush = small.cluster(1), []
  for fragment in range(60):
    key = ("fragment", fragment, 0, 0)
    flush += [Launch(key, (Collective("all_reduce", 8),)), Wait(key)]
  lowered = lower(small.link_costs(one), small.work(one), [Compute(2), *flush])
  assert lowered.now == lowered.channel == [[0]]
