import pytest

from dilocox_jax import checks


def test_a_value_outside_the_choices_is_answered_with_them():
  checks.one_of("bits", 4, (8, 4))
  with pytest.raises(ValueError, match="bits=3 must be one of 8, 4"):
    checks.one_of("bits", 3, (8, 4))


def test_an_unknown_name_is_answered_with_the_nearest():
  checks.known("method", "diloco", ["diloco", "eager"])
  with pytest.raises(ValueError, match="did you mean 'diloco'"):
    checks.known("method", "dilocoo", ["diloco", "eager"])
  with pytest.raises(ValueError, match="have: diloco, eager"):
    checks.known("method", "xyz", ["diloco", "eager"])


def test_a_range_refuses_what_is_outside_and_what_is_no_number():
  checks.within(0, 1, "inner", b1=1.0)
  for value in (-0.1, 1.1, float("nan")):
    with pytest.raises(ValueError, match="inner.b1=.* must be from 0 to 1"):
      checks.within(0, 1, "inner", b1=value)
