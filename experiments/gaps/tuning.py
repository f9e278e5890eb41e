"""Chooses the rates of a setting so that the best ones are not at an end.

Rates lie on a grid whose neighbors differ by the square root of two. The
search begins with a point and its neighbors, and goes on until the best point
has all of its neighbors. Then other seeds are trained at this point.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.gaps.rows import GapRow
from experiments.gaps.settings import Rates, Run, Setting

TUNING_SEEDS = 1000, 1001, 1002
RESULT_SEEDS = 0, 1, 2
_FIRST_INNER = 0.02  # Inner rate of the point (0, 0).
_RATIO = 2**0.5
_FIRST_POINTS = {  # Inner coordinate of the first point, by size.
  "5k": 2,
  "26k": 1,
  "59k": 0,
  "131k": -1,
  "857k": -4,
  "2300k": -5,
  "10000k": -7,
}
# An outer rate that is twice as high goes well with half the inner rate, so
# two diagonal neighbors are tried too.
_BOTH_STEPS = (0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1)
_INNER_STEPS = (0, 0), (1, 0), (-1, 0)
# Points that a setting needs as a rule (AllReduce, others), for plans of time.
_USUAL_POINTS = 4, 9


class Point(NamedTuple):
  """A point of the grid of rates."""

  inner: int
  outer: int


class Missing(NamedTuple):
  """What is to be trained next of a setting.

  Attributes:
    runs: The next runs; empty if the setting is finished.
    num_later: Runs that will probably follow them.
  """

  runs: list[Run]
  num_later: int


def missing_runs(setting: Setting, results: Sequence[GapRow]) -> Missing:
  """Returns the runs that a setting needs next.

  Args:
    setting: The setting.
    results: Its finished runs.
  """
  best = best_point(setting, results)
  center = _first_point(setting) if best is None else best
  done = {(_point(setting, each), each.seed) for each in results}
  wanted = [
    (point, seed)
    for point in _neighborhood(setting, center)
    for seed in TUNING_SEEDS
  ]
  runs = [key for key in wanted if key not in done]
  num_left = _usual_number(setting) - len(done)
  if not runs:
    runs = [(center, s) for s in RESULT_SEEDS if (center, s) not in done]
    num_left = len(runs)
  return Missing(
    runs=[Run(_rates(setting, point), seed) for point, seed in runs],
    num_later=max(num_left - len(runs), 0),
  )


def best_point(setting: Setting, results: Iterable[GapRow]) -> Point | None:
  """Returns the point with the lowest mean loss over the tuning seeds.

  Only points count that have all tuning seeds; None if there is none.

  Args:
    setting: The setting.
    results: Its finished runs.
  """
  losses: dict[Point, dict[int, float]] = {}
  for each in results:
    if each.seed in TUNING_SEEDS:
      by_seed = losses.setdefault(_point(setting, each), {})
      by_seed[each.seed] = each.loss_average
  means = {
    point: float(np.mean(list(by_seed.values())))
    for point, by_seed in losses.items()
    if len(by_seed) == len(TUNING_SEEDS)
  }
  finite = {point: mean for point, mean in means.items() if np.isfinite(mean)}
  if not finite:
    return None
  return min(finite, key=lambda point: finite[point])


def best_rates(setting: Setting, results: Iterable[GapRow]) -> Rates | None:
  """Returns the rates of the best point; None if there is none yet.

  Args:
    setting: The setting.
    results: Its finished runs.
  """
  point = best_point(setting, results)
  return None if point is None else _rates(setting, point)


def _usual_number(setting: Setting) -> int:
  """Returns how many runs a setting usually needs."""
  allreduce, others = _USUAL_POINTS
  num_points = allreduce if setting.is_allreduce else others
  return num_points * len(TUNING_SEEDS) + len(RESULT_SEEDS)


def _first_point(setting: Setting) -> Point:
  has_others = setting.replicas > 1 or setting.is_allreduce
  return Point(_FIRST_POINTS[setting.size], int(has_others))


def _neighborhood(setting: Setting, center: Point) -> list[Point]:
  """Returns a point and those that must be worse for it to be the best."""
  steps = _INNER_STEPS if setting.is_allreduce else _BOTH_STEPS
  return [
    Point(center.inner + inner, center.outer + outer) for inner, outer in steps
  ]


def _rates(setting: Setting, point: Point) -> Rates:
  """Returns the rates of a point, with three significant digits."""
  inner = _rounded(_FIRST_INNER * _RATIO**point.inner)
  outer = 0.0 if setting.is_allreduce else _rounded(_RATIO**point.outer)
  return Rates(inner, outer)


def _point(setting: Setting, result: GapRow) -> Point:
  """Reverses `_rates`."""
  inner = round(np.log(result.inner_rate / _FIRST_INNER) / np.log(_RATIO))
  if setting.is_allreduce:
    return Point(inner, _first_point(setting).outer)
  return Point(inner, round(np.log(result.outer_rate) / np.log(_RATIO)))


def _rounded(rate: float) -> float:
  return float(f"{rate:.3g}")
