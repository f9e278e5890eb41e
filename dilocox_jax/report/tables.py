"""The table of a frame: one row a setting, as text for pages and terminals."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from dilocox_jax.report import units
from dilocox_jax.report.frame import Frame, Setting, mean, standard_error

Cell = Callable[[Frame, Setting], str]
CellRows = list[dict[str, str]]


def _name(frame: Frame, setting: Setting) -> str:
  count = len(setting.traces)
  return (
    setting.name + setting.note + units.human_missing(count, frame.num_seeds)
  )


def _loss(frame: Frame, setting: Setting) -> str:
  del frame
  if not setting.traces or not (
    setting.traces[0].points or math.isfinite(setting.loss)
  ):
    return "none yet"
  return units.human_loss(setting.loss, standard_error(setting.losses))


def _gap(frame: Frame, setting: Setting) -> str:
  if frame.base(setting) is None:
    return "-"
  return units.human_gap(*frame.gap(setting))


def _trace(setting: Setting, field: str, form: str) -> str:
  first = (*setting.traces, None)[0]
  return format(getattr(first, field), form) if first else "-"


CELLS: dict[str, Cell] = {
  "run": _name,
  "loss": _loss,
  "gap": _gap,
  "to": lambda frame, setting: setting.baseline if frame.base(setting) else "-",
  "sent bytes": lambda _, setting: units.human_bytes(setting.sent_bytes),
  "fewer bytes": lambda f, s: units.human_ratio(f.fewer_bytes(s)),
  "steps": lambda _, setting: _trace(setting, "steps", ","),
  "tokens": lambda _, setting: _trace(setting, "tokens", ","),
  "wall (s)": lambda _, setting: _trace(setting, "wall_s", ".1f"),
  "changed": lambda _, setting: setting.changed or "-",
}


def table(
  frame: Frame,
  columns: Sequence[str],
  settings: Sequence[Setting] | None = None,
  clock: str = "",
) -> CellRows:
  """Returns the cells of each setting by column.

  Args:
    frame: What the report is about.
    columns: Names of `CELLS`.
    settings: Those to show; by default all.
    clock: Name of the clock whose columns are added; empty for none.
  """
  chosen = frame.settings if settings is None else settings
  return [
    {name: CELLS[name](frame, each) for name in columns}
    | (_times(frame, each, clock) if clock else {})
    for each in chosen
  ]


def _times(frame: Frame, setting: Setting, clock: str) -> dict[str, str]:
  cells = {}
  if setting.utilisation:
    share = setting.utilisation.get(clock, math.nan)
    cells["utilisation"] = units.human_share(share)
  cells["simulated time"] = units.human_time(
    setting.seconds.get(clock, math.nan)
  )
  if frame.target:
    cells[f"to loss {frame.target:g}"] = reached(setting, clock, frame.target)
  return cells


def at_equal_time(frame: Frame, clock: str) -> CellRows:
  """Returns the loss of each setting when the first of them is done.

  Between two evaluations the loss is taken to fall linearly. Before the first
  one there is no loss, and the cell has the number of steps.

  Args:
    frame: Settings that all have times of the clock.
    clock: Name of the clock.
  """
  end_s = min(setting.seconds[clock] for setting in frame.settings)
  cells = []
  for setting in frame.settings:
    (trace, *_), points = setting.traces, setting.traces[0].points
    times_s = [point.seconds[clock] for point in points]
    if points and times_s[0] <= end_s:
      loss = np.interp(end_s, times_s, [point.loss for point in points])
      cell = units.human_loss(float(loss))
    else:
      steps = int(trace.steps * end_s / setting.seconds[clock])
      cell = f"{steps} step{'s' * (steps != 1)}"
    cells.append({f"loss at {units.human_time(end_s)}": cell})
  return cells


def reached(setting: Setting, clock: str, target: float) -> str:
  """Says when a loss was reached, or by how many of the seeds with a curve.

  Args:
    setting: The setting.
    clock: Name of the clock.
    target: The loss (nats a token).
  """
  times_s = setting.seconds_to(clock, target)
  if count := sum(map(math.isinf, times_s)):
    some = len(times_s) - count
    return f"{some} of {len(times_s)} seeds" if some else "not reached"
  missing = units.human_missing(len(times_s), len(setting.traces))
  time = units.human_time(mean(times_s), standard_error(times_s))
  return time + (missing if times_s else "")


def price(frame: Frame) -> str:
  """States what the cheapest setting near its baseline pays for its bytes.

  A loss is called higher or lower only if the difference exceeds its error.
  Empty if there is nothing to compare.
  """
  least = frame.cheapest()
  base = frame.base(least) if least else None
  if not least or not base:
    return ""
  ratio = frame.fewer_bytes(least)
  if ratio < 1.05:  # Nothing is saved.
    return ""
  title = (
    f"{least.label} sends {units.human_ratio(ratio)} less than {base.label}"
  )
  if not math.isfinite(ratio):
    title = f"{least.label} sends nothing"
  for clock in frame.clocks if len(frame.clocks) == 1 else ():
    times = (units.human_time(each.seconds[clock]) for each in (least, base))
    title += ", in {} of simulated time instead of {}".format(*times)
  return f"{title}; its loss is {_compared(frame, least)}{_tokens(least, base)}"


def _compared(frame: Frame, setting: Setting) -> str:
  gap, error = frame.gap(setting)
  if math.isfinite(error) and abs(gap) <= error:
    return f"the same within its error ({units.human_gap(gap, error)})"
  alone = " (one seed)" if len(frame.pairs(setting)) == 1 else ""
  return units.human_comparison(gap, error) + alone


def _tokens(setting: Setting, base: Setting) -> str:
  seen = [units.human_tokens(each.traces[0].tokens) for each in (setting, base)]
  return "" if len(set(seen)) == 1 else " after {} instead of {}".format(*seen)
