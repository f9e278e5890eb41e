"""Verdicts on orderings, computed from the losses of the seeds.

One method is below another only if its highest loss is below the lowest loss
of the other. Everything else is an overlap, so that no sentence of a report
rests on a mean of three numbers. Example: (1.0, 1.2) against (1.1, 1.3) is an
overlap although the means differ by 0.1.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from dilocox_jax.report import units
from dilocox_jax.report.convergence.comparison import TOKENS, Claim, Comparison
from dilocox_jax.report.spread import Spread

HOLDS, REVERSED, OVERLAP = "holds", "reversed", "spreads overlap"
DIVERGED, TOO_FEW = "diverged", "too few steps"
SEEDS, MISSING = "seeds missing", "not run"
# Reasons why a claim does not hold, the worst first.
_AGAINST = (REVERSED, OVERLAP, DIVERGED, TOO_FEW, SEEDS, MISSING)


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Verdict on one pair of methods.

  Attributes:
    better: Method that should end lower.
    other: Method that should end higher.
    at: `TOKENS`, or the clock on which both had equal time.
    source: Paper or people who claim the ordering.
    result: One of the words above, e.g. `HOLDS`.
    better_spread: Losses of `better`.
    other_spread: Losses of `other`.
  """

  better: str
  other: str
  at: str
  source: str
  result: str
  better_spread: Spread
  other_spread: Spread


def compared(better: Spread, other: Spread, seeds: int) -> str:
  """Returns the verdict on two spreads.

  Args:
    better: Losses of the method that should end lower.
    other: Losses of the method that should end higher.
    seeds: Number of seeds that each should have.
  """
  if not better.losses or not other.losses:
    return MISSING
  if {len(better.losses), len(other.losses)} != {seeds}:
    return SEEDS
  # Ending below a method that diverged says nothing about an ordering.
  if not (math.isfinite(better.mean) and math.isfinite(other.mean)):
    return DIVERGED
  if better.high < other.low:
    return HOLDS
  return REVERSED if better.low > other.high else OVERLAP


def verdicts(found: Comparison) -> Iterator[Verdict]:
  """Yields the verdict on every pair of every claim."""
  for claim in found.claims:
    yield from claim_verdicts(found, claim)


def claim_verdicts(found: Comparison, claim: Claim) -> Iterator[Verdict]:
  """Yields the verdict on every pair of one claim."""
  spreads, few = _at(found, claim.at)
  better = spreads.get(claim.better, Spread(()))
  for name in claim.than:
    other = spreads.get(name, Spread(()))
    result = compared(better, other, found.seeds)
    if {claim.better, name} & few:
      result = TOO_FEW
    pair = (claim.better, name, claim.at, claim.source)
    yield Verdict(*pair, result, better, other)


def _at(found: Comparison, at: str) -> tuple[dict[str, Spread], set[str]]:
  """Returns losses by method, and the methods with too few steps to train."""
  if at == TOKENS:
    return {entry.name: entry.spread for entry in found.entries}, set()
  for each in found.equal_time:
    if each.clock == at:
      spreads = {timed.name: timed.spread for timed in each.methods}
      few = {timed.name for timed in each.methods if timed.is_too_few}
      return spreads, few
  return {}, set()


def summary(found: Sequence[Verdict]) -> str:
  """Says whether a claim holds, or against which methods it does not.

  Args:
    found: Verdicts on the pairs of one claim.
  """
  against = [
    f"{word}: {', '.join(dict.fromkeys(names))}"
    for word in _AGAINST
    if (names := [_named(v) for v in found if v.result == word])
  ]
  return "; ".join(against) or HOLDS


def _named(verdict: Verdict) -> str:
  """Returns the method that a verdict names, the one that lacks runs if any."""
  lacks = len(verdict.better_spread.losses) < len(verdict.other_spread.losses)
  if verdict.result in (SEEDS, MISSING) and lacks:
    return verdict.better
  return verdict.other


def bounded(found: Comparison, name: str, most: float) -> str:
  """Says whether a method's gap to AllReduce is within a bound, and the gap.

  Args:
    found: Results of the sweep.
    name: Name of the method.
    most: Largest gap that is expected (share of AllReduce's loss).
  """
  entry = found.entry(name)
  base = found.entry(entry.baseline) if entry else None
  if not entry or not base or not entry.traces or not base.traces:
    return MISSING
  if {len(entry.traces), len(base.traces)} != {found.seeds}:
    return SEEDS
  gap = found.gap(entry)
  if math.isnan(gap):  # AllReduce diverged.
    return DIVERGED
  by_seed = [units.human_gap(seed_gap) for seed_gap in found.seed_gaps(entry)]
  mean = units.human_gap(gap, found.gap_error(entry))
  return (
    f"{HOLDS if gap <= most else 'exceeded'} ({mean}; by seed"
    f" {by_seed[0]} to {by_seed[-1]})"
  )
