from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_jax.metrics import Timing
from experiments.real_links import overlap


def run_of(open_s, slow_s, exposed_s) -> Any:
  """A run whose rounds take these seconds; the first block compiles."""
  timings, rounds = [], []
  for number in range(40):
    is_slow = overlap.is_slow(number)
    wall_s = slow_s if is_slow else open_s
    if number < 8 or number % 8 < 2:
      wall_s = 100.0  # Compiling, or the link changes.
    timings.append(
      Timing(number, "round", wall_s, exposed_s=exposed_s, link_bytes=105)
    )
    rounds.append(SimpleNamespace(sent_bytes=100))
  timings.append(Timing(40, "checkpoint", 50.0))
  return SimpleNamespace(timings=timings, rounds=rounds)


def test_the_link_is_open_and_slow_for_as_many_rounds():
  states = [overlap.is_slow(number) for number in range(48)]
  assert states[:16] == [False] * 8 + [True] * 8 and sum(states) == 24


def test_rounds_over_the_slow_link_are_compared_with_open_ones():
  row = overlap.compared(
    overlap.CASES[0], "thread", run_of(2.0, 2.2, 0.1), exchange_s=0.6
  )
  assert row.num_rounds == (12, 12)
  assert (row.open_s, row.slow_s, row.exposed_s) == (2.0, 2.2, 0.1)
  assert row.ratio == pytest.approx(1.1)
  assert row.bytes_ratio == pytest.approx(1.05)
  assert row.predicted_exposed_s == 0
  late = overlap.compared(
    overlap.CASES[0], "thread", run_of(2.0, 2.2, 0.1), exchange_s=2.5
  )
  assert late.predicted_exposed_s == pytest.approx(0.5)
