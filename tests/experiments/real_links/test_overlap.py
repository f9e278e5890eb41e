from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_jax.metrics import Timing
from experiments.real_links import overlap
from experiments.real_links.changing_link import OPEN_BIT_PER_S


def run_of(open_s, slow_s, exposed_s) -> Any:
  """A run on a machine that becomes slower; rounds add to what it takes."""
  timings, rounds = [], []
  for number in range(40):
    wall_s = slow_s if overlap.is_slow(number) else open_s
    wall_s *= 1 + number // 28  # Others come when it is half done.
    if number < 8 or number % 4 < 1:
      wall_s = 100.0  # Compiling, or the link changes.
    timings.append(
      Timing(number, "round", wall_s, exposed_s=exposed_s, link_bytes=105)
    )
    rounds.append(SimpleNamespace(sent_bytes=100))
  timings.append(Timing(40, "checkpoint", 50.0))
  return SimpleNamespace(timings=timings, rounds=rounds)


def link_of(exchange_s) -> Any:
  return SimpleNamespace(slow_bps=5e6, exchange_s=exchange_s)


def test_the_link_is_open_and_slow_for_as_many_rounds():
  states = [overlap.is_slow(number) for number in range(40)]
  assert not any(states[:8])
  assert states[8:16] == [True] * 4 + [False] * 4 and sum(states) == 16


def test_the_slow_link_takes_its_rate_from_rounds_over_the_open_one():
  rate = overlap.AlternatingRate(lambda: 3e6)
  walls_s = [99.0] * 4 + [1.9, 2.0, 2.1, 2.0]
  assert rate(walls_s[:7]) == OPEN_BIT_PER_S and not rate.slow_bps
  # An exchange of 3e6 bits takes 1.2 s, 0.6 of a round.
  assert rate(walls_s) == rate.slow_bps == pytest.approx(2.5e6)
  assert rate.exchange_s == pytest.approx(1.2)
  assert rate([*walls_s, 4.0]) == rate.slow_bps  # It stays.


def test_rounds_over_the_slow_link_are_compared_with_open_ones():
  run = run_of(2.0, 2.2, 0.1)
  row = overlap.compared(overlap.CASES[0], "thread", run, link_of(0.6))
  assert row.num_rounds == (12, 12)
  assert (row.open_s, row.exposed_s) == (3.0, 0.1)
  assert row.ratio == pytest.approx(1.1)
  assert row.bytes_ratio == pytest.approx(1.05)
  assert (row.rate_bps, row.predicted_exposed_s) == (5e6, 0)
  late = overlap.compared(overlap.CASES[0], "thread", run, link_of(3.5))
  assert late.predicted_exposed_s == pytest.approx(0.5)
