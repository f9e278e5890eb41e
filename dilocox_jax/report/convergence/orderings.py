"""Whether an ordering holds, worked out from the losses of the seeds.

One method is below another only if its highest loss is below the other's
lowest. Anything less is called an overlap, so that no sentence of a report
rests on an average of three numbers.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from dilocox_jax.report import units
from dilocox_jax.report.convergence.comparison import TOKENS, Comparison, Spread

HOLDS, REVERSED, OVERLAP = "holds", "reversed", "spreads overlap"
DIVERGED, TOO_FEW = "diverged", "too few steps"
SEEDS, MISSING = "seeds missing", "not run"
# What keeps a claim from holding, the worst first.
_AGAINST = (REVERSED, OVERLAP, DIVERGED, TOO_FEW, SEEDS, MISSING)


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What became of a claim about two methods.

  Attributes:
    better: Method that should end lower.
    other: Method that should end higher.
    at: `TOKENS`, or a clock.
    source: Who says so.
    result: One of the words above.
    better_spread: Losses of the one.
    other_spread: Losses of the other.
  """

  better: str
  other: str
  at: str
  source: str
  result: str
  better_spread: Spread
  other_spread: Spread


def compared(better: Spread, other: Spread, seeds: int) -> str:
  """Says how two spreads lie.

  Args:
    better: Should be lower.
    other: Should be higher.
    seeds: How many each should have.
  """
  if not better.losses or not other.losses:
    return MISSING
  if {len(better.losses), len(other.losses)} != {seeds}:
    return SEEDS
  # To win against one that diverged says nothing of an ordering.
  if not (math.isfinite(better.mean) and math.isfinite(other.mean)):
    return DIVERGED
  if better.high < other.low:
    return HOLDS
  return REVERSED if better.low > other.high else OVERLAP


def verdicts(found: Comparison) -> Iterator[Verdict]:
  """Every pair of every claim.

  Args:
    found: The results.
  """
  for claim in found.claims:
    spreads, few = _at(found, claim.at)
    better = spreads.get(claim.better, Spread(()))
    for name in claim.than:
      other = spreads.get(name, Spread(()))
      result = compared(better, other, found.seeds)
      if {claim.better, name} & few:
        result = TOO_FEW
      yield Verdict(
        *(claim.better, name, claim.at, claim.source), result, better, other
      )


def _at(found: Comparison, at: str) -> tuple[dict[str, Spread], set[str]]:
  """Losses by method, and the methods that could not be trained."""
  if at == TOKENS:
    return {entry.name: entry.spread for entry in found.entries}, set()
  for each in found.equal_time:
    if each.clock == at:
      spreads = {timed.name: timed.spread for timed in each.methods}
      few = {timed.name for timed in each.methods if timed.is_too_few}
      return spreads, few
  return {}, set()


def summary(found: Sequence[Verdict]) -> str:
  """Whether a claim holds against all it names, or against whom it does not.

  Args:
    found: The verdicts of one claim.
  """
  against = [
    f"{word}: {', '.join(names)}"
    for word in _AGAINST
    if (names := [v.other for v in found if v.result == word])
  ]
  return "; ".join(against) or HOLDS


def bounded(found: Comparison, name: str, most: float) -> str:
  """Whether a method's gap to AllReduce keeps a bound, and the gap.

  Args:
    found: The results.
    name: Of the method.
    most: The bound (share of AllReduce's loss).
  """
  by_name = {entry.name: entry for entry in found.entries}
  gap = found.gap(by_name[name]) if name in by_name else math.nan
  if math.isnan(gap):
    return MISSING
  counts = {
    len(by_name[each].traces) for each in (name, by_name[name].baseline)
  }
  if counts != {found.seeds}:
    return SEEDS
  by_seed = [units.human_gap(each) for each in found.seed_gaps(by_name[name])]
  return (
    f"{HOLDS if gap <= most else 'exceeded'} ({units.human_gap(gap)}; by seed"
    f" {by_seed[0]} to {by_seed[-1]})"
  )
