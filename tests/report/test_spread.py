import dataclasses
import math

import pytest

from dilocox_jax.report.spread import Spread, cheapest, pareto_front


@dataclasses.dataclass(frozen=True)
class Result:
  name: str
  sent_bytes: float
  spread: Spread


def entry(name, sent_bytes, *losses):
  return Result(name, sent_bytes, Spread(losses))


def test_a_loss_is_the_mean_of_its_seeds_between_lowest_and_highest():
  spread = Spread((1.5, 1.0, 1.1))
  assert spread.mean == pytest.approx(1.2)
  assert (spread.low, spread.high) == (1.0, 1.5)
  assert math.isnan(Spread(()).mean) and math.isnan(Spread(()).high)


def test_a_seed_that_diverged_is_infinitely_high():
  spread = Spread((1.5, math.nan))
  assert spread.mean == spread.high == math.inf and spread.low == 1.5


def test_the_standard_error_needs_two_seeds_that_ended():
  # Deviation of (1, 2, 3) is 1; its standard error is 1 / sqrt(3).
  assert Spread((1.0, 2.0, 3.0)).standard_error == pytest.approx(3**-0.5)
  assert math.isnan(Spread((1.0,)).standard_error)
  assert math.isnan(Spread((1.0, math.nan, 2.0)).standard_error)


def test_the_front_has_what_nothing_beats_in_both():
  found = [
    entry("cheap", 10, 3.0),
    entry("as cheap and worse", 10, 3.1),
    entry("dear and no better", 20, 3.0),
    entry("middle", 30, 2.5),
    entry("beaten", 40, 2.6),
    entry("best", 50, 2.0),
  ]
  for order in (found, found[::-1]):
    names = [each.name for each in pareto_front(order)]
    assert names == ["cheap", "middle", "best"]


def test_a_loss_that_is_not_finite_is_on_no_front():
  nan = entry("nan", 1, math.nan)
  good = entry("good", 2, 2.0)
  assert pareto_front([nan, good]) == [good]
  assert pareto_front([good, nan]) == [good]


def test_the_cheapest_is_sought_among_those_near_the_baseline():
  sent_bytes = {"near": 20, "far": 10, "lost": 1}
  gaps = {"near": 0.05, "far": 0.5, "lost": math.nan}
  assert cheapest(gaps, sent_bytes) == "near"
  assert cheapest({"far": 0.5, "lost": math.nan}, sent_bytes) == "far"
  assert cheapest({}, sent_bytes) == ""
