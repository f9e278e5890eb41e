import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule
from dilocox_jax.plan.schedule.window_groups import WindowGroup, window_groups


def steady(schedule):
  """A round in which everything that can arrive does."""
  rounds = schedule.overlap_steps // schedule.sync_interval + 2
  return schedule.round_windows(rounds)


@st.composite
def rounds(draw):
  interval = draw(st.integers(1, 24))
  parts = draw(st.integers(1, interval))
  tau = draw(st.integers(0, 3 * interval))
  cut = draw(st.none() | st.integers(1, interval))
  return SyncSchedule(interval, parts, tau), draw(st.integers(0, 5)), cut


def rows(shapes, tables):
  """The windows that pieces and tables describe, in plain numbers."""
  for piece, table in zip(shapes, tables, strict=True):
    *columns, weights = table
    assert weights is None
    for column in columns:
      assert column.shape == (piece.num_windows,)
      assert column.dtype == np.int32
    for row in zip(*columns, strict=True):
      before, after, applied, applied_slot, sent, sent_slot = map(int, row)
      yield (
        before,
        after,
        (applied, applied_slot) if piece.applied else None,
        (sent, sent_slot) if piece.sent else None,
      )
      for kind, fragment in (piece.applied, applied), (piece.sent, sent):
        assert kind == (("layers" if fragment else "first") if kind else None)


@given(rounds())
def test_tables_give_back_the_windows(drawn):
  schedule, index, cut = drawn
  windows = schedule.round_windows(index, cut)
  expected = [
    (
      window.steps_before,
      window.steps_after,
      window.applied
      and (window.applied.fragment, schedule.slot(window.applied)),
      window.sent and (window.sent.fragment, schedule.slot(window.sent)),
    )
    for window in windows
  ]
  assert list(rows(*window_groups(schedule, windows))) == expected


@given(rounds())
def test_there_are_few_pieces_and_neighbours_differ(drawn):
  schedule, index, cut = drawn
  shapes, _ = window_groups(schedule, schedule.round_windows(index, cut))
  kinds = [(piece.applied, piece.sent) for piece in shapes]
  assert all(a != b for a, b in zip(kinds, kinds[1:], strict=False))
  # Fragment 0 arrives once and leaves once; nothing else is special but the
  # first arrivals of a run, the end of a cut, and an apply on the last step.
  assert len(shapes) <= 6


# Two delays with the same whole part of tau P / H send and apply in the same
# order of fragments.
@pytest.mark.parametrize("intervals", [0, 1, 2])
@pytest.mark.parametrize(
  ("interval", "parts", "overlap_steps"),
  [
    *((32, 4, tau) for tau in (0, 1, 4, 7, 8, 12, 16)),
    *((64, 8, tau) for tau in (20, 25, 44)),
  ],
)
def test_a_program_does_not_grow_with_fragments_or_steps(
  interval, parts, overlap_steps, intervals
):
  few = SyncSchedule(interval, parts, overlap_steps + interval * intervals)
  many = SyncSchedule(
    4 * interval, 4 * parts, overlap_steps + 4 * interval * intervals
  )
  shapes, _ = window_groups(few, steady(few))
  grown, _ = window_groups(many, steady(many))
  assert [(p.applied, p.sent) for p in shapes] == [
    (p.applied, p.sent) for p in grown
  ]
  assert sum(piece.num_windows for piece in grown) == 4 * parts


def test_a_streaming_round_has_three_pieces():
  schedule = SyncSchedule(32, 4, 4)
  shapes, tables = window_groups(schedule, schedule.round_windows(1))
  assert shapes == (
    WindowGroup(1, "first", "layers"),
    WindowGroup(2, "layers", "layers"),
    WindowGroup(1, "layers", "first"),
  )
  middle = tables[1]
  assert middle.steps_before.tolist() == [4, 4]
  assert middle.steps_after.tolist() == [4, 4]
  assert middle.applied.tolist() == [1, 2]
  assert middle.sent.tolist() == [2, 3]


def test_where_all_fragments_are_alike_all_windows_are_one_group():
  schedule = SyncSchedule(32, 4, 4)
  windows = schedule.round_windows(1)
  shapes, (table,) = window_groups(schedule, windows, are_alike=True)
  assert shapes == (WindowGroup(4, "layers", "layers"),)
  assert table.applied.tolist() == [0, 1, 2, 3]
  assert table.sent.tolist() == [1, 2, 3, 0]


def test_slots_take_turns_when_two_are_in_flight():
  schedule = SyncSchedule(4, 1, 6)
  seen = []
  for index in range(2, 6):
    _, (table,) = window_groups(schedule, schedule.round_windows(index))
    seen.append((int(table.applied_slot[0]), int(table.sent_slot[0])))
  # At a send, what was sent a round ago is in flight; two ago is applied.
  assert seen == [(1, 1), (0, 0), (1, 1), (0, 0)]
