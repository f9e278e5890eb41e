"""Searches for the best learning rates of a setting.

The rates lie on a grid, in which a rate is the square root of two times the
next lower one. A *point* of the grid is an inner and an outer rate. The search
begins at the best point of a similar finished setting, if there is one. It goes
on until all neighbors of the best point are trained. Then other seeds are
trained with the best rates. Their losses are the results, because the losses by
which rates are chosen are too low on average.
"""

import dataclasses
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from experiments.gaps.rows import GapRow
from experiments.gaps.settings import Rates, Run, Setting

TUNING_SEEDS = (1000, 1001, 1002)  # Seeds by whose mean loss rates are chosen.
RESULT_SEEDS = (0, 1, 2)  # Seeds that are trained with the best rates.
# Inner rate of the point (0, 0). The outer rate of this point is 1.
_FIRST_INNER = 0.02
_RATIO = 2**0.5  # Ratio of neighboring rates.
_FIRST_POINTS = {  # Inner coordinate of the first point, by size of the model.
  "5k": 2,
  "26k": 1,
  "59k": 0,
  "131k": -1,
  "857k": -4,
  "2300k": -5,
  "10000k": -7,
}
# A point and its neighbors (steps of the inner and the outer coordinate), for
# methods with an outer step. An outer rate that is twice as high goes well with
# half the inner rate, so two diagonal neighbors are tried, too.
_BOTH_STEPS = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1))
# The same for AllReduce, which has no outer rate.
_INNER_STEPS = ((0, 0), (1, 0), (-1, 0))
# Number of points that a setting needs as a rule, to estimate the time.
_USUAL_POINTS_ALLREDUCE = 4
_USUAL_POINTS_OTHERS = 9


Choice = TypeVar("Choice", bound=Hashable)


class Point(NamedTuple):
  """A point of the grid of rates.

  Attributes:
    inner: A number p. The inner rate of the point is 0.02 * 2^(p / 2).
    outer: A number q. The outer rate of the point is 2^(q / 2).
  """

  inner: int
  outer: int


class Missing(NamedTuple):
  """The runs that a setting still needs.

  Attributes:
    runs: The runs to train next; empty if the setting is finished.
    num_later: Estimated number of further runs, after those in `runs`.
  """

  runs: list[Run]
  num_later: int


def missing_runs(
  setting: Setting, results: Sequence[GapRow], start: Point | None = None
) -> Missing:
  """Returns the runs that a setting needs next.

  At first these are runs with the tuning seeds, at the best rates so far and at
  their neighbors on the grid. Rates are chosen by the losses of these runs.
  Once all of them are finished, runs with the result seeds come next, at the
  best rates only.

  Args:
    setting: Setting whose rates are searched.
    results: Finished runs of the setting.
    start: The point at which the search begins. It is not read once a point is
      finished on all tuning seeds without divergence. None: the usual first
      point for the size of the model.
  """
  center = best_point(setting, results) or start or _first_point(setting)
  done = {(_point(setting, result), result.seed) for result in results}
  tuning_runs = [
    (point, seed)
    for point in _neighborhood(setting, center)
    for seed in TUNING_SEEDS
  ]
  missing = [run for run in tuning_runs if run not in done]
  if missing:
    # The search may go on after these runs: a usual number of runs is assumed.
    num_others = _usual_number(setting) - len(done) - len(missing)
    num_later = max(num_others, 0)
  else:
    result_runs = [(center, seed) for seed in RESULT_SEEDS]
    missing = [run for run in result_runs if run not in done]
    num_later = 0  # The result runs are the last ones.
  return Missing(
    runs=[Run(_rates(setting, point), seed) for point, seed in missing],
    num_later=num_later,
  )


def start_point(
  setting: Setting, rows_by_setting: Mapping[Setting, Sequence[GapRow]]
) -> Point | None:
  """Returns the point at which the search for a setting's best rates begins.

  It is the best point of the most similar finished setting. None: there is no
  such setting, or no point of it is finished without divergence. Only settings
  of the same model size count. For AllReduce only settings of AllReduce count,
  and for replicas only settings of replicas.
  """
  points = {
    other: best_point(other, results)
    for other, results in rows_by_setting.items()
    if other != setting
    and other.size == setting.size
    and other.is_allreduce == setting.is_allreduce
    and not missing_runs(other, results).runs
  }
  if not points:
    return None
  return points[min(points, key=lambda other: _distance(setting, other))]


def best_point(setting: Setting, results: Iterable[GapRow]) -> Point | None:
  """Returns the point of the grid of rates with the lowest mean loss.

  The mean is over the tuning seeds. A point counts only if it is finished on
  all of these seeds without divergence. None if no point counts.
  """
  return lowest_mean(
    (
      (_point(setting, result), result.seed, result.loss_average)
      for result in results
    ),
    TUNING_SEEDS,
  )


def lowest_mean(
  losses: Iterable[tuple[Choice, int, float]], seeds: Collection[int]
) -> Choice | None:
  """Returns the choice with the lowest mean loss over some seeds.

  A choice counts only if it is finished on all seeds without divergence. None
  if no choice counts.

  Args:
    losses: For each finished run its choice (such as a pair of rates), its seed
      and its loss. The loss of a run that diverged is not finite.
    seeds: The seeds. Runs of other seeds are left out.
  """
  by_choice: dict[Choice, dict[int, float]] = {}
  for choice, seed, loss in losses:
    if seed in seeds:
      by_choice.setdefault(choice, {})[seed] = loss
  means: dict[Choice, float] = {}
  for choice, losses_by_seed in by_choice.items():
    mean = float(np.mean(list(losses_by_seed.values())))
    if len(losses_by_seed) == len(seeds) and np.isfinite(mean):
      means[choice] = mean
  return min(means, key=means.__getitem__) if means else None


def best_rates(setting: Setting, results: Iterable[GapRow]) -> Rates | None:
  """Returns the rates with the lowest mean loss over the tuning seeds.

  None if no rates are finished on all of these seeds without divergence.
  """
  point = best_point(setting, results)
  return None if point is None else _rates(setting, point)


def _distance(setting: Setting, other: Setting) -> float:
  """Returns by how many doublings the numbers of two settings differ, summed.

  For example, H = 16 and H = 32 differ by about one doubling.
  """
  # One is added to each number, because some are 0.
  numbers = [
    (value, getattr(other, field))
    for field, value in dataclasses.asdict(setting).items()
    if isinstance(value, int | float)
  ]
  return sum(abs(math.log2((1 + mine) / (1 + its))) for mine, its in numbers)


def _usual_number(setting: Setting) -> int:
  """Returns how many runs a setting usually needs, for rates and results."""
  num_points = _USUAL_POINTS_OTHERS
  if setting.is_allreduce:
    num_points = _USUAL_POINTS_ALLREDUCE
  return num_points * len(TUNING_SEEDS) + len(RESULT_SEEDS)


def _first_point(setting: Setting) -> Point:
  """Returns where the search begins if no similar setting is finished.

  The outer rate is 1 for one replica with an outer step, otherwise a grid step
  higher.
  """
  is_single_diloco = setting.replicas == 1 and not setting.is_allreduce
  return Point(
    inner=_FIRST_POINTS[setting.size], outer=0 if is_single_diloco else 1
  )


def _neighborhood(setting: Setting, center: Point) -> list[Point]:
  """Returns a point of the grid and its neighbors.

  For AllReduce, the neighbors differ in the inner rate only.
  """
  steps = _INNER_STEPS if setting.is_allreduce else _BOTH_STEPS
  return [
    Point(center.inner + inner, center.outer + outer) for inner, outer in steps
  ]


def _rates(setting: Setting, point: Point) -> Rates:
  """Returns the rates of a point of the grid, with three significant digits.

  AllReduce has the outer rate 0.
  """
  inner = _rounded(_FIRST_INNER * _RATIO**point.inner)
  if setting.is_allreduce:
    return Rates(inner)
  return Rates(inner, outer=_rounded(_RATIO**point.outer))


def _point(setting: Setting, result: GapRow) -> Point:
  """Returns the point of the grid that has the learning rates of a run.

  Points of AllReduce have the outer coordinate of its first point.
  """
  inner = round(np.log(result.inner_rate / _FIRST_INNER) / np.log(_RATIO))
  if setting.is_allreduce:
    return Point(inner, _first_point(setting).outer)
  return Point(inner, round(np.log(result.outer_rate) / np.log(_RATIO)))


def _rounded(rate: float) -> float:
  """Rounds a rate to three significant digits."""
  return float(f"{rate:.3g}")
