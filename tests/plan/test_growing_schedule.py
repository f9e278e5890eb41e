"""Rounds that grow: their lengths, events, flush, bytes and equal rounds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.growing_schedule import (
  GrowingSchedule,
  Stage,
  schedule_of,
)
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.plan.schedule.sync_schedule import Event, SyncSchedule
from tests.plan.test_schedule import moved_to_zero, walked


def lengths(schedule, stop):
  """The lengths of the rounds up to a step, one after the other."""
  step = 0
  found = []
  while step < stop:
    index, length = schedule.round_at(step)
    assert index == len(found)
    found.append(length)
    step += length
  return found


def expected_lengths(schedule, stop):
  """The same by the rule: a round has the length of the step it begins at."""
  step = 0
  found = []
  while step < stop:
    doublings = min(step // schedule.steps_per_doubling, 40)
    grown = schedule.first_interval * 2**doublings
    found.append(min(grown, schedule.sync_interval))
    step += found[-1]
  return found


def expected_events(schedule, stop):
  """The events up to a step, by walking from round to round."""
  found = []
  start = 0
  # What is sent before `stop` may be applied after it.
  for length in expected_lengths(schedule, stop + schedule.sync_interval):
    following = expected_lengths(schedule, start + length + 1)[-1]
    for fragment in range(schedule.num_fragments):
      if fragment:
        sent = start + fragment * length // schedule.num_fragments
        share = length
      else:
        sent = start + length
        share = following
      delay = 0
      if schedule.overlap_steps:
        delay = schedule.overlap_steps * share // schedule.sync_interval
        delay = max(delay, 1)
      found.append(Event(sent + delay, "apply", fragment, sent))
      found.append(Event(sent, "send", fragment, sent))
    start += length
  return sorted(event for event in found if event.step <= stop)


@st.composite
def growing(draw):
  parts = draw(st.integers(1, 4))
  first = draw(st.integers(max(parts, 2), 8))
  interval = draw(st.integers(first, 40))
  overlap = draw(st.integers(0, interval if parts == 1 else interval - 1))
  if overlap and overlap < interval and overlap * first // interval >= first:
    overlap = 0
  every = draw(st.integers(1, 30))
  return GrowingSchedule(
    interval, parts, overlap, first_interval=first, steps_per_doubling=every
  )


def test_rounds_of_the_example_in_the_module():
  schedule = GrowingSchedule(16, first_interval=4, steps_per_doubling=20)
  assert lengths(schedule, 76) == [4, 4, 4, 4, 4, 8, 8, 8, 16, 16]
  assert schedule.stages == (Stage(0, 0, 4), Stage(5, 20, 8), Stage(8, 44, 16))
  assert schedule.interval_label == "4 to 16"


@given(growing(), st.integers(0, 150), st.integers(0, 60))
def test_rounds_events_and_windows_follow_the_rule(schedule, start, num_steps):
  stop = start + num_steps
  assert lengths(schedule, stop) == expected_lengths(schedule, stop)
  most = math.log2(schedule.sync_interval / schedule.first_interval) + 2
  assert len(set(lengths(schedule, stop))) <= most
  expected = [e for e in expected_events(schedule, stop) if e.step > start]
  assert schedule.events(start, stop) == expected
  assert sorted(walked(schedule.windows(start, stop), start)) == expected


@given(growing(), st.integers(0, 200))
def test_at_most_one_exchange_of_a_fragment_is_in_flight(schedule, step):
  past = expected_events(schedule, step)
  for fragment, count in enumerate(schedule.num_in_flight(step)):
    kinds = [event.kind for event in past if event.fragment == fragment]
    assert count == kinds.count("send") - kinds.count("apply")
    assert 0 <= count <= schedule.depth <= 1
  # No two fragments are sent, or applied, after one step.
  for kind in ("send", "apply"):
    steps = [event.step for event in past if event.kind == kind]
    assert len(set(steps)) == len(steps)


@given(growing(), st.integers(1, 200))
def test_a_flush_applies_everything_once(schedule, step):
  past = expected_events(schedule, step)
  windows = schedule.flush_windows(step)
  events = past + [window.applied or window.sent for window in windows]
  for fragment in range(schedule.num_fragments):
    own = [event for event in events if event.fragment == fragment]
    sent = [event.send_step for event in own if event.kind == "send"]
    applied = [event.send_step for event in own if event.kind == "apply"]
    assert sorted(sent) == sorted(applied)
    assert len(set(sent)) == len(sent)
    assert max(sent) == step


@given(growing(), st.integers(1, 300), st.integers(0, 20))
def test_repeated_segments_are_those_of_a_growing_run(schedule, total, warm):
  method = methods.Method(schedule, rule="continue")
  plan = RunPlan(method, total + warm, warm, steps_per_dispatch=1)
  segments = list(plan.segments())
  found = []
  for segment, count in plan.repeated_segments():
    found += [moved_to_zero(segment)] * count
  assert found == [moved_to_zero(segment) for segment in segments]
  middle = segments[len(segments) // 2]
  assert (
    list(plan.segments(middle.stop))[:3]
    == [segment for segment in segments if segment.start >= middle.stop][:3]
  )


def test_a_long_growing_run_has_few_kinds_of_rounds():
  method = methods.diloco(
    sync_interval=64, first_interval=1, steps_per_doubling=100_000
  )
  plan = RunPlan(method, 2_000_000)
  counts = [count for _, count in plan.repeated_segments()]
  assert len(counts) <= 2 * 7
  assert sum(counts) == len(lengths(method.schedule, 2_000_000))


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 100))
def test_rounds_that_do_not_grow_are_those_of_a_constant_interval(
  interval, every, stop
):
  growing = GrowingSchedule(
    interval, first_interval=interval, steps_per_doubling=every
  )
  constant = SyncSchedule(interval)
  assert growing.events(0, stop) == constant.events(0, stop)
  assert growing.flush_windows(stop) == constant.flush_windows(stop)
  assert growing.steady_round == constant.steady_round
  assert growing.hiding_steps == constant.hiding_steps


def test_every_named_method_with_rounds_can_grow():
  for name, build in methods.METHODS.items():
    if build().exchanged == "gradient":
      continue
    schedule = build(
      sync_interval=32, first_interval=8, steps_per_doubling=16
    ).schedule
    assert lengths(schedule, 40)[0] == 8, name
    assert lengths(schedule, 400)[-1] == 32, name


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"first_interval": 4}, "first_interval=4 needs steps_per_doubling"),
    ({"steps_per_doubling": 4}, "steps_per_doubling=4 needs first_interval"),
    (
      {"first_interval": 32, "steps_per_doubling": 4},
      "first_interval=32 must lie between num_fragments=1 and sync_interval=16",
    ),
    (
      {"first_interval": 2, "steps_per_doubling": 4, "num_fragments": 3},
      "first_interval=2 must lie between num_fragments=3",
    ),
    (
      {"first_interval": 4, "steps_per_doubling": 0},
      "steps_per_doubling=0 must be at least 1",
    ),
    (
      {"first_interval": 4, "steps_per_doubling": 4, "overlap_steps": 20},
      "overlap_steps=20 must be less than sync_interval=16 while rounds grow",
    ),
    (
      {"first_interval": 1, "steps_per_doubling": 4, "overlap_steps": 2},
      "take at least first_interval=2",
    ),
  ],
)
def test_schedules_that_cannot_be_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    schedule_of(16, **arguments)
