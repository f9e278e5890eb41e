"""Groups of a round's windows, each of which one scan runs.

Neighbouring windows that differ only in numbers become one window group. What
they have in common is static and decides the program; their numbers are a table
that the program reads. So a program does not grow with fragments or steps.

H = 6, P = 3, tau = 1: in a round, fragments 0, 1 and 2 are sent after steps 6,
2 and 4, and applied one step later. Its three windows are

    steps_before  applied  steps_after  sent
         1           0          1         1
         1           1          1         2
         1           2          1         0

Fragment 0 holds no layers and is handled by other operations than fragments 1
and 2, so the windows form three groups here: (first, layers), (layers, layers)
and (layers, first). With P = 10 they would be three groups too, and the middle
one a scan over eight windows. Slices are all alike, so with slices all windows
form one group.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.plan.schedule.membership import (
  RoundAttendance,
  WindowAttendance,
)
from dilocox_jax.plan.schedule.sync_schedule import Event, SyncSchedule, Window


@dataclasses.dataclass(frozen=True)
class WindowGroup:
  """What neighbouring windows have in common.

  Attributes:
    num_windows: Number of windows.
    applied: Kind of the fragment that is applied: "first" (a fragment 0 unlike
      the others), "layers" (any other fragment), or None if none is.
    sent: Kind of the fragment that is sent, likewise.
    has_steps_after: Whether any window has inner steps after its apply. If not,
      the program needs no loop for them, which halves what is compiled.
  """

  num_windows: int
  applied: str | None
  sent: str | None
  has_steps_after: bool = True


class WindowTable(NamedTuple):
  """The numbers of a group's windows.

  Each field is [num_windows] int32 here, and one number in the program that
  scans over the windows. Fragments and slots are 0 where there are none. Where
  replicas differ, step counts are [num_windows, M], and so are the weights of
  what is exchanged (float64); `weights` is None otherwise.
  """

  steps_before: Any
  steps_after: Any
  applied: Any
  applied_slot: Any
  sent: Any
  sent_slot: Any
  weights: Any = None


def _kind(event: Event | None, are_alike: bool) -> str | None:
  if event is None:
    return None
  return "layers" if event.fragment or are_alike else "first"


def _table(
  schedule: SyncSchedule,
  windows: Sequence[tuple[Window, WindowAttendance | None]],
) -> WindowTable:
  def numbers(event: Event | None) -> tuple[int, int]:
    return (event.fragment, schedule.slot(event)) if event else (0, 0)

  rows = [
    (w.steps_before, w.steps_after, *numbers(w.applied), *numbers(w.sent))
    for w, _ in windows
  ]
  table = WindowTable(*np.array(rows, np.int32).T)
  shares = [share for _, share in windows if share]
  if not shares:
    return table
  nobody = (0.0,) * len(shares[0].steps_before)
  return table._replace(
    steps_before=np.array([s.steps_before for s in shares], np.int32),
    steps_after=np.array([s.steps_after for s in shares], np.int32),
    weights=np.array([s.weights or nobody for s in shares]),
  )


def window_groups(
  schedule: SyncSchedule,
  windows: Sequence[Window],
  attendance: RoundAttendance | None = None,
  *,
  are_alike: bool = False,
) -> tuple[tuple[WindowGroup, ...], tuple[WindowTable, ...]]:
  """Groups neighbouring windows that differ only in numbers.

  Args:
    schedule: The schedule that the windows are from.
    windows: Windows of a round, or of the first steps of one.
    attendance: What each replica does in them; None: all the same.
    are_alike: Whether fragment 0 has the shapes of all others
      (`Fragments.are_alike`).

  Returns:
    The groups, and their tables in the same order.
  """
  shares = attendance.windows if attendance else [None] * len(windows)
  groups = [
    (key, list(group))
    for key, group in itertools.groupby(
      zip(windows, shares, strict=True),
      lambda pair: (
        _kind(pair[0].applied, are_alike),
        _kind(pair[0].sent, are_alike),
      ),
    )
  ]
  shapes = tuple(
    WindowGroup(len(group), *key, any(w.steps_after for w, _ in group))
    for key, group in groups
  )
  return shapes, tuple(_table(schedule, group) for _, group in groups)
