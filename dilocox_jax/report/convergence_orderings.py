"""Whether an ordering holds, worked out from the losses of the seeds.

One method is below another only if its highest loss is below the other's
lowest. Anything less is called an overlap, so that no sentence of a report
rests on an average of three numbers.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from dilocox_jax.report.convergence import TOKENS, Comparison, Spread

HOLDS, REVERSED, OVERLAP = "holds", "reversed", "spreads overlap"
MISSING, TOO_FEW = "not run", "too few steps"


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What became of a claim about two methods.

  Attributes:
    better: Method that should end lower.
    other: Method that should end higher.
    at: `TOKENS`, or a clock.
    result: One of the words above.
    better_spread: Losses of the one.
    other_spread: Losses of the other.
    is_complete: Whether both have all their seeds.
  """

  better: str
  other: str
  at: str
  result: str
  better_spread: Spread
  other_spread: Spread
  is_complete: bool


def compared(better: Spread, other: Spread) -> str:
  """Says how two spreads lie.

  Args:
    better: Should be lower; a seed that diverged counts as infinitely high.
    other: Should be higher.
  """
  if not better.losses or not other.losses:
    return MISSING
  if better.high < other.low:
    return HOLDS
  if better.low > other.high:
    return REVERSED
  return OVERLAP


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
      counts = {len(better.losses), len(other.losses)}
      result = compared(better, other)
      if {claim.better, name} & few:
        result = TOO_FEW
      yield Verdict(
        claim.better,
        name,
        claim.at,
        result,
        better,
        other,
        counts == {found.seeds},
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
  """Whether a claim holds against all it names.

  Args:
    found: The verdicts of one claim.
  """
  if all(v.result == HOLDS and v.is_complete for v in found):
    return HOLDS
  if any(v.result == REVERSED for v in found):
    return REVERSED
  if any(v.result == OVERLAP for v in found):
    return OVERLAP
  if any(v.result == TOO_FEW for v in found):
    return TOO_FEW
  return MISSING if any(v.result == MISSING for v in found) else "seeds missing"


def bounded(gap: float, most: float) -> str:
  """Whether a gap keeps a bound.

  Args:
    gap: Share of AllReduce's loss; NaN if not known.
    most: The bound.
  """
  if math.isnan(gap):
    return MISSING
  return HOLDS if gap <= most else "exceeded"
