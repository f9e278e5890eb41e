import hypothesis
import pytest
from hypothesis import strategies as st

from dilocox_jax.simulate.quantities import (
  COMPUTE,
  RATE,
  SHARE,
  SIZE,
  TIME,
  format_quantity,
  parse_quantity,
)

KINDS = [RATE, TIME, SIZE, COMPUTE, SHARE]

WRITTEN = [
  ("1 Gbit/s", RATE, 1e9),
  ("100 Mbit/s", RATE, 1e8),
  ("1.12 Gbit/s", RATE, 1.12e9),
  ("inf bit/s", RATE, float("inf")),
  ("40 ms", TIME, 0.04),
  ("0.1 s", TIME, 0.1),
  ("120 s", TIME, 120.0),
  ("1.5 h", TIME, 5400.0),
  ("312 TFLOP/s", COMPUTE, 312e12),
  ("4 MB", SIZE, 4e6),
  ("16 MiB", SIZE, 2.0**24),
  ("2 %", SHARE, 0.02),
  ("0.01 %", SHARE, 1e-4),
  ("0 s", TIME, 0.0),
]


@pytest.mark.parametrize("text, kind, value", WRITTEN)
def test_a_quantity_reads_as_its_base_unit_and_prints_as_written(
  text, kind, value
):
  assert parse_quantity(text, kind, "field") == value
  assert format_quantity(value, kind) == text


@hypothesis.given(
  st.sampled_from(KINDS),
  st.floats(0, 1e18, allow_subnormal=False).filter(
    lambda x: x > 1e-15 or not x
  ),
)
def test_what_is_printed_reads_back_to_the_same_number(kind, value):
  assert parse_quantity(format_quantity(value, kind), kind, "field") == value


def test_bytes_are_eight_times_bits_and_one_letter_never_decides():
  assert parse_quantity("1 MB/s", RATE, "up") == 8e6
  assert parse_quantity("8 Mbit/s", RATE, "up") == 8e6
  with pytest.raises(ValueError, match="no unit of a size"):
    parse_quantity("8 Mbit", SIZE, "window")
  with pytest.raises(
    ValueError, match="'1 Gb/s' has no .*: have bit/s, .* GB/s"
  ):
    parse_quantity("1 Gb/s", RATE, "up")


@pytest.mark.parametrize("bare", [1000, "1000", " 1000 "])
def test_a_number_without_a_unit_is_told_which_unit_to_use(bare):
  with pytest.raises(ValueError) as error:
    parse_quantity(bare, RATE, "sites[0].up")
  assert str(error.value) == (
    "sites[0].up: 1000 has no unit: write e.g. '1000 Mbit/s'"
  )


@pytest.mark.parametrize("text", ["fast", "", None, True, [1], "nan s", "s"])
def test_what_is_no_number_is_refused_with_an_example(text):
  with pytest.raises(ValueError, match="rtt: .* is no time: write e.g. '1 ms'"):
    parse_quantity(text, TIME, "rtt")


def test_a_number_that_no_float_holds_is_refused():
  with pytest.raises(ValueError, match="rtt: '1e999999 h' is too large"):
    parse_quantity("1e999999 h", TIME, "rtt")
