"""A round's windows grouped into what one compiled program can walk.

Neighbouring windows that differ only in numbers become one piece: the shape
of the piece is static and decides the program, its numbers are a table that
the program reads. Hence a program does not grow with fragments or steps.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.plan.schedule.sync_schedule import Event, SyncSchedule, Window


@dataclasses.dataclass(frozen=True)
class WindowGroup:
  """The static shape of equal windows.

  Attributes:
    num_windows: How many.
    applied: Which fragment arrives: "first" (fragment 0), "layers" (one of
      the others, by number) or None.
    sent: Likewise for the fragment that leaves.
  """

  num_windows: int
  applied: str | None
  sent: str | None


class WindowTable(NamedTuple):
  """The numbers of a piece's windows.

  Each is [num_windows] int32 here, and one number on the device once a
  program walks the windows. Fragments and slots are 0 where there are none.
  """

  steps_before: Any
  steps_after: Any
  applied: Any
  applied_slot: Any
  sent: Any
  sent_slot: Any


def _kind(event: Event | None) -> str | None:
  if event is None:
    return None
  return "layers" if event.fragment else "first"


def _column(values) -> np.ndarray:
  return np.asarray(list(values), np.int32)


def _table(schedule: SyncSchedule, windows: Sequence[Window]) -> WindowTable:
  def fragments(events):
    return _column(e.fragment if e else 0 for e in events)

  def slots(events):
    return _column(schedule.slot(e) if e else 0 for e in events)

  applied = [w.applied for w in windows]
  sent = [w.sent for w in windows]
  return WindowTable(
    steps_before=_column(w.steps_before for w in windows),
    steps_after=_column(w.steps_after for w in windows),
    applied=fragments(applied),
    applied_slot=slots(applied),
    sent=fragments(sent),
    sent_slot=slots(sent),
  )


def window_groups(
  schedule: SyncSchedule, windows: Sequence[Window]
) -> tuple[tuple[WindowGroup, ...], tuple[WindowTable, ...]]:
  """Groups windows into pieces.

  Args:
    schedule: Where the windows come from.
    windows: A round, or the part of one.

  Returns:
    The pieces, static, and their tables, in the same order.
  """
  groups = [
    (key, list(group))
    for key, group in itertools.groupby(
      windows, lambda w: (_kind(w.applied), _kind(w.sent))
    )
  ]
  shapes = tuple(WindowGroup(len(group), *key) for key, group in groups)
  return shapes, tuple(_table(schedule, group) for _, group in groups)
