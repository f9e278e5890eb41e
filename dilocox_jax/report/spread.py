"""Losses of one method or setting over its seeds, and what dominates what.

A mean of three seeds without its spread invites readers to believe noise, so
every report keeps the two together. Sweeps and ablations share this module.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable


@dataclasses.dataclass(frozen=True)
class Spread:
  """Final losses of several seeds.

  Attributes:
    losses: One loss (nats a token) per seed; NaN for a seed that diverged.
  """

  losses: tuple[float, ...]

  @property
  def mean(self) -> float:
    """Mean over seeds; infinity if a seed diverged, NaN without seeds."""
    if not self.losses:
      return math.nan
    return statistics.fmean(self._with_infinity)

  @property
  def low(self) -> float:
    """Lowest loss; NaN without seeds."""
    return min(self._with_infinity, default=math.nan)

  @property
  def high(self) -> float:
    """Highest loss; infinity if a seed diverged, NaN without seeds."""
    return max(self._with_infinity, default=math.nan)

  @property
  def standard_error(self) -> float:
    """Standard error of the mean; NaN with fewer than two finite seeds."""
    return standard_error(self.losses)

  @property
  def _with_infinity(self) -> list[float]:
    # min() and max() are wrong with NaN, so a diverged seed counts as infinity.
    return [x if math.isfinite(x) else math.inf for x in self.losses]


def standard_error(values: Sequence[float]) -> float:
  """Returns the standard error of a mean, one value a seed.

  Args:
    values: The values; the result is NaN if they are fewer than two, or if one
      is not finite.
  """
  if len(values) < 2 or not all(map(math.isfinite, values)):
    return math.nan
  return statistics.stdev(values) / math.sqrt(len(values))


@runtime_checkable
class Priced(Protocol):
  """Result that has a loss and a number of bytes."""

  @property
  def spread(self) -> Spread:
    """Final losses."""
    ...

  @property
  def sent_bytes(self) -> float:
    """Bytes that one replica sent."""
    ...


P = TypeVar("P", bound=Priced)
_NEAR = 0.1  # A loss at most a tenth above the baseline's counts as near it.


def cheapest(
  gaps: Mapping[str, float], sent_bytes: Mapping[str, float | int]
) -> str:
  """Returns the name of what sends least, or "" if there is nothing.

  Those whose loss is at most a tenth above the baseline's are preferred.

  Args:
    gaps: Loss / loss of the baseline - 1 of everything that is compared with
      the baseline, by name. Entries that are not finite are left out.
    sent_bytes: Bytes that one replica sent, by name.
  """
  finite = [name for name, gap in gaps.items() if math.isfinite(gap)]
  near = [name for name in finite if gaps[name] <= _NEAR]
  return min(near or finite, key=sent_bytes.__getitem__, default="")


def pareto_front(results: Sequence[P]) -> list[P]:
  """Returns the results that no other result beats in both loss and bytes.

  Args:
    results: Results on one corpus. Diverged ones are never on the front.

  Returns:
    The front, fewest bytes first, so losses fall along it.
  """
  front: list[P] = []
  finite = [result for result in results if math.isfinite(result.spread.mean)]
  for result in sorted(finite, key=lambda r: (r.sent_bytes, r.spread.mean)):
    # All results before this one sent at most as much. It is on the front
    # only if it ends lower than the best of them.
    if not front or result.spread.mean < front[-1].spread.mean:
      front.append(result)
  return front
