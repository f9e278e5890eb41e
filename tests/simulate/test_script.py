"""What the simulator walks is what the trainer does."""

import dataclasses

import numpy as np
import pytest

from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.simulate.script import Compute, Join, Launch, Wait
from tests.simulate import small

ALL = small.SCHEDULES + small.COPIED


def walked(name, settings, **others):
  script, plan = small.script(name, 3, **others | settings)
  return script, plan, list(script.ops(plan))


def steps_of(ops):
  return sum(op.num_steps for op in ops if isinstance(op, Compute))


def time_of(script, plan, one, **changes):
  work = small.work(one, **changes)
  return run_time(small.link_costs(one), work, script.ops(plan))


@pytest.mark.parametrize("name, settings", ALL)
@pytest.mark.parametrize("total_steps", [37, 40])
def test_bytes_and_steps_are_those_of_the_trainer(name, settings, total_steps):
  script, plan, ops = walked(name, settings, total_steps=total_steps)
  segments = list(plan.segments())
  trainers = sum(script.traffic.segment_bytes(each) for each in segments)
  if plan.local_start < plan.total_steps:
    step = plan.schedule_step(plan.total_steps)
    trainers += script.traffic.flush_bytes(step, plan.flush_participation())
  joins = sum(
    bool(s.participation and s.participation.returning) for s in segments
  )
  launched = [op for op in ops if isinstance(op, Launch)]
  assert trainers + joins * script.copied_bytes == sum(
    operation.sent_bytes(len(op.members or "123"))
    for op in launched
    for operation in op.operations
  )
  assert steps_of(ops) == plan.total_steps
  # Every exchange is launched once, and then waited for once.
  keys = [op.key for op in launched]
  assert len(set(keys)) == len(keys) > 0
  for key in keys:
    own = [type(op) for op in ops if getattr(op, "key", None) == key]
    assert own == [Launch, Wait]


@pytest.mark.parametrize(
  "num_fragments, overlap_steps, hiding_steps",
  [
    *((1, overlap, overlap) for overlap in (0, 3, 6)),
    # The program exchanges in the window that ends with the arrival.
    *((1, 7, 1), (1, 12, 6), (2, 2, 2), (2, 3, 3), (2, 5, 2)),
  ],
)
def test_an_exchange_hides_behind_the_steps_of_its_last_window(
  num_fragments, overlap_steps, hiding_steps
):
  settings = {"sync_interval": 6, "num_fragments": num_fragments}
  settings |= {"overlap_steps": overlap_steps}
  ops = walked("delayed", settings)[-1]
  done = 0
  launched = {}
  gaps = set()
  for op in ops:
    if isinstance(op, Compute):
      done += op.num_steps
    elif isinstance(op, Launch):
      launched[op.key] = done
    elif isinstance(op, Wait) and done < 26:  # A flush waits for less.
      gaps.add(done - launched[op.key])
  assert gaps == {hiding_steps}


def test_a_message_that_needs_another_has_steps_of_its_own():
  script, plan = small.script("dilocox", 3, "rank 2", sync_interval=8)
  ops = list(script.segment(plan.segment(16)))
  assert [type(op) for op in ops] == [Launch, Compute, Wait] * 4
  assert steps_of(ops) == 8
  launched = [op for op in ops if isinstance(op, Launch)]
  assert [op.operations for op in launched] == [
    tuple(each for each in script.traffic.exchange(0) if each.turn == turn)
    for turn in range(4)
  ]
  # The turns share the time of the codec.
  assert sum(op.codec_share for op in launched) == 1


def test_what_was_sent_before_h_changed_is_found_after_it():
  """As adaptive intervals do: the schedule begins anew, a round in flight."""
  script, plan = small.script("dilocox", 3, sync_interval=8, total_steps=34)
  shorter, later = small.script("dilocox", 3, sync_interval=3, total_steps=34)
  later = dataclasses.replace(later, schedule_start=16 - 3)
  ops = small.ops_up_to(script, plan, 16)
  for segment in later.segments(16):
    ops += shorter.segment(segment)
  ops += shorter.flush(later)
  launched = [op.key for op in ops if isinstance(op, Launch)]
  assert launched == [op.key for op in ops if isinstance(op, Wait)]
  assert len(set(launched)) == len(launched) and steps_of(ops) == 34


def test_a_replica_that_comes_back_copies_the_donor_before_its_steps():
  """Replica 2 of three is away in round 1 of three."""
  away = {"membership": {"absences": ((2, 1, 1),)}, "total_steps": 12}
  script, plan, _ = walked("diloco", {"sync_interval": 4}, **away)
  script = dataclasses.replace(script, copied_bytes=1000)
  ops = list(script.ops(plan))
  members = [op.members for op in ops if isinstance(op, Launch)]
  assert members == [(0, 1, 2), (0, 1), (0, 2), (0, 1, 2)]  # (0, 2) copy.
  copy, wait, steps = ops[ops.index(Join((2,), 0)) + 1 :][:3]
  assert isinstance(copy, Launch) and copy.operations[0].operand_bytes == 1000
  assert wait == Wait(copy.key, (0, 2), codec_share=0.0)
  assert steps == Compute(4, taken=(4, 4, 4))
  taken = [op.taken for op in ops if isinstance(op, Compute)]
  assert taken == [(4, 4, 4), (4, 4, 0), (4, 4, 4)]


WARM = {"sync_interval": 10, "warm_start_steps": 10, "total_steps": 40}


@pytest.mark.parametrize(
  ("name", "settings", "count"),
  [("diloco", WARM, 3), ("cocktail_sgd", {"total_steps": 7}, 7)],
)
def test_only_what_is_encoded_costs_the_codecs_time(name, settings, count):
  """Sums of a warm start and copies of the state go as they are."""
  args = small.script(name, 3, **settings)
  found = time_of(*args, small.cluster(3), codec_s=0.5)
  assert found.codec_s == pytest.approx([0.5 * count] * 3)


def test_a_slow_replica_takes_all_its_steps_behind_several_messages():
  slow = {"membership": {"inner_steps": (3, 2, 3)}, "total_steps": 12}
  script, plan, _ = walked("dilocox", {"sync_interval": 3}, **slow)
  codec = LowRank(2, power_iterations=2, then=Int(4))
  traffic = dataclasses.replace(script.traffic, codec=codec)
  ops = dataclasses.replace(script, traffic=traffic).ops(plan)
  taken = [op.taken for op in ops if isinstance(op, Compute) and op.taken]
  assert np.sum(taken, axis=0).tolist() == [12, 8, 12]


def without_keys(ops):
  return [
    dataclasses.replace(op, key=("", 0, 0, 0)) if hasattr(op, "key") else op
    for op in ops
  ]


@pytest.mark.parametrize("name, settings", ALL)
def test_repeated_ops_are_those_of_the_run(name, settings):
  script, plan, ops = walked(name, settings, total_steps=60)
  found = []
  for repeated, count in script.repeated_ops(plan):
    found += without_keys(repeated) * count
  assert found == without_keys(ops)
