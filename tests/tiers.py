"""Which cases of a test only `make check` runs."""

import pytest


def slow(*cases):
  """Marks cases of a parametrised test, each a value or a tuple of values."""
  rows = [case if isinstance(case, tuple) else (case,) for case in cases]
  return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]
