import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.plan.schedule.sync_schedule import Event, SyncSchedule, Window


def log(schedule, stop):
  """Every event up to a step, by looking at each step and fragment."""
  interval, parts = schedule.sync_interval, schedule.num_fragments
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


@given(schedules())
def test_events_are_those_of_the_phase_rule(schedule):
  stop = 6 * schedule.sync_interval
  assert list(schedule.events(0, stop)) == log(schedule, stop)
  middle = stop // 2 + 1
  assert list(schedule.events(middle, stop)) == [
    event for event in log(schedule, stop) if event.step > middle
  ]


@given(schedules(), st.integers(0, 100), st.integers(0, 100))
def test_windows_hold_exactly_the_events_of_their_steps(
  schedule, start, num_steps
):
  stop = start + num_steps
  windows = schedule.windows(start, stop)
  expected = [e for e in log(schedule, stop) if e.step > start]
  assert sorted(walked(windows, start)) == expected
  assert sum(window.num_steps for window in windows) == num_steps
  # No two fragments are sent, or applied, after one step.
  assert all(window.num_steps for window in windows)
  middle = windows[: len(windows) // 2]
  until = start + sum(window.num_steps for window in middle)
  parts = schedule.windows(start, until) + schedule.windows(until, stop)
  assert sorted(walked(parts, start)) == expected


@given(schedules(), st.integers(0, 100))
def test_what_is_in_flight_was_sent_and_not_applied(schedule, step):
  past = log(schedule, step)
  for fragment, count in enumerate(schedule.num_in_flight(step)):
    own = [event.kind for event in past if event.fragment == fragment]
    assert count == own.count("send") - own.count("apply")
    assert count <= schedule.depth


@given(schedules(), st.integers(0, 100))
def test_every_fragment_is_sent_once_an_interval_and_applied_tau_later(
  schedule, start
):
  interval, tau = schedule.sync_interval, schedule.overlap_steps
  start += 1  # Fragment 0 is not sent at step 0, where nothing is done yet.
  seen = list(schedule.events(start, start + interval))
  sends = [event for event in seen if event.kind == "send"]
  assert sorted(e.fragment for e in sends) == [*range(schedule.num_fragments)]
  applies = [
    event
    for event in schedule.events(start + tau, start + tau + interval)
    if event.kind == "apply"
  ]
  assert [(e.step - tau, e.fragment) for e in applies] == [
    (e.step, e.fragment) for e in sends
  ]
  assert all(e.send_step == e.step - tau for e in applies)


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
    pending = [
      Event(s + tau, "apply", fragment, s) for s in sent if s not in applied
    ]
    expected = pending
    if step > max(sent, default=0):
      measured = Event(step, "send", fragment, step)
      first = tau >= schedule.sync_interval
      expected = [measured, *pending] if first else [*pending, measured]
      expected.append(Event(step + tau, "apply", fragment, step))
    assert [e for e in events if e.fragment == fragment] == expected


def apply(step, fragment, send_step):
  return Event(step, "apply", fragment, send_step)


def send(step, fragment):
  return Event(step, "send", fragment, step)


def flush(*events):
  """Windows without inner steps, one for each event."""
  return [
    Window(0, sent=event) if event.kind == "send" else Window(0, event)
    for event in events
  ]


def test_diloco_waits_for_its_exchange():
  schedule = SyncSchedule(3)
  assert list(schedule.events(0, 7)) == [
    apply(3, 0, 3),
    send(3, 0),
    apply(6, 0, 6),
    send(6, 0),
  ]
  (window,) = schedule.windows(3, 6)
  assert window == Window(3, apply(6, 0, 6), send(6, 0)) and window.is_same
  assert (schedule.depth, schedule.is_whole_rounds) == (0, True)
  assert schedule.flush_windows(6) == []
  assert schedule.flush_windows(7) == flush(send(7, 0), apply(7, 0, 7))


def test_streaming_diloco_sends_a_third_every_ten_steps():
  schedule = SyncSchedule(30, 3, 4)
  assert list(schedule.events(0, 40)) == [
    send(10, 1),
    apply(14, 1, 10),
    send(20, 2),
    apply(24, 2, 20),
    send(30, 0),
    apply(34, 0, 30),
    send(40, 1),
  ]
  assert schedule.windows(0, 30) == [
    Window(10, sent=send(10, 1)),
    Window(4, apply(14, 1, 10)),
    Window(6, sent=send(20, 2)),
    Window(4, apply(24, 2, 20)),
    Window(6, sent=send(30, 0)),
  ]
  assert schedule.windows(30, 35) == [Window(4, apply(34, 0, 30)), Window(1)]
  assert (schedule.depth, schedule.is_whole_rounds) == (1, False)
  # One step, 21 and 11 steps are unsent; fragment 0 is in flight as well.
  assert schedule.flush_windows(31) == flush(
    apply(34, 0, 30),
    send(31, 0),
    apply(35, 0, 31),
    send(31, 1),
    apply(35, 1, 31),
    send(31, 2),
    apply(35, 2, 31),
  )


def test_a_delay_of_one_round_applies_where_it_sends():
  schedule = SyncSchedule(4, 1, 4)
  assert list(schedule.events(0, 12)) == [
    send(4, 0),
    apply(8, 0, 4),
    send(8, 0),
    apply(12, 0, 8),
    send(12, 0),
  ]
  assert schedule.windows(0, 8) == [
    Window(4, sent=send(4, 0)),
    Window(4, apply(8, 0, 4), send(8, 0)),
  ]
  assert (schedule.depth, schedule.is_whole_rounds) == (1, True)
  assert schedule.flush_windows(8) == flush(apply(12, 0, 8))
  # Step 9 is measured before the content of step 8 is applied.
  assert schedule.flush_windows(9) == flush(
    send(9, 0), apply(12, 0, 8), apply(13, 0, 9)
  )


def test_a_delay_of_more_than_a_round_keeps_two_in_flight():
  schedule = SyncSchedule(4, 1, 6)
  assert list(schedule.events(0, 14)) == [
    send(4, 0),
    send(8, 0),
    apply(10, 0, 4),
    send(12, 0),
    apply(14, 0, 8),
  ]
  assert schedule.windows(4, 12) == [
    Window(4, sent=send(8, 0)),
    Window(2, apply(10, 0, 4)),
    Window(2, sent=send(12, 0)),
  ]
  assert (schedule.depth, schedule.is_whole_rounds) == (2, False)
  assert schedule.flush_windows(9) == flush(
    send(9, 0), apply(10, 0, 4), apply(14, 0, 8), apply(15, 0, 9)
  )
  assert [schedule.num_in_flight(s) for s in (4, 8, 10)] == [[1], [2], [1]]


@pytest.mark.parametrize(
  "schedule, steps",
  [
    (SyncSchedule(6, 1, 0), 0),
    (SyncSchedule(6, 1, 4), 4),
    (SyncSchedule(6, 1, 6), 6),
    (SyncSchedule(6, 1, 8), 2),
    (SyncSchedule(30, 3, 10), 10),
    (SyncSchedule(30, 3, 12), 2),
    (SyncSchedule(25, 3, 9), 1),
  ],
)
def test_an_exchange_hides_behind_its_last_window_alone(schedule, steps):
  assert schedule.hiding_steps == steps


def test_another_fragment_may_be_applied_where_one_is_sent():
  # t_1 = floor(5 / 2) = 2 and 2 + 3 = 5: due where fragment 0 is sent.
  schedule = SyncSchedule(5, 2, 3)
  windows = schedule.windows(5, 10)
  assert windows == [
    Window(2, sent=send(7, 1)),
    Window(1, apply(8, 0, 5)),
    Window(2, apply(10, 1, 7), send(10, 0)),
  ]
  assert not windows[-1].is_same


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ((0,), "sync_interval=0 must be at least 1"),
    ((4, 5), "num_fragments=5 must lie between 1 and sync_interval=4"),
    ((4, 0), "num_fragments=0 must lie between 1 and sync_interval=4"),
    ((4, 1, -2), "overlap_steps=-2 must not be negative"),
  ],
)
def test_an_impossible_schedule_says_which_values_clash(values, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    SyncSchedule(*values)
