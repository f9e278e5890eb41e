"""Tables of a convergence sweep.

Every table names its clock or says that it has none. Verdicts on orderings are
computed from the losses, never written by hand.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from dilocox_jax.report import units
from dilocox_jax.report.convergence import orderings
from dilocox_jax.report.convergence.comparison import (
  TOKENS,
  Comparison,
  EqualTime,
  mean_seconds_to,
  seconds_to,
)
from dilocox_jax.report.spread import Spread


@dataclasses.dataclass(frozen=True)
class ReportTable:
  """One table of the report.

  Attributes:
    title: What the table shows, and on which clock.
    header: Names of the columns; the first column is text.
    rows: Cells, one row per line.
    notes: Sentences below the table.
    on_page_alone: Whether only the page shows it, not the terminal.
  """

  title: str
  header: Sequence[str]
  rows: Sequence[Sequence[str]]
  notes: Sequence[str] = ()
  on_page_alone: bool = False


def tables(found: Comparison) -> Iterator[ReportTable]:
  """Yields all tables in the order of the page."""
  yield _losses(found)
  for clock in found.clocks:
    yield _times(found, clock)
  for each in found.equal_time:
    yield _equal_time(found, each)
  yield _orderings(found)
  yield _pairs(found)
  yield _tuned(found)


def _losses(found: Comparison) -> ReportTable:
  rows = [
    (
      entry.name + units.human_missing(len(entry.traces), found.seeds),
      _mean(entry.spread),
      _range(entry.spread),
      units.human_gap(found.gap(entry)),
      units.human_bytes(entry.sent_bytes),
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
    "The loss is the validation loss of the outer parameters after the flush"
    " (measured): mean over seeds, lowest and highest seed. The gap compares"
    " the means. Bytes are derived from the plan and include warm start and"
    " flush."
  ]
  notes += [
    f"The gap of {entry.name} is to {entry.baseline}, which has the same inner"
    " optimizer."
    for entry in found.entries
    if entry.baseline != found.entries[0].baseline
  ]
  if warm:
    notes.append(f"Warm start: {', '.join(warm)}. The other methods have none.")
  if cut:
    notes.append(
      f"The last round was shorter than H, then flushed: {', '.join(cut)}."
    )
  return ReportTable(
    "At equal tokens (no clock)",
    ("method", "loss", "lowest..highest", "gap", "bytes", "H/tau"),
    rows,
    notes,
  )


def _times(found: Comparison, clock: str) -> ReportTable:
  target = found.target_loss
  rows = []
  for entry in found.entries:
    share = units.human_share(entry.utilisation.get(clock, math.nan))
    whole = units.human_time(entry.seconds.get(clock, math.nan))
    to_s = mean_seconds_to(entry, clock, target)
    reached = units.human_time(to_s)
    if math.isinf(to_s):  # Not all seeds reached the loss.
      times_s = [seconds_to(trace, clock, target) for trace in entry.traces]
      count = sum(map(math.isfinite, times_s))
      reached = f"{count} of {len(times_s)} seeds" if count else "not reached"
    rows.append((entry.name, share, whole, reached))
  return ReportTable(
    f"Time on the clock '{clock}'",
    ("method", "utilisation", "whole run", f"to loss {target:g}"),
    rows,
    [
      f"Clock '{clock}': {found.clocks[clock]}. Times are simulated, losses are"
      " measured. Between two evaluations the loss is taken to fall linearly."
    ],
  )


def _equal_time(found: Comparison, each: EqualTime) -> ReportTable:
  rows = []
  for timed in each.methods:
    seeds = 0 if timed.is_too_few else found.seeds
    name = timed.name + units.human_missing(len(timed.losses), seeds)
    used = units.human_share(timed.used_s / each.budget_s)
    loss = "too few steps" if timed.is_too_few else _mean(timed.spread)
    rows.append((name, f"{timed.steps:,}", used, loss, _range(timed.spread)))
  return ReportTable(
    f"At equal time on the clock '{each.clock}', "
    f" {units.human_time(each.budget_s)}",
    ("method", "steps", "time used", "loss", "lowest..highest"),
    rows,
    [
      f"Clock '{each.clock}': {found.clocks[each.clock]}. Every method has as"
      " many inner steps as fit into the time (to a thousandth of it), and at"
      " most as many as at equal tokens. Its last round may be shorter than H,"
      " and its learning rate schedule ends at its own last step. Its settings"
      " are those tuned at equal tokens."
    ],
  )


def _where(at: str) -> str:
  return "equal tokens" if at == TOKENS else f"equal time on '{at}'"


def _orderings(found: Comparison) -> ReportTable:
  rows = []
  for claim in found.claims:
    verdict = orderings.summary([*orderings.claim_verdicts(found, claim)])
    text = f"{claim.better} < {', '.join(claim.than)}"
    rows.append((text, _where(claim.at), claim.source, verdict))
  for name, most in found.gaps.items():
    claim = f"{name} at most {most:.1%} above allreduce"
    verdict = orderings.bounded(found, name, most)
    rows.append((claim, "equal tokens", "ours", verdict))
  notes = [
    "A claim `a < b, c` holds if every seed of a ends lower than every seed of"
    " b and c, and no seed is missing. Gaps compare means. The verdicts are"
    " computed from the losses."
  ]
  if edge := [entry.name for entry in found.entries if entry.at_edge]:
    notes.append(
      "The best inner learning rate, warm-up or outer step (rate / (1 -"
      " momentum)) was the first or last value that was tried, so a better one"
      f" may lie beyond: {', '.join(edge)}."
    )
  header = ("claim", "where", "said by", "verdict")
  return ReportTable("Orderings (clocks as named)", header, rows, notes)


def _pairs(found: Comparison) -> ReportTable:
  rows = []
  for v in orderings.verdicts(found):
    ends = _end(v.better_spread.high), _end(v.other_spread.low)
    rows.append((v.better, v.other, _where(v.at), *ends, v.result))
  return ReportTable(
    "Orderings, pair by pair (clocks as named)",
    ("lower", "than", "where", "highest", "lowest", "verdict"),
    rows,
    on_page_alone=True,
  )


def _tuned(found: Comparison) -> ReportTable:
  rows = []
  for entry in found.entries:
    values = [
      f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
      for name, value in entry.tuned.items()
    ]
    values += ["(end of the grid)"] if entry.at_edge else []
    budget = f"{entry.tuning_runs} x {entry.tuning_rounds}"
    rows.append((entry.name, " ".join(values), budget))
  header = ("method", "values", "runs x rounds")
  return ReportTable("Tuned values (no clock)", header, rows, found.tuning)


def _mean(spread: Spread) -> str:
  return "diverged" if math.isinf(spread.mean) else _end(spread.mean)


def _range(spread: Spread) -> str:
  ends = f"{_end(spread.low)}..{_end(spread.high)}"
  return ends if spread.losses else "-"


def _end(loss: float) -> str:
  """Formats a loss; NaN means that there is no loss."""
  return "-" if math.isnan(loss) else units.human_loss(loss)
