import math

import pytest

from dilocox_jax.report import units


@pytest.mark.parametrize(
  ("value", "text"),
  [
    (0, "0 B"),
    (999, "999 B"),
    (1000, "1.00 kB"),
    (27_930_000, "27.9 MB"),
    (2_094_287_872, "2.09 GB"),
    (3 * 10**18, "3000 PB"),
  ],
)
def test_bytes_are_told_in_powers_of_1000(value, text):
  assert units.human_bytes(value) == text


@pytest.mark.parametrize(
  ("value", "text"),
  [(12, "12 tokens"), (1_228_800, "1.23 M tokens"), (2e10, "20.0 B tokens")],
)
def test_tokens_are_told_in_powers_of_1000(value, text):
  assert units.human_tokens(value) == text


def test_a_tick_has_no_digits_to_spare():
  assert units.bytes_tick(20_000_000) == "20 MB"


def test_a_loss_without_a_number_is_a_word():
  assert units.human_loss(1.23456) == "1.2346"
  assert units.human_loss(math.nan) == "not finite"


def test_shares_are_in_per_cent_and_gaps_have_a_sign():
  assert units.human_gap(0.0078) == "+0.78 %"
  assert units.human_gap(-0.1) == "-10.00 %"
  assert units.human_gap(-1e-6) == "+0.00 %"
  assert units.human_share(0.931) == "93.1 %"
  assert units.human_gap(math.nan) == units.human_share(math.nan) == "-"


def test_a_ratio_without_meaning_is_a_dash():
  assert units.human_ratio(25.31) == "25.3x"
  assert units.human_ratio(math.nan) == "-"


@pytest.mark.parametrize(
  ("seconds", "text"),
  [
    (0.0125, "0.0125 s"),
    (18, "18 s"),
    (160, "2.67 min"),
    (28_044, "7.79 h"),
    (4_190_400, "1,164 h"),
    (999.7 * 3600, "1,000 h"),
    (999.4 * 3600, "999 h"),
    (math.inf, "-"),
  ],
)
def test_a_time_is_told_in_a_unit_that_fits(seconds, text):
  assert units.human_time(seconds) == text


def test_a_comparison_is_worded():
  assert units.human_comparison(0.0078) == "0.8 % higher"
  assert units.human_comparison(-0.11) == "11.0 % lower"


def test_missing_seeds_are_counted():
  assert units.human_missing(2, 3) == " (2 of 3 seeds)"
  assert units.human_missing(3, 3) == ""
