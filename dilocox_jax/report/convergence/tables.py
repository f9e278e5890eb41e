"""Makes the tables in the report of a convergence sweep.

The title of every table names the clock of its times, or says that the table
has no clock. The program computes the verdicts on orderings from the losses.
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
  MethodResult,
  human_seconds_to,
  mean_seconds_to,
  seed_seconds_to,
)
from dilocox_jax.report.spread import Spread


@dataclasses.dataclass(frozen=True)
class ReportTable:
  """One table of the report.

  Attributes:
    title: Title, which says what the table shows and on which clock.
    header: Names of the columns. The cells of the first column are text.
    rows: Texts of the cells, one sequence per row.
    notes: Sentences below the table.
    on_page_alone: Whether the table is on the page only and not printed in
      the terminal.
  """

  title: str
  header: Sequence[str]
  rows: Sequence[Sequence[str]]
  notes: Sequence[str] = ()
  on_page_alone: bool = False


def tables(comparison: Comparison) -> Iterator[ReportTable]:
  """Yields all tables in the order of the page."""
  yield _losses(comparison)
  yield _by_seed(comparison)
  for clock in comparison.clocks:
    yield _times(comparison, clock)
  for equal_time in comparison.equal_time:
    yield _equal_time(comparison, equal_time)
  yield _orderings(comparison)
  yield _pairs(comparison)
  yield _tuned(comparison)


def _losses(comparison: Comparison) -> ReportTable:
  rows = [
    (
      entry.name + units.human_missing(len(entry.traces), comparison.seeds),
      _mean(entry.spread),
      _gap(comparison, entry),
      units.human_bytes(entry.sent_bytes),
      f"{entry.interval}/{entry.overlap_steps}",
    )
    for entry in comparison.entries
  ]
  warm = [
    f"{entry.name} {entry.warm_start_steps:,} steps"
    for entry in comparison.entries
    if entry.warm_start_steps
  ]
  cut = [entry.name for entry in comparison.entries if not entry.ends_round]
  notes = [
    "The loss is the validation loss of the outer parameters after the flush"
    " (measured): mean over seeds ± its standard error. The gap compares the"
    " means over the seeds that both have; its standard error is that of the"
    " gaps of the seeds. Bytes are derived from the plan and include warm start"
    " and flush."
  ]
  notes += [
    text
    for entry in comparison.entries
    if (text := _baseline(comparison, entry))
  ]
  if warm:
    notes.append(f"Warm start: {', '.join(warm)}. The other methods have none.")
  if cut:
    notes.append(
      f"The last round was shorter than H, then flushed: {', '.join(cut)}."
    )
  return ReportTable(
    "At equal tokens (no clock)",
    ("method", "loss", "gap", "bytes", "H/tau"),
    rows,
    notes,
  )


def _baseline(comparison: Comparison, entry: MethodResult) -> str:
  """Says what a gap is to, and on which side an average is; "" if clear."""
  base = comparison.entry(entry.baseline)
  if base is None or entry.baseline == entry.name:
    return ""
  if entry.keeps_average and base.keeps_average:
    both = "the same inner optimizer and keeps an average of its parameters too"
    return f"The gap of {entry.name} is to {base.name}, which has {both}."
  if entry.keeps_average:
    return (
      f"The gap of {entry.name} is to {base.name}: {entry.name} is evaluated"
      f" on an average of its parameters and {base.name} is not."
    )
  if entry.baseline == comparison.entries[0].baseline:
    return ""
  return (
    f"The gap of {entry.name} is to {base.name}, which has the same inner"
    " optimizer."
  )


def _by_seed(comparison: Comparison) -> ReportTable:
  """Every loss, since a mean of three hides how far apart they are."""
  seeds = sorted({t.seed for e in comparison.entries for t in e.traces})
  rows = []
  for entry in comparison.entries:
    losses = {trace.seed: trace.loss for trace in entry.traces}
    cells = [
      units.human_loss(losses[seed]) if seed in losses else "-"
      for seed in seeds
    ]
    rows.append((entry.name, *cells))
  header = ("method", *(f"seed {seed}" for seed in seeds))
  title = "Loss of every seed (no clock)"
  return ReportTable(title, header, rows, on_page_alone=True)


def _times(comparison: Comparison, clock: str) -> ReportTable:
  target, description = comparison.target_loss, comparison.clocks[clock]
  rows = []
  for entry in comparison.entries:
    share = units.human_share(entry.utilisation.get(clock, math.nan))
    whole = units.human_time(entry.seconds.get(clock, math.nan))
    rows.append((entry.name, share, whole, _reached(entry, clock, target)))
  return ReportTable(
    f"Time on the clock '{clock}'",
    ("method", "utilisation", "whole run", f"to loss {target:g}"),
    rows,
    [
      f"Clock '{clock}': {description}. Times are simulated, losses are"
      " measured: mean over seeds ± its standard error. Between two evaluations"
      " the loss is taken to fall linearly."
    ],
  )


def _reached(entry: MethodResult, clock: str, target: float) -> str:
  """When a loss was reached, or by how many of the seeds with a curve."""
  if math.isinf(mean_seconds_to(entry, clock, target)):
    times_s = seed_seconds_to(entry, clock, target)
    count = sum(map(math.isfinite, times_s))
    return f"{count} of {len(times_s)} seeds" if count else "not reached"
  return human_seconds_to(entry, clock, target)


def _equal_time(comparison: Comparison, equal_time: EqualTime) -> ReportTable:
  clock, budget_s = equal_time.clock, equal_time.budget_s
  rows = []
  for timed in equal_time.methods:
    seeds = 0 if timed.is_too_few else comparison.seeds
    name = timed.name + units.human_missing(len(timed.losses), seeds)
    used = units.human_share(timed.used_s / budget_s)
    loss = "too few steps" if timed.is_too_few else _mean(timed.spread)
    rows.append((name, f"{timed.steps:,}", used, loss, _range(timed.spread)))
  return ReportTable(
    f"At equal time on the clock '{clock}',  {units.human_time(budget_s)}",
    ("method", "steps", "time used", "loss", "lowest..highest"),
    rows,
    [
      f"Clock '{clock}': {comparison.clocks[clock]}. Every method has as"
      " many inner steps as fit into the time (to a thousandth of it), and at"
      " most as many as at equal tokens. Its last round may be shorter than H,"
      " and its learning rate schedule ends at its own last step. Its settings"
      " are those tuned at equal tokens."
    ],
  )


def _where(at: str) -> str:
  return "equal tokens" if at == TOKENS else f"equal time on '{at}'"


def _orderings(comparison: Comparison) -> ReportTable:
  rows = []
  for claim in comparison.claims:
    verdict = orderings.summary([*orderings.claim_verdicts(comparison, claim)])
    text = f"{claim.better} < {', '.join(claim.than)}"
    rows.append((text, _where(claim.at), claim.source, verdict))
  for name, most in comparison.gaps.items():
    entry = comparison.entry(name)
    baseline = entry.baseline if entry else comparison.baseline
    claim = f"{name} at most {most:.1%} above {baseline}"
    verdict = orderings.bounded(comparison, name, most)
    rows.append((claim, "equal tokens", "ours", verdict))
  notes = [
    "A claim `a < b, c` holds if every seed of a ends lower than every seed of"
    " b and c, and no seed is missing. Gaps compare means, ± the standard error"
    " over the gaps of the seeds. The verdicts are computed from the losses."
  ]
  edges = [
    f"{entry.name} ({', '.join(entry.edges)})"
    for entry in comparison.entries
    if entry.edges
  ]
  if edges:
    notes.append(
      "The best value was the first or last that was tried, so a better one may"
      f" lie beyond: {'; '.join(edges)}. Outer step: rate / (1 - momentum)."
    )
  header = ("claim", "where", "said by", "verdict")
  return ReportTable("Orderings (clocks as named)", header, rows, notes)


def _pairs(comparison: Comparison) -> ReportTable:
  rows = []
  for v in orderings.verdicts(comparison):
    ends = _end(v.better_spread.high), _end(v.other_spread.low)
    rows.append((v.better, v.other, _where(v.at), *ends, v.result))
  return ReportTable(
    "Orderings, pair by pair (clocks as named)",
    ("lower", "than", "where", "highest", "lowest", "verdict"),
    rows,
    on_page_alone=True,
  )


def _tuned(comparison: Comparison) -> ReportTable:
  rows = []
  for entry in comparison.entries:
    values = [
      f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
      for name, value in entry.tuned.items()
    ]
    if entry.edges:
      values.append(f"(end of the grid: {', '.join(entry.edges)})")
    budget = f"{entry.tuning_runs} x {entry.tuning_rounds}"
    rows.append((entry.name, " ".join(values), budget))
  header = ("method", "values", "runs x rounds")
  return ReportTable("Tuned values (no clock)", header, rows, comparison.tuning)


def _mean(spread: Spread) -> str:
  if math.isinf(spread.mean):
    return "diverged"
  return _end(spread.mean, spread.standard_error)


def _gap(comparison: Comparison, entry: MethodResult) -> str:
  if entry.name == entry.baseline:
    return "+0.00 %"
  gap, error = comparison.gap(entry), comparison.gap_error(entry)
  return units.human_gap(gap, error)


def _range(spread: Spread) -> str:
  ends = f"{_end(spread.low)}..{_end(spread.high)}"
  return ends if spread.losses else "-"


def _end(loss: float, error: float = math.nan) -> str:
  """Returns the cell for a mean, lowest or highest loss; "-" for NaN."""
  return "-" if math.isnan(loss) else units.human_loss(loss, error)
