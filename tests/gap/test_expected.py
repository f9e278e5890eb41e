"""The expected gap, beside numbers that are computed by hand."""

import dataclasses
import math
from typing import Any
from unittest import mock

import pytest

import dilocox_jax as dx
from dilocox_jax.gap import expected
from dilocox_jax.gap.gain import (
  SizeGain,
  extended_gain,
  gain_of_losses,
  gain_of_size,
  with_error,
)
from dilocox_jax.gap.law import Estimate, Law, Line, law

EXACT = Estimate(1.0, 1.0, 1.0)
LINE = Line(
  name="by hand",
  parameters=1000,
  steps=500,
  sync_interval=16,
  doublings="last",
  slope=0.7,
  slope_error=0.0,
  offset=0.4,
  offset_error=0.0,
  correlation=0.0,
  kind="fitted",
  source="",
)
LAW = Law(
  lines=(LINE,),
  interval_power=Estimate(0.5, 0.5, 0.5),
  interval_range=(4, 32),
  most_replicas=8,
  length_power=-0.5,
  factors={"diloco": EXACT, "slow": Estimate(2.0, 1.6, 3.0)},
  unmeasured_factor=Estimate(1.5, 1.0, 2.0),
  diloco_log_gap=0.2,
  seed_share=0.1,
  seed_most=0.01,
  size_gain={
    "parameters": 1e6,
    "value": 0.02,
    "power": 0.5,
    "most": 0.1,
    "factor": 2.0,
  },
)


def gap(constants=LAW, **arguments):
  given: dict[str, Any] = {
    "gain": 0.1,
    "num_replicas": 4,
    "sync_interval": 16,
    **arguments,
  }
  with mock.patch.object(expected, "law", return_value=constants):
    return dx.expected_gap(**given)


def test_the_gap_of_four_replicas_by_hand():
  found = gap()
  # 0.7 * 2 - 0.4 doublings, each of which multiplies the loss by 1 / 0.9.
  assert found.doublings.value == pytest.approx(1.0)
  assert found.gap == pytest.approx(1 / 0.9 - 1)
  # Nothing has an error here.
  assert (found.low, found.high) == pytest.approx((found.gap, found.gap))
  assert found.notes == ()
  assert gap(num_replicas=8).gap == pytest.approx(0.9**-1.7 - 1)
  # With s = 0 the batch does not matter, so replicas lose nothing.
  assert gap(gain=0).gap == 0


def test_two_losses_are_s():
  # 1 - 1.8 / 2 = 0.1.
  found = dx.expected_gap([2.0, 1.8], num_replicas=4)
  assert found.gain.value == pytest.approx(0.1)
  assert found.gap == pytest.approx(
    dx.expected_gap(gain=0.1, num_replicas=4).gap
  )
  # s has an error, so the range is wider than that of an exact s.
  exact = dx.expected_gap(gain=0.1, num_replicas=4)
  assert found.low < exact.low and found.high > exact.high


def test_more_local_steps_lose_more_by_the_power_of_h():
  assert gap(sync_interval=64).doublings.value == pytest.approx(2.0)
  assert gap(sync_interval=4).doublings.value == pytest.approx(0.5)
  uncertain = dataclasses.replace(LAW, interval_power=Estimate(0.5, 0.25, 0.75))
  same = gap(uncertain)
  assert same.doublings.low == same.doublings.high  # H is that of the line.
  other = gap(uncertain, sync_interval=64).doublings
  # A power of 0.75 in place of 0.5 gives 4^0.25 times as many.
  assert other.high == pytest.approx(2 * math.sqrt(2))


def test_a_method_has_its_factor_and_the_range_of_it():
  slow = gap(method="slow").doublings
  assert (slow.value, slow.low, slow.high) == pytest.approx((2, 1.6, 3))
  unknown = gap(method="mine")
  assert unknown.doublings.value == pytest.approx(1.5)
  assert unknown.notes == ("The gap of mine was not measured.",)


def test_what_a_method_adds_may_shrink_with_s_or_stay():
  found = gap(method="slow", gain=0.01)
  # Twice the doublings of DiLoCo, or its one doubling and a logarithm of 0.2.
  doubling = -math.log(0.99)
  shrinks, stays = 2 * doubling, doubling + 0.2
  assert math.log1p(found.gap) == pytest.approx((shrinks + stays) / 2)
  assert math.log1p(found.low) == pytest.approx(1.6 * doubling)
  assert math.log1p(found.high) == pytest.approx(doubling + 2 * 0.2)
  # A larger batch helps nothing here, but the codec still loses.
  assert gap(method="slow", gain=0).gap > 0


def test_published_gaps_of_dilocox_lie_in_the_range():
  """OPT-1.3B and 107B, two replicas with H = 125 (arXiv 2506.21263)."""
  for parameters, published in ((1.3e9, 0.052), (107e9, 0.077)):
    found = dx.expected_gap(
      gain=gain_of_size(parameters),
      num_replicas=2,
      sync_interval=125,
      method="dilocox",
      steps=4000,
    )
    assert found.low < published < found.high


def test_the_range_covers_every_line_with_two_errors():
  other = dataclasses.replace(
    LINE, parameters=2000, slope=0.5, slope_error=0.03, offset_error=0.08
  )
  found = gap(dataclasses.replace(LAW, lines=(LINE, other))).doublings
  # The lines give 1.0 and 0.6. Two errors of the second are
  # 2 sqrt((0.03 * 2)^2 + 0.08^2) = 0.2.
  assert found.value == pytest.approx(0.8)
  assert (found.low, found.high) == pytest.approx((0.4, 1.0))
  # If slope and offset err together, the line itself errs less.
  tied = dataclasses.replace(other, correlation=1.0)
  found = gap(dataclasses.replace(LAW, lines=(LINE, tied))).doublings
  assert found.low == pytest.approx(0.6 - 2 * 0.02)


def test_each_size_has_one_vote_and_a_line_along_the_curve_has_none():
  again = dataclasses.replace(LINE, slope=0.6)
  larger = dataclasses.replace(LINE, parameters=2000, slope=0.5)
  curve = dataclasses.replace(LINE, doublings="curve", slope=0.3)
  lines = (LINE, again, larger, curve)
  found = gap(dataclasses.replace(LAW, lines=lines)).doublings
  # Doublings of 1.0 and 0.8 of one size, and 0.6 of the other.
  assert found.value == pytest.approx((0.9 + 0.6) / 2)
  assert found.low == pytest.approx(0.2)  # That of the curve.


def test_what_lies_outside_of_the_runs_is_said():
  (note,) = gap(num_replicas=16).notes
  assert note == "No run behind the law has more than 8 replicas."
  (note,) = gap(sync_interval=33).notes
  assert "H of 4 to 32" in note
  found = gap(steps=2000)
  assert "at most 500 steps" in found.notes[0]
  # Four times as long: the lower end is half as far.
  assert found.doublings.low == pytest.approx(0.5)
  assert found.doublings.value == pytest.approx(1.0)
  assert not gap(steps=500).notes


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    ({"losses": [1.9, 1.8, 1.7]}, "losses has 3 numbers: give two"),
    ({"losses": [1.8, 1.9]}, "1.9, is not below the loss with half of it, 1.8"),
    ({"losses": [1.8, 1.8]}, "tune the rate at both batches"),
    ({"losses": [1.8, math.nan]}, "the loss with B=nan must be above 0"),
    ({"losses": [-1.8, -1.9]}, "the loss with B / 2=-1.8 must be above 0"),
    ({"losses": [2.0, 1.8], "gain": 0.1}, "give either losses"),
    ({}, "give either losses"),
    ({"gain": 1.0}, "gain=1.0 must be at least 0 and below 1"),
    ({"gain": Estimate(0.1, 0.0, 1.5)}, "gain.high=1.5 must be at least 0 and"),
    ({"gain": Estimate(math.nan, 0.0, 0.1)}, "gain.value=nan must be at least"),
    ({"gain": 0.1, "num_replicas": 1}, "num_replicas=1 must be at least 2"),
    ({"gain": 0.1, "sync_interval": 0}, "sync_interval=0 must be at least 1"),
    ({"gain": 0.1, "steps": 0}, "steps=0 must be at least 1"),
  ],
)
def test_bad_input_is_one_line(arguments, said):
  given = {"num_replicas": 4} | arguments
  with pytest.raises(ValueError, match="^[^\n]+$") as error:
    dx.expected_gap(**given)
  assert said in str(error.value)


def test_an_error_of_s_is_two_errors_wide_and_not_below_zero():
  found = with_error(0.1, 0.02)
  assert (found.low, found.high) == pytest.approx((0.06, 0.14))
  assert with_error(0.01, 0.02).low == 0
  found = gain_of_losses([2.0, 1.8], error=0.01)
  assert (found.low, found.high) == pytest.approx((0.08, 0.12))
  # A loss so low that s would be rounded to 1 has a gap all the same.
  assert gain_of_losses([2.0, 1e-300]).value == 0.99


def test_s_by_size_falls_as_the_third_root_and_is_bounded():
  assert gain_of_size(35_000_000).value == pytest.approx(0.022)
  assert gain_of_size(8 * 35_000_000).value == pytest.approx(0.011)
  found = gain_of_size(1000)
  assert found == Estimate(0.1, 0.05, 0.2)
  # The published gaps are met: s of 2.4 billion was fitted as 0.54 %.
  assert gain_of_size(2.4e9).value == pytest.approx(0.0054, rel=0.02)
  with pytest.raises(ValueError, match="parameters=0 must be above 0"):
    gain_of_size(0)


def test_s_is_extended_by_its_power_and_the_range_covers_other_powers():
  points = [
    SizeGain(1000, Estimate(0.08, 0.07, 0.09)),
    SizeGain(4000, Estimate(0.04, 0.03, 0.05)),
  ]
  # s falls as the root: at four times the size it halves again.
  found = extended_gain(points, 16_000)
  assert found.value == pytest.approx(0.02)
  assert found.low == pytest.approx(0.015)
  assert found.high == pytest.approx(0.05)  # If s stays as it is.
  rising = [SizeGain(1000, EXACT_SMALL), SizeGain(8000, EXACT_LARGE)]
  found = extended_gain(rising, 64_000)
  assert found.value == pytest.approx(0.16)
  assert found.low == pytest.approx(0.04)  # If it falls as the third root.
  with pytest.raises(ValueError, match="s of 1 sizes cannot be extended"):
    extended_gain(points[:1], 16_000)
  flat = [points[0], SizeGain(4000, Estimate(0.0, 0.0, 0.1))]
  with pytest.raises(ValueError, match="s of 4,000 parameters=0.0 must be ab"):
    extended_gain(flat, 16_000)


EXACT_SMALL = Estimate(0.04, 0.04, 0.04)
EXACT_LARGE = Estimate(0.08, 0.08, 0.08)


# s and gap of four replicas, all measured: 59 thousand parameters with H = 16
# (docs/results/gap_law.csv) and 0.86 million with `overlap_loco` and H = 18
# (docs/results/replicas_main.csv).
@pytest.mark.parametrize(
  ("gain", "method", "interval", "steps", "measured"),
  [
    (0.0588, "diloco", 16, 576, 0.0723),
    (0.0944, "overlap_loco", 18, 2000, 0.0762),
    (0.0944, "dilocox", 20, 2000, 0.1912),
  ],
)
def test_measured_gaps_lie_in_the_range(
  gain, method, interval, steps, measured
):
  found = dx.expected_gap(
    gain=gain,
    num_replicas=4,
    sync_interval=interval,
    method=method,
    steps=steps,
  )
  assert found.low < measured < found.high


def test_the_range_covers_both_fits():
  """The center's line along the curve, and the earlier study's."""
  assert {line.kind for line in law().lines} >= {"fitted", "recalled"}
  for num_replicas in (2, 4, 8):
    lost = expected.doublings_lost(num_replicas=num_replicas, sync_interval=16)
    for slope, offset in ((0.56, 0.04), (0.74, 0.48), (0.6, 0.35)):
      doublings = slope * math.log2(num_replicas) - offset
      assert lost.low < doublings < lost.high
