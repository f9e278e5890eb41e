import itertools

import pytest

from experiments.benchmarks import ratios

BOUND = 3.6


@pytest.fixture
def clock(monkeypatch):
  """A clock that only moves when a program says how long it took."""
  now = [0.0]
  monkeypatch.setattr(ratios.time, "perf_counter", lambda: now[0])

  def takes(*seconds):
    durations = itertools.cycle(seconds)

    def run():
      now[0] += next(durations)

    return run

  return takes


def measured(clock, slow, fast, scale=1.0):
  ratio = ratios.Ratio("made up", clock(*slow), clock(*fast), BOUND, scale)
  return ratios.measure_ratio(ratio, 3)


def test_a_ratio_is_the_median_of_paired_times(clock):
  # The first call of each compiles; the pairs are then 4/2, 9/3 and 2/2.
  row = measured(clock, (50.0, 4.0, 9.0, 2.0), (60.0, 2.0, 3.0, 2.0))
  assert (row["min"], row["median"], row["max"]) == (1.0, 2.0, 3.0)
  assert row["measured_s"] == 4.0 and row["baseline_s"] == 2.0


def test_a_ratio_is_divided_by_its_scale(clock):
  assert measured(clock, (8.0,), (2.0,), scale=4.0)["median"] == 1.0


def test_a_ratio_above_its_bound_is_reported_as_such(clock):
  assert measured(clock, (BOUND,), (1.0,))["is_within_bound"]
  assert not measured(clock, (BOUND + 0.01,), (1.0,))["is_within_bound"]
