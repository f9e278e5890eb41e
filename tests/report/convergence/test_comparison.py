import math

import pytest

from dilocox_jax.report.convergence.comparison import (
  Trace,
  mean_seconds_to,
  seconds_to,
)
from tests.report import convergences


def test_a_gap_may_be_to_another_baseline():
  entries = [
    convergences.entry("allreduce", 1.0, 1.0),
    convergences.entry("muon", 0.8, 0.8),
    convergences.entry("muloco", 0.9, 0.9, baseline="muon"),
  ]
  found = convergences.comparison(entries=entries)
  assert [found.gap(entry) for entry in entries] == pytest.approx(
    [0, -0.2, 0.125]
  )


def test_the_gap_is_that_of_the_means_to_allreduce():
  found = convergences.comparison()
  gaps = {entry.name: found.gap(entry) for entry in found.entries}
  assert gaps["allreduce"] == 0
  assert gaps["diloco"] == pytest.approx(1.06 / 1.01 - 1)
  alone = convergences.comparison(entries=found.entries[1:])
  assert math.isnan(alone.gap(found.entries[1]))


def test_a_gap_is_over_the_seeds_that_both_have():
  # Seed 0 alone would put the method below AllReduce's mean of 2.5.
  entries = [
    convergences.entry("allreduce", 2.0, 3.0),
    convergences.entry("diloco", 2.2),
    convergences.entry("eager", 2.0, 3.3, 9.0),
    convergences.entry("dilocox"),
  ]
  found = convergences.comparison(entries=entries, seeds=3)
  gaps = [found.gap(entry) for entry in entries]
  assert gaps[:3] == pytest.approx([0, 0.1, 5.3 / 5 - 1])
  assert math.isnan(gaps[3])


def test_a_target_is_reached_between_two_evaluations():
  trace = convergences.trace(0, 1.0)
  before, after = trace.points[1], trace.points[2]
  middle = (before.loss + after.loss) / 2
  assert seconds_to(trace, "near", middle) == pytest.approx(0.5 * 25)
  assert seconds_to(trace, "large", middle) == pytest.approx(90 * 25)
  assert seconds_to(trace, "near", before.loss) == 0.5 * 20
  assert seconds_to(trace, "near", 99.0) == 0.5 * 10
  assert seconds_to(trace, "near", 0.9) == math.inf


def test_the_first_time_counts_where_a_curve_is_not_steady():
  points = [
    point.__class__(0, 0, loss, point.seconds)
    for point, loss in zip(
      convergences.trace(0, 1.0).points, (2.0, 1.0, 1.8, 0.5), strict=True
    )
  ]
  trace = Trace(0, 0.5, 0, points)
  assert seconds_to(trace, "near", 1.0) == 0.5 * 20
  assert 0.5 * 30 < seconds_to(trace, "near", 0.9) < 0.5 * 40


def test_hours_to_a_target_are_a_mean_that_needs_every_seed():
  entry = convergences.entry("a", 1.0, 1.1)
  each = [seconds_to(trace, "near", 1.2) for trace in entry.traces]
  mean = mean_seconds_to(entry, "near", 1.2)
  assert min(each) < mean < max(each) and mean == sum(each) / 2
  assert mean_seconds_to(entry, "near", 1.05) == math.inf
  assert math.isnan(mean_seconds_to(convergences.entry("b"), "near", 1.0))


def test_a_family_is_a_name_without_its_clock():
  here = convergences.entry("ours_near", 1.0, clock="near")
  assert here.family == "ours"
  assert convergences.entry("diloco_cold", 1.0).family == "diloco_cold"
  assert here.is_on("near") and here.is_on("") and not here.is_on("large")
