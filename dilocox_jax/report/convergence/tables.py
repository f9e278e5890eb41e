"""The tables of a convergence sweep.

Every table names its clock, or says that it has none, and what is claimed of
an ordering is worked out from the numbers beside it.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from dilocox_jax.report import units
from dilocox_jax.report.convergence.comparison import (
  TOKENS,
  Comparison,
  EqualTime,
  MethodResult,
  Spread,
  mean_seconds_to,
  seconds_to,
)
from dilocox_jax.report.convergence.orderings import bounded, summary, verdicts


@dataclasses.dataclass(frozen=True)
class ReportTable:
  """A table.

  Attributes:
    title: What it shows, and on which clock.
    header: Of its columns; the first is text.
    rows: Its cells.
    notes: Sentences below it.
    on_page_alone: Whether a terminal goes without it.
  """

  title: str
  header: Sequence[str]
  rows: Sequence[Sequence[str]]
  notes: Sequence[str] = ()
  on_page_alone: bool = False


def tables(found: Comparison) -> Iterator[ReportTable]:
  """All tables in the order of the page.

  Args:
    found: The results.
  """
  yield _losses(found)
  for clock in found.clocks:
    yield _hours(found, clock)
  for each in found.equal_time:
    yield _equal_time(found, each)
  yield _orderings(found)
  yield _pairs(found)
  yield _tuned(found)


def _losses(found: Comparison) -> ReportTable:
  rows = [
    (
      entry.name + _count(len(entry.traces), found.seeds),
      _mean(entry.spread),
      _range(entry.spread),
      units.human_gap(found.gap(entry)),
      _bytes(entry.sent_bytes),
      f"{entry.interval}/{entry.overlap_steps}",
    )
    for entry in found.entries
  ]
  warm = [
    f"{entry.name} {entry.warm_start_steps:,} steps"
    for entry in found.entries
    if entry.warm_start_steps
  ]
  cut = [entry.name for entry in found.entries if not entry.ends_round]
  notes = [
    "Mean over seeds of the outer parameters' validation loss after the flush"
    " (measured), with the lowest and the highest; the gap is that of the"
    " means. Bytes are derived from the plan; warm start and flush are in them."
  ]
  notes += [
    f"The gap of {entry.name} is to {entry.baseline}, with its inner optimizer."
    for entry in found.entries
    if entry.baseline != found.entries[0].baseline
  ]
  if warm:
    notes.append(f"Warm start: {', '.join(warm)}; no other method has one.")
  if cut:
    notes.append(f"Last round cut short, then flushed: {', '.join(cut)}.")
  return ReportTable(
    "At equal tokens (no clock)",
    ("method", "loss", "lowest..highest", "gap", "bytes", "H/tau"),
    rows,
    notes,
  )


def _hours(found: Comparison, clock: str) -> ReportTable:
  target = found.target_loss
  rows = []
  for entry in found.entries:
    to_s = mean_seconds_to(entry, clock, target)
    rows.append(
      (
        entry.name,
        units.human_share(entry.utilisation.get(clock, math.nan)),
        _time(entry.seconds.get(clock, math.nan)),
        _time(to_s) if not math.isinf(to_s) else _reached(entry, clock, target),
      )
    )
  return ReportTable(
    f"Hours on the clock '{clock}'",
    ("method", "utilisation", "whole run (h)", f"to loss {target:g} (h)"),
    rows,
    [
      f"Clock '{clock}': {found.clocks[clock]}. Times are simulated, losses"
      " measured; between two evaluations the loss is taken to fall evenly."
    ],
  )


def _reached(entry: MethodResult, clock: str, target_loss: float) -> str:
  """How many seeds reached a loss that not all of them did."""
  times = [seconds_to(trace, clock, target_loss) for trace in entry.traces]
  count = sum(map(math.isfinite, times))
  return f"{count} of {len(times)} seeds" if count else "not reached"


def _equal_time(found: Comparison, each: EqualTime) -> ReportTable:
  rows = [
    (
      timed.name
      + _count(len(timed.losses), 0 if timed.is_too_few else found.seeds),
      f"{timed.steps:,}",
      units.human_share(timed.used_s / each.budget_s),
      "too few steps" if timed.is_too_few else _mean(timed.spread),
      _range(timed.spread),
    )
    for timed in each.methods
  ]
  return ReportTable(
    f"At equal time on the clock '{each.clock}', {_time(each.budget_s)} h",
    ("method", "steps", "time used", "loss", "lowest..highest"),
    rows,
    [
      f"Clock '{each.clock}': {found.clocks[each.clock]}. Every method has as"
      " many inner steps as fit to a thousandth of the time, at most those of"
      " equal tokens, its last round cut short if need be, and its schedule"
      " ends at its own last step. Its settings are those tuned at equal"
      " tokens."
    ],
  )


def _where(at: str) -> str:
  return "equal tokens" if at == TOKENS else f"equal time on '{at}'"


def _orderings(found: Comparison) -> ReportTable:
  by_claim = itertools.groupby(
    verdicts(found), lambda v: (v.better, v.at, v.source)
  )
  rows = []
  for (better, at, source), each in by_claim:
    of_claim = list(each)
    claim = f"{better} < {', '.join(v.other for v in of_claim)}"
    rows.append((claim, _where(at), source, summary(of_claim)))
  for name, most in found.gaps.items():
    claim = f"{name} at most {most:.1%} above allreduce"
    rows.append((claim, "equal tokens", "ours", bounded(found, name, most)))
  notes = [
    "A claim holds if no seed of the one ends as high as any seed of the"
    " others, all seeds run; a gap is that of the means. Worked out from the"
    " losses, not written by hand."
  ]
  if edge := [entry.name for entry in found.entries if entry.at_edge]:
    notes.append(
      "Best at an end of what was tried of inner learning rates, warm-ups or"
      " outer steps (rate over one less momentum), so tuned less well:"
      f" {', '.join(edge)}."
    )
  header = ("claim", "where", "said by", "verdict")
  return ReportTable("Orderings (clocks as named)", header, rows, notes)


def _pairs(found: Comparison) -> ReportTable:
  return ReportTable(
    "Orderings, pair by pair (clocks as named)",
    ("lower", "than", "where", "highest", "lowest", "verdict"),
    [
      (
        v.better,
        v.other,
        _where(v.at),
        _end(v.better_spread.high),
        _end(v.other_spread.low),
        v.result,
      )
      for v in verdicts(found)
    ],
    on_page_alone=True,
  )


def _tuned(found: Comparison) -> ReportTable:
  rows = [
    (
      entry.name,
      " ".join(f"{k}={_text(v)}" for k, v in entry.tuned.items())
      + (" (end of the grid)" if entry.at_edge else ""),
      f"{entry.tuning_runs} x {entry.tuning_rounds}",
    )
    for entry in found.entries
  ]
  return ReportTable(
    "Tuned values (no clock)",
    ("method", "values", "runs x rounds"),
    rows,
    found.tuning,
  )


def _text(value: Any) -> str:
  return f"{value:g}" if isinstance(value, float) else str(value)


def _count(count: int, wanted: int) -> str:
  return "" if count == wanted else f" ({count} of {wanted} seeds)"


def _mean(spread: Spread) -> str:
  if not spread.losses:
    return "-"
  mean = spread.mean
  return units.human_loss(mean) if math.isfinite(mean) else "diverged"


def _range(spread: Spread) -> str:
  if not spread.losses:
    return "-"
  return f"{_end(spread.low)}..{_end(spread.high)}"


def _end(loss: float) -> str:
  """One end of a spread; NaN is that of a method without a loss."""
  return "-" if math.isnan(loss) else units.human_loss(loss)


def _bytes(value: float) -> str:
  return units.human_bytes(value) if math.isfinite(value) else "-"


def _time(seconds: float) -> str:
  return f"{seconds / 3600:.3g}" if math.isfinite(seconds) else "-"
