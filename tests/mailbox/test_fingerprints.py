"""What fingerprints of shared states show, and what rounding explains."""

import math

import numpy as np
import pytest

from dilocox_jax.mailbox_protocol.fingerprints import (
  NOTHING,
  Fingerprint,
  SharedState,
  difference,
  fingerprint_of,
)
from dilocox_jax.reference.fingerprint import BLOCK_VALUES, random_signs

SIGNS = random_signs("run", 3)


@pytest.fixture(scope="module", name="state")
def state_fixture():
  """A large leaf of three blocks, a small one and a count of steps."""
  rng = np.random.default_rng(0)
  shape = 3, BLOCK_VALUES - 1000
  return [
    rng.normal(size=shape).astype(np.float32),
    np.ones(64, np.float32),
    np.array(7),
  ]


def scaled(array, index, factor):
  changed = array.copy()
  changed[index] *= np.float32(factor)
  return changed


# What a bad memory, or a wrong computation, may do.
DAMAGES = {
  "one typical value times 256": lambda a, b, n: [
    scaled(a, (2, 12345), 256 / abs(a[2, 12345])),
    b,
    n,
  ],
  "the large leaf by 1 %": lambda a, b, n: [1.01 * a, b, n],
  "the small leaf by 1 %": lambda a, b, n: [a, 1.01 * b, n],
  "a part of a leaf by 1 %": lambda a, b, n: [scaled(a, 1, 1.01), b, n],
  "an exponent's bit": lambda a, b, n: [a, scaled(b, 5, 2.0**-64), n],
  "the count of steps": lambda a, b, n: [a, b, n + 1],
  "one value is not finite": lambda a, b, n: [a, scaled(b, 0, math.inf), n],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("num_events", [0, 10_000])
def test_a_damaged_state_differs(state, damage, num_events):
  whole = fingerprint_of(state, SIGNS)
  damaged = fingerprint_of(DAMAGES[damage](*state), SIGNS)
  assert difference(whole, damaged, num_events)
  assert difference(damaged, whole, num_events)
  assert not difference(damaged, damaged, num_events)


def test_the_line_names_the_block_and_both_figures(state):
  damaged = fingerprint_of([1.01 * state[0], *state[1:]], SIGNS)
  line = difference(fingerprint_of(state, SIGNS), damaged, num_events=100)
  assert line.startswith("block ") and " of 4 by " in line
  assert line.endswith("e-02 of its norm, of which rounding explains 9.8e-06")


@pytest.mark.parametrize("num_events", [1, 100, 10_000])
def test_rounding_once_an_event_is_no_difference(num_events):
  """Each machine rounds each value to the other neighbor at each event."""
  rng = np.random.default_rng(1)
  values = rng.normal(size=5000).astype(np.float32)
  ulps = np.spacing(values) * num_events / 2
  one = fingerprint_of([values], SIGNS)
  other = fingerprint_of([values + ulps], SIGNS)
  assert not difference(one, other, num_events)
  assert difference(one, fingerprint_of([values * 1.01], SIGNS), num_events)


def test_a_state_in_a_short_type_may_round_as_that_type_does():
  values = np.random.default_rng(2).normal(size=5000).astype(np.float16)
  rounded = np.nextafter(values, np.float16(np.inf))
  one = fingerprint_of([values], SIGNS)
  assert not difference(one, fingerprint_of([rounded], SIGNS), 1)
  assert difference(one, fingerprint_of([values * 2], SIGNS), 1)


def test_zeros_and_the_smallest_numbers_are_equal():
  zeros = fingerprint_of([np.zeros(10, np.float32)], SIGNS)
  tiny = fingerprint_of([np.full(10, 1e-40, np.float32)], SIGNS)
  assert not difference(zeros, tiny, 0)


def test_two_states_that_have_both_diverged_are_equal():
  diverged = fingerprint_of([np.full(10, np.nan, np.float32)], SIGNS)
  infinite = fingerprint_of([np.full(10, np.inf, np.float32)], SIGNS)
  assert not difference(diverged, infinite, 0)
  assert not difference(NOTHING, NOTHING, 0)


def test_rounding_counts_from_the_snapshot_that_both_began_with():
  """Between other replicas it counts from the start of the run."""

  def state(base, factor):
    rows = fingerprint_of([np.full(9, factor, np.float32)], SIGNS).rows
    return SharedState("ab", base, Fingerprint(rows, NOTHING.integers))

  # 2e-5 is more than rounding explains after 10 events, not after 1,000.
  for one, other, is_explained in [(990, 990, False), (0, 990, True)]:
    line = state(one, 1.0).difference_from(
      state(other, 1.00002), event=1000, num_kinds=1
    )
    assert (not line) == is_explained
  # With 16 fragments, each has changed in one of 16 events.
  assert state(0, 1.0).difference_from(
    state(0, 1.00002), event=1000, num_kinds=16
  )
