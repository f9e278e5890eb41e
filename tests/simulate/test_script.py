"""What the simulator walks is what the trainer does."""

import dataclasses

import pytest

from dilocox_jax.simulate.script import Compute, Launch, Wait
from tests.simulate import small
from tests.simulate.test_agreement import METHODS


def walked(name, settings, total_steps=40):
  settings = {"total_steps": total_steps} | settings
  script, plan = small.script(name, 3, **settings)
  return script, plan, list(script.ops(plan))


def sent_bytes(ops, num_replicas=3):
  return sum(
    operation.sent_bytes(num_replicas)
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
    trainers += script.traffic.flush_bytes(step)
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
    assert (
      ops.index(Wait(key))
      > [n for n, op in enumerate(ops) if getattr(op, "key", None) == key][0]
    )


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
    elif done < 40:  # The flush at the end waits for less.
      gaps.append(done - launched[op.key])
  assert set(gaps) == hiding_steps


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
