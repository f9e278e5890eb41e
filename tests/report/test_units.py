"""Numbers are written with the right unit, sign and number of digits."""

import math

import pytest

from dilocox_jax.report import units

NAN = math.nan
INF = math.inf


@pytest.mark.parametrize(
  ("value", "text"),
  [
    (0, "0 B"),
    (999, "999 B"),
    (1_000, "1.00 kB"),
    (27_880_000, "27.9 MB"),
    (128_328_095, "128 MB"),
    (6_857_736_000, "6.86 GB"),
    (2.5e12, "2.50 TB"),
    (1e15, "1.00 PB"),
    (2e18, "2000 PB"),
    (NAN, "-"),
    (INF, "-"),
  ],
)
def test_bytes_are_in_powers_of_1000(value, text):
  assert units.human_bytes(value) == text


@pytest.mark.parametrize(
  ("value", "text"),
  [
    (0, "0 tokens"),
    (512, "512 tokens"),
    (1_000, "1.00 k tokens"),
    (1_228_800, "1.23 M tokens"),
    (17_408_000, "17.4 M tokens"),
    (20e9, "20.0 B tokens"),
    (300e9, "300 B tokens"),
    (1.5e12, "1.50 T tokens"),
  ],
)
def test_tokens_are_in_powers_of_1000(value, text):
  assert units.human_tokens(value) == text


@pytest.mark.parametrize(
  ("seconds", "text"),
  [
    (0.05, "0.05 s"),
    (18, "18 s"),
    (59.9, "59.9 s"),
    (60, "1 min"),
    (160, "2.67 min"),
    (3599, "60 min"),
    (3600, "1 h"),
    (3600 * 999.4, "999 h"),
    (3600 * 999.6, "1,000 h"),
    (3600 * 2020, "2,020 h"),
    (NAN, "-"),
    (INF, "-"),
  ],
)
def test_a_time_has_the_largest_unit_in_which_it_is_at_least_one(seconds, text):
  assert units.human_time(seconds) == text


def test_the_error_of_a_time_has_the_unit_of_the_time():
  assert units.human_time(22.9, 0.54) == "22.9 ± 0.54 s"
  assert units.human_time(7200, 360) == "2 ± 0.1 h"
  assert units.human_time(7200 * 1000, 3600 * 120) == "2,000 ± 120 h"
  assert units.human_time(120, NAN) == "2 min"


@pytest.mark.parametrize(
  ("seconds", "unit"),
  [(0.1, (1, "s")), (60, (60, "min")), (3600, (3600, "h"))],
)
def test_an_axis_of_time_has_a_divisor_and_its_unit(seconds, unit):
  assert units.time_unit(seconds) == unit


@pytest.mark.parametrize(
  ("share", "error", "text"),
  [
    (0.0078, 0.0007, "+0.78 ± 0.07 %"),
    (-0.0056, 0.002, "-0.56 ± 0.20 %"),
    (0.0078, NAN, "+0.78 %"),
    (0.1763, NAN, "+17.63 %"),
    (-0.00001, NAN, "+0.00 %"),
    (INF, NAN, "+inf %"),
    (NAN, NAN, "-"),
  ],
)
def test_a_gap_is_in_per_cent_and_has_its_sign(share, error, text):
  assert units.human_gap(share, error) == text


@pytest.mark.parametrize(
  ("gap", "error", "text"),
  [
    (0.008, NAN, "0.8 % higher"),
    (-0.021, NAN, "2.1 % lower"),
    (0.017, 0.01, "1.7 ± 1.0 % higher"),
    (INF, NAN, "inf % higher"),
    (NAN, NAN, "not known"),
  ],
)
def test_a_comparison_names_the_direction(gap, error, text):
  assert units.human_comparison(gap, error) == text


def test_shares_losses_and_ratios_have_their_digits():
  assert units.human_share(0.931) == "93.1 %"
  assert units.human_share(INF) == "-"
  assert units.human_loss(1.35229) == "1.3523"
  assert units.human_loss(1.35229, 0.00591) == "1.3523 ± 0.0059"
  assert units.human_loss(INF) == units.human_loss(NAN) == "not finite"
  assert units.human_ratio(25.34) == "25.3x"
  assert units.human_ratio(3.617) == "3.62x"
  assert units.human_ratio(438.6) == "439x"
  assert units.human_ratio(NAN) == units.human_ratio(INF) == "-"


def test_missing_seeds_are_said():
  assert units.human_missing(2, 3) == " (2 of 3 seeds)"
  assert units.human_missing(3, 3) == ""
