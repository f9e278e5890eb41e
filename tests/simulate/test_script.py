"""What the simulator walks is what the trainer does."""

import dataclasses

import numpy as np
import pytest

from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.simulate.script import Compute, Join, Launch, Wait
from tests.simulate import small
from tests.simulate.test_agreement import METHODS


def walked(name, settings, total_steps=40):
  settings = {"total_steps": total_steps} | settings
  script, plan = small.script(name, 3, **settings)
  return script, plan, list(script.ops(plan))


def sent_bytes(ops):
  return sum(
    operation.sent_bytes(len(op.members) if op.members else 3)
    for op in ops
    if isinstance(op, Launch)
    for operation in op.operations
  )


@pytest.mark.parametrize("name, settings", METHODS)
@pytest.mark.parametrize("total_steps", [37, 40])
def test_bytes_and_steps_are_those_of_the_trainer(name, settings, total_steps):
  script, plan, ops = walked(name, settings, total_steps)
  segments = list(plan.segments())
  trainers = sum(script.traffic.segment_bytes(each) for each in segments)
  if plan.local_start < plan.total_steps:
    step = plan.schedule_step(plan.total_steps)
    trainers += script.traffic.flush_bytes(step, plan.flush_attendance())
  joins = sum(bool(s.attendance and s.attendance.returning) for s in segments)
  trainers += joins * script.copied_bytes
  if any(each.phase == "single" for each in segments):
    trainers += script.copied_bytes
  assert sent_bytes(ops) == trainers
  steps = sum(op.num_steps for op in ops if isinstance(op, Compute))
  assert steps == plan.total_steps


@pytest.mark.parametrize("name, settings", METHODS)
def test_every_exchange_is_launched_once_and_waited_for_once(name, settings):
  _, _, ops = walked(name, settings)
  launched = [op.key for op in ops if isinstance(op, Launch)]
  waited = [op.key for op in ops if isinstance(op, Wait)]
  assert len(set(launched)) == len(launched) > 0
  assert sorted(waited) == sorted(launched)
  for key in launched:
    launch, wait = [op for op in ops if getattr(op, "key", None) == key]
    assert isinstance(launch, Launch) and isinstance(wait, Wait)


@pytest.mark.parametrize(
  "num_fragments, overlap_steps, hiding_steps",
  [
    (1, 0, {0}),
    (1, 3, {3}),
    (1, 6, {6}),
    # The program exchanges in the window that ends with the arrival.
    (1, 7, {1}),
    (1, 12, {6}),
    (2, 2, {2}),
    (2, 3, {3}),
    (2, 5, {2}),
  ],
)
def test_an_exchange_hides_behind_the_steps_of_its_last_window(
  num_fragments, overlap_steps, hiding_steps
):
  settings = {
    "sync_interval": 6,
    "num_fragments": num_fragments,
    "overlap_steps": overlap_steps,
  }
  _, _, ops = walked("delayed", settings)
  done, launched, gaps = 0, {}, []
  for op in ops:
    if isinstance(op, Compute):
      done += op.num_steps
    elif isinstance(op, Launch):
      launched[op.key] = done
    elif (
      isinstance(op, Wait) and done < 40
    ):  # The flush at the end waits for less.
      gaps.append(done - launched[op.key])
  assert set(gaps) == hiding_steps


def test_a_message_that_needs_another_has_steps_of_its_own():
  script, plan = small.script("dilocox", 3, "rank 2", sync_interval=8)
  (segment,) = [plan.segment(16)]
  ops = list(script.segment(segment))
  kinds = [type(op) for op in ops]
  assert kinds == [Launch, Compute, Wait] * 4
  assert sum(op.num_steps for op in ops if isinstance(op, Compute)) == 8
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
  ops = list(script.ops(plan, 16))
  for segment in later.segments(16):
    ops += shorter.segment(segment)
  ops += shorter.flush(later)
  launched = [op.key for op in ops if isinstance(op, Launch)]
  waited = [op.key for op in ops if isinstance(op, Wait)]
  assert waited == launched and len(set(launched)) == len(launched)
  assert sum(op.num_steps for op in ops if isinstance(op, Compute)) == 34


def test_a_script_cut_short_has_no_flush():
  script, plan, whole = walked("dilocox", {"sync_interval": 10})
  part = list(script.ops(plan, 20))
  assert part == whole[: len(part)]
  assert sum(op.num_steps for op in part if isinstance(op, Compute)) == 20
  assert len([op for op in part if isinstance(op, Wait)]) == 1


def test_a_replica_that_comes_back_copies_the_donor_before_its_steps():
  """Replica 2 of three is away in round 1 of three."""
  script, plan = small.script(
    "diloco",
    3,
    sync_interval=4,
    total_steps=12,
    membership={"absences": ((2, 1, 1),)},
  )
  script = dataclasses.replace(script, copied_bytes=1000)
  ops = list(script.ops(plan))
  assert [op.members for op in ops if isinstance(op, Launch)] == [
    (0, 1, 2),
    (0, 1),
    (0, 2),  # The copy.
    (0, 1, 2),
  ]
  place = ops.index(Join((2,), 0))
  copy, wait, steps = ops[place + 1 : place + 4]
  assert isinstance(copy, Launch) and copy.operations[0].operand_bytes == 1000
  assert wait == Wait(copy.key, (0, 2), codec_share=0.0)
  assert steps == Compute(4, taken=(4, 4, 4))
  taken = [op.taken for op in ops if isinstance(op, Compute)]
  assert taken == [(4, 4, 4), (4, 4, 0), (4, 4, 4)]


def test_an_absent_replica_costs_no_time_and_its_link_is_free():
  """Two near replicas and a far one: while it is away, exchanges are short."""
  far = small.link(1e6)
  one = small.cluster(3)
  sites = (*one.sites[:2], dataclasses.replace(one.sites[2], link=far))
  one = dataclasses.replace(one, sites=sites)
  times = {}
  for away in ((), ((2, 0, 9),)):
    script, plan = small.script(
      "diloco", 3, sync_interval=4, membership={"absences": away}
    )
    ops = script.ops(plan)
    times[away] = run_time(small.link_costs(one), small.work(one), ops)
  pair = small.cluster(2)
  script, plan = small.script("diloco", 2, sync_interval=4)
  ops = script.ops(plan)
  alone = run_time(small.link_costs(pair), small.work(pair), ops)
  assert times[(2, 0, 9),].total_s == pytest.approx(alone.total_s)
  assert times[()].total_s > 10 * alone.total_s


WARM = {"sync_interval": 10, "warm_start_steps": 10}


@pytest.mark.parametrize(
  ("name", "settings", "count"),
  [
    ("diloco", WARM | {"warm_start": "data_parallel"}, 3),
    ("diloco", WARM | {"warm_start": "single"}, 3),
    ("cocktail_sgd", {"total_steps": 7}, 7),
  ],
)
def test_only_what_is_encoded_costs_the_codecs_time(name, settings, count):
  """Sums of a warm start and copies of the state go as they are."""
  ops = walked(name, settings)[-1]
  one = small.cluster(3)
  work = small.work(one, codec_s=0.5)
  found = run_time(small.link_costs(one), work, ops)
  assert found.codec_s == pytest.approx([0.5 * count] * 3)


def test_a_slow_replica_takes_all_its_steps_behind_several_messages():
  members = {"inner_steps": (3, 2, 3)}
  script, plan = small.script(
    "dilocox", 3, sync_interval=3, total_steps=12, membership=members
  )
  codec = LowRank(2, power_iterations=2, then=Int(4))
  traffic = dataclasses.replace(script.traffic, codec=codec)
  script = dataclasses.replace(script, traffic=traffic)
  steps = [op for op in script.ops(plan) if isinstance(op, Compute)]
  taken = np.sum([op.taken for op in steps if op.taken], axis=0)
  assert taken.tolist() == [12, 8, 12]
