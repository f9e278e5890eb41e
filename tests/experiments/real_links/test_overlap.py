from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_jax.metrics import Timing
from experiments.real_links import overlap


def run_of(open_s, slow_s, exposed_s) -> Any:
  """A run on a machine that becomes slower; rounds add to what it takes."""
  timings, rounds = [], []
  for number in range(48):
    wall_s = slow_s if overlap.is_slow(number) else open_s
    wall_s *= 1 + number // 24  # Others come when it is half done.
    if number < 8 or number % 4 < 1:
      wall_s = 100.0  # Compiling, or the link changes.
    timings.append(
      Timing(number, "round", wall_s, exposed_s=exposed_s, link_bytes=105)
    )
    rounds.append(SimpleNamespace(sent_bytes=100))
  timings.append(Timing(48, "checkpoint", 50.0))
  return SimpleNamespace(timings=timings, rounds=rounds)


def test_the_link_is_open_and_slow_for_as_many_rounds():
  states = [overlap.is_slow(number) for number in range(48)]
  assert states[:8] == [False] * 4 + [True] * 4 and sum(states) == 24


def test_rounds_over_the_slow_link_are_compared_with_open_ones():
  row = overlap.compared(
    overlap.CASES[0], "thread", run_of(2.0, 2.2, 0.1), exchange_s=0.6
  )
  assert row.num_rounds == (15, 15)
  assert (row.open_s, row.exposed_s) == (4.0, 0.1)
  assert row.ratio == pytest.approx(1.1)
  assert row.bytes_ratio == pytest.approx(1.05)
  assert row.predicted_exposed_s == 0
  late = overlap.compared(
    overlap.CASES[0], "thread", run_of(2.0, 2.2, 0.1), exchange_s=4.5
  )
  assert late.predicted_exposed_s == pytest.approx(0.5)
