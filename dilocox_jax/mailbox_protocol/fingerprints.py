"""Compares the shared states of replicas by fingerprints (random sums).

The shared state is the outer parameters, the outer optimizer and the codec's
common state. Replicas that have averaged the same messages should have equal
states, up to rounding. A fingerprint (`reference.fingerprint`) shows whether
they differ by more.

Two blocks of values count as equal if the norm of their difference, divided by
the larger of their norms, is at most

    63 * 2^-24 + u * (1 + n)

Here u is the rounding unit of the values, 2^-24 for float32. n is the number of
events (exchanges) of this fragment since both replicas had the same values:
since the snapshot (copy of the state) with which both began, or else since the
start of the run. The first term allows for float32 sums that another machine
adds in another order. The second term allows for a state that is rounded at
each event.

For example, rounding explains a difference of 4e-6 at the start of a run, and
of 1.6e-5 after 200 events (docs/how_it_works/mailbox_wrong_values.md).
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dilocox_jax.reference.fingerprint import (
  FIRST_SUM,
  NORM,
  ROW_VALUES,
  UNIT,
  fingerprint,
)

EXACT_DIGEST_BYTES = 8
_ROW_BYTES = 4 * ROW_VALUES
_ROUNDING_IN_RESULTS = 63 * 2.0**-24  # See the module's docstring.
# Differences with a smaller norm than this are ignored: some devices round the
# smallest numbers to zero, and squares of such numbers are zero.
_SMALLEST_NORM = 2.0**-62


class Fingerprint(NamedTuple):
  """A few random sums of a fragment's shared state, to compare replicas.

  The shared state is the outer parameters, the outer optimizer and the codec's
  common state.

  Attributes:
    rows: Rounding unit, norm and 32 random sums of each of the B blocks of
      floating-point values, float32 [B, 34] (`reference.fingerprint`).
    exact_digest: First 8 bytes of the SHA-256 of all other values, e.g. counts
      of steps, which must be exactly equal in all replicas.
  """

  rows: np.ndarray
  exact_digest: bytes

  @property
  def num_bytes(self) -> int:
    """Number of bytes of `rows`."""
    return self.rows.size * self.rows.itemsize


NOTHING = Fingerprint(
  rows=np.zeros([0, ROW_VALUES], np.float32),
  exact_digest=bytes(EXACT_DIGEST_BYTES),
)


class SharedState(NamedTuple):
  """A message's description of its sender's shared state.

  The shared state is the outer parameters, the outer optimizer and the codec's
  common state.

  Attributes:
    name: Digest of the newest manifest (list of averaged messages) that the
      sender has followed, as 64 hexadecimal digits; "": it has followed none.
      If an event (exchange) has several manifests, only the first one counts.
    base: Event of the snapshot (copy of the state) with which the sender began;
      0 if it began with the initial parameters.
    fingerprint: Fingerprint of the state; `NOTHING` if the message has none.
      Only a replica's first message of an event can have one.
  """

  name: str = ""
  base: int = 0
  fingerprint: Fingerprint = NOTHING

  def difference_from(
    self, other: "SharedState", event: int, num_kinds: int
  ) -> str:
    """Returns how this state differs from another replica's, in words.

    The result is "" if the states are equal up to rounding. The tolerance grows
    with the number of events since both had the same values.

    Args:
      other: State of another replica before `event`, with the same `name`.
      event: Number of the event (exchange). Both states are from before it.
      num_kinds: Number of fragments. Each event exchanges the next one of them.
    """
    # Replicas that began with the same snapshot had the same values then. Other
    # replicas had the same values at the start of the run.
    common = self.base if self.base == other.base else 0
    return difference(
      self.fingerprint, other.fingerprint, (event - common) / num_kinds
    )


def rows_in(content: bytes | memoryview) -> np.ndarray:
  """Converts raw bytes to the rows of a fingerprint, float32 [B, 34].

  Args:
    content: The rows, one after the other, as little-endian float32.
  """
  flat = np.frombuffer(content, "<f4").astype(np.float32, copy=False)
  return flat.reshape(-1, ROW_VALUES)


def rows_bytes(num_blocks: int) -> int:
  """Returns the number of bytes of a fingerprint with `num_blocks` rows."""
  return num_blocks * _ROW_BYTES


def exact_digest(arrays: Iterable[np.ndarray]) -> bytes:
  """Returns the first 8 bytes of the SHA-256 of all values in some arrays.

  The arrays are those that have to be exactly equal in all replicas.
  """
  digest = hashlib.sha256()
  for array in arrays:
    digest.update(np.ascontiguousarray(array).tobytes())
  return digest.digest()[:EXACT_DIGEST_BYTES]


def fingerprint_of(
  arrays: Iterable[np.ndarray], signs: np.ndarray
) -> Fingerprint:
  """Computes the fingerprint (a few random sums) of a shared state, in numpy.

  Args:
    arrays: The arrays of the state, in the same order in all replicas.
    signs: The random signs of the exchange (`Mailbox.signs`), float32 [N] of +1
      and -1. N is at least the smaller of 2^20 and the largest array's size.
  """
  rows = [NOTHING.rows]
  exact_arrays = []
  for array in arrays:
    # "V" are the short floats of `ml_dtypes`.
    if array.dtype.kind in "fV":
      rows.append(fingerprint(array, signs))
    else:
      exact_arrays.append(array)
  return Fingerprint(
    rows=np.concatenate(rows), exact_digest=exact_digest(exact_arrays)
  )


def difference(one: Fingerprint, other: Fingerprint, num_events: float) -> str:
  """Returns how two states differ, in words; "" if only by rounding.

  Args:
    one: Fingerprint of a state.
    other: Fingerprint of another state with the same shapes and signs.
    num_events: Number of events (exchanges) of this fragment since both states
      had the same values. The tolerance grows with it.
  """
  if one.exact_digest != other.exact_digest:
    return "its integers differ"
  if not len(one.rows):
    return ""
  gaps = _relative_gaps(one.rows, other.rows)
  units = np.maximum(one.rows[:, UNIT], other.rows[:, UNIT])
  tolerances = _ROUNDING_IN_RESULTS + units * (1 + num_events)
  excess = gaps / tolerances
  worst = int(np.argmax(excess))
  if excess[worst] <= 1:
    return ""
  return (
    f"block {worst} of {len(gaps)} by {gaps[worst]:.1e} of its norm, of which"
    f" rounding explains {tolerances[worst]:.1e}"
  )


def _relative_gaps(one: np.ndarray, other: np.ndarray) -> np.ndarray:
  """Estimates the relative distance of two states in each block, float64 [B].

  The distance is divided by the larger of the two norms. The result is 0 if the
  distance is tiny or if neither block is finite, and infinite if only one is
  finite. `one` and `other` are the rows of the fingerprints, float32 [B, 34].
  """
  is_finite = np.isfinite(one).all(axis=1)
  is_other_finite = np.isfinite(other).all(axis=1)
  gaps = np.where(is_finite == is_other_finite, 0.0, np.inf)
  are_finite = is_finite & is_other_finite
  one = one[are_finite].astype(np.float64)
  other = other[are_finite].astype(np.float64)
  distances = np.linalg.norm(one[:, FIRST_SUM:] - other[:, FIRST_SUM:], axis=1)
  norms = np.maximum(one[:, NORM], other[:, NORM])
  gaps[are_finite] = np.where(
    distances > _SMALLEST_NORM,
    distances / np.maximum(norms, _SMALLEST_NORM),
    0.0,
  )
  return gaps
