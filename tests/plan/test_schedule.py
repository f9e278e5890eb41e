"""Events, windows, flushes, and the segments of a run."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.membership import Membership
from dilocox_jax.plan.schedule.run_plan import RunPlan, Segment
from dilocox_jax.plan.schedule.sync_schedule import Event, SyncSchedule


def log(schedule, stop):
  """Every event up to a step, by looking at each step and fragment."""
  interval = schedule.sync_interval
  parts = schedule.num_fragments
  found = []
  for step in range(1, stop + 1):
    for kind in ("apply", "send"):
      sent_at = step - schedule.overlap_steps if kind == "apply" else step
      for fragment in range(parts):
        phase = fragment * interval // parts
        if sent_at > 0 and (sent_at - phase) % interval == 0:
          found.append(Event(step, kind, fragment, sent_at))
  return found


def walked(windows, start):
  """Events of windows in their order, with the steps counted by walking."""
  for window in windows:
    start += window.num_steps
    for event, kind in ((window.applied, "apply"), (window.sent, "send")):
      if event:
        assert (event.kind, event.step) == (kind, start)
        yield event


@st.composite
def schedules(draw):
  interval = draw(st.integers(1, 24))
  parts = draw(st.integers(1, interval))
  return SyncSchedule(interval, parts, draw(st.integers(0, 3 * interval)))


@given(schedules(), st.integers(0, 100), st.integers(0, 100))
def test_windows_hold_exactly_the_events_of_their_steps(
  schedule, start, num_steps
):
  stop = start + num_steps
  windows = schedule.windows(start, stop)
  expected = [e for e in log(schedule, stop) if e.step > start]
  assert schedule.events(start, stop) == expected
  assert sorted(walked(windows, start)) == expected
  assert sum(window.num_steps for window in windows) == num_steps
  for window in windows:
    # No two fragments are sent, or applied, after one step.
    assert window.num_steps > 0
    events = [e.fragment for e in (window.applied, window.sent) if e]
    assert window.is_same == (len(events) == 2 and len(set(events)) == 1)
  middle = windows[: len(windows) // 2]
  until = start + sum(window.num_steps for window in middle)
  parts = schedule.windows(start, until) + schedule.windows(until, stop)
  assert sorted(walked(parts, start)) == expected


@given(schedules(), st.integers(0, 100))
def test_what_is_in_flight_was_sent_and_not_applied(schedule, step):
  def pending(step):
    past = log(schedule, step)
    kinds = [
      [event.kind for event in past if event.fragment == fragment]
      for fragment in range(schedule.num_fragments)
    ]
    return [own.count("send") - own.count("apply") for own in kinds]

  assert schedule.num_in_flight(step) == pending(step)
  assert max(pending(step)) <= schedule.depth
  tau = schedule.overlap_steps
  interval = schedule.sync_interval
  assert schedule.is_whole_rounds == (tau % interval == 0)


@given(schedules(), st.data())
def test_a_flush_applies_what_is_pending_and_unsent_once(schedule, data):
  step = data.draw(st.integers(0, 5 * schedule.sync_interval), label="step")
  tau = schedule.overlap_steps
  windows = schedule.flush_windows(step)
  assert all(w.num_steps == 0 for w in windows)
  assert all(bool(w.applied) != bool(w.sent) for w in windows)
  events = [w.applied or w.sent for w in windows]
  fragments = [event.fragment for event in events]
  assert fragments == sorted(fragments)
  for fragment in range(schedule.num_fragments):
    past = [e for e in log(schedule, step) if e.fragment == fragment]
    sent = [e.send_step for e in past if e.kind == "send"]
    applied = [e.send_step for e in past if e.kind == "apply"]
    expected = pending = [
      Event(s + tau, "apply", fragment, s) for s in sent if s not in applied
    ]
    if step > max(sent, default=0):
      measured = Event(step, "send", fragment, step)
      first = tau >= schedule.sync_interval
      expected = [measured, *pending] if first else [*pending, measured]
      expected.append(Event(step + tau, "apply", fragment, step))
    assert [e for e in events if e.fragment == fragment] == expected


@pytest.mark.parametrize(
  ("schedule", "depth", "steps"),
  [
    (SyncSchedule(6, 1, 0), 0, 0),
    (SyncSchedule(6, 1, 4), 1, 4),
    (SyncSchedule(6, 1, 6), 1, 6),
    (SyncSchedule(6, 1, 8), 2, 2),
    (SyncSchedule(30, 3, 12), 1, 2),
    (SyncSchedule(25, 3, 9), 1, 1),
  ],
)
def test_an_exchange_hides_behind_its_last_window_alone(schedule, depth, steps):
  assert (schedule.depth, schedule.hiding_steps) == (depth, steps)


METHODS = [
  methods.allreduce(),
  methods.diloco(5),
  methods.streaming_diloco(6, 3, 4),
  methods.delayed(4, 2, 9),
]


@st.composite
def plans(draw):
  method = draw(st.sampled_from(METHODS))
  total = draw(st.integers(1, 40))
  per_dispatch = draw(st.integers(1, 9))
  is_gradient = method.exchanged == "gradient"
  steps = 0 if is_gradient else draw(st.integers(0, total - 1))
  return RunPlan(method, total, steps, per_dispatch)


@given(plans())
def test_segments_cover_a_run_and_are_the_same_after_a_restart(plan):
  segments = list(plan.segments())
  reached = 0
  for index, segment in enumerate(segments):
    assert segment.start == reached and segment.num_steps > 0
    reached = segment.stop
    assert list(plan.segments(reached)) == segments[index + 1 :]
    is_warm = segment.start < plan.warm_start_steps
    if is_warm or plan.method.exchanged == "gradient":
      assert segment.phase == "data_parallel"
    else:
      assert segment.phase == "rounds"
      assert segment.schedule_start == plan.warm_start_steps
      interval = plan.method.schedule.sync_interval
      assert segment.num_steps == min(
        interval, plan.total_steps - segment.start
      )
      assert (segment.start - plan.local_start) % interval == 0
      assert sum(w.num_steps for w in segment.windows) == segment.num_steps
    if segment.phase != "rounds":
      assert segment.num_steps <= plan.steps_per_dispatch
      assert not segment.windows
  assert reached == plan.total_steps
  ends = [segment.stop for segment in segments if segment.ends_phase]
  assert ends == ([plan.warm_start_steps] if plan.warm_start_steps else [])
  events = [
    event
    for segment in segments
    for window in segment.windows
    for event in (window.applied, window.sent)
    if event
  ]
  steps = plan.total_steps - plan.local_start
  assert sorted(events) == plan.method.schedule.events(0, steps)


@st.composite
def plans_with_absences(draw):
  plan = draw(plans())
  if plan.method.exchanged == "gradient" or plan.warm_start_steps:
    return plan
  absences = []
  for replica in draw(st.lists(st.integers(1, 2), max_size=3)):
    first = draw(st.integers(0, 12))
    absences.append((replica, first, first + draw(st.integers(0, 5))))
  members = Membership(plan.method.schedule, 3, tuple(absences))
  return dataclasses.replace(plan, membership=members)


def moved_to_zero(segment):
  """The segment as it would be at the start of a run."""
  done = segment.start - segment.schedule_start

  def moved(event):
    if event is None:
      return None
    return dataclasses.replace(
      event, step=event.step - done, send_step=event.send_step - done
    )

  windows = [
    dataclasses.replace(
      window, applied=moved(window.applied), sent=moved(window.sent)
    )
    for window in segment.windows
  ]
  return dataclasses.replace(
    segment,
    start=0,
    windows=tuple(windows),
    ends_phase=False,
    schedule_start=0,
  )


@given(plans_with_absences())
def test_repeated_segments_are_those_of_the_run(plan):
  expected = []
  for segment in plan.segments():
    if segment.phase == "rounds":
      expected.append(moved_to_zero(segment))
    else:
      expected += [Segment("data_parallel", 0, 1)] * segment.num_steps
  found = []
  for segment, count in plan.repeated_segments():
    found += [moved_to_zero(segment)] * count
  assert found == expected


def test_rounds_that_are_alike_come_once():
  warm = RunPlan(methods.diloco(30), 1010, warm_start_steps=100)
  found = list(warm.repeated_segments())
  sizes = [(segment.num_steps, count) for segment, count in found]
  assert sizes == [(1, 100), (30, 30), (10, 1)]
  members = Membership(SyncSchedule(4), 2, absences=((1, 3, 5),))
  away = RunPlan(methods.diloco(4), 80, membership=members)
  counts = [count for _, count in away.repeated_segments()]
  # Rounds 0 to 2, 3, 4 and 5, 6 (replica 1 comes back), 7 to 19.
  assert counts == [3, 1, 2, 1, 13]


def test_rounds_that_apply_what_was_sent_before_an_absence_are_not_alike():
  """With tau above H, weights of the mean change for some more rounds."""
  method = methods.delayed(4, 2, 9)
  members = Membership(method.schedule, 2, absences=((1, 10, 19),))
  plan = RunPlan(method, 120, membership=members)
  expected = [moved_to_zero(segment) for segment in plan.segments()]
  found = []
  for segment, count in plan.repeated_segments():
    found += [moved_to_zero(segment)] * count
  assert found == expected


class UnknownSchedule(SyncSchedule):
  """Says nothing about its rounds."""


class KnownSchedule(SyncSchedule):
  """Says that its rounds are alike."""

  @property
  def steady_round(self):
    return 0


@pytest.mark.parametrize(
  "kind, counts",
  [(UnknownSchedule, [1, 1, 1, 1, 1]), (KnownSchedule, [5])],
)
def test_a_schedule_from_outside_may_say_that_rounds_repeat(kind, counts):
  plan = RunPlan(methods.Method(kind(4)), 20)
  assert [count for _, count in plan.repeated_segments()] == counts
