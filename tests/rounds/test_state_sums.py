"""Fingerprints as devices compute them, beside those of the reference page."""

import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.mailbox_protocol.fingerprints import (
  difference,
  fingerprint_of,
)
from dilocox_jax.reference.fingerprint import BLOCK_VALUES, random_signs
from dilocox_jax.rounds.state_sums import dispatch_fingerprint

SIGNS = random_signs("run", 3)


@pytest.mark.parametrize(
  "shapes",
  [
    [(1,)],
    [(), (5, 7), (4096,), (4097,)],
    [(BLOCK_VALUES,), (3,)],
    [(3, BLOCK_VALUES - 1000)],
  ],
)
def test_devices_compute_the_fingerprint_of_the_reference(shapes):
  rng = np.random.default_rng(0)
  arrays = [np.asarray(rng.normal(size=s), np.float32) for s in shapes]
  leaves = [jnp.asarray(array) for array in arrays]
  expected = fingerprint_of(arrays, SIGNS)
  actual = dispatch_fingerprint(leaves, jnp.asarray(SIGNS))()
  assert actual.rows.dtype == np.float32
  # The smallest of the sums may cancel, so the tolerance is absolute.
  np.testing.assert_allclose(actual.rows, expected.rows, rtol=1e-6, atol=2e-3)
  assert not difference(actual, expected, num_events=0)
  assert not difference(expected, actual, num_events=0)
  assert actual.exact_digest == expected.exact_digest


def test_short_floats_and_integers_are_told_apart():
  leaves = [jnp.ones(10, jnp.bfloat16), jnp.int32(3), jnp.arange(4)]
  arrays = [np.asarray(leaf) for leaf in leaves]
  actual = dispatch_fingerprint(leaves, jnp.asarray(SIGNS))()
  expected = fingerprint_of(arrays, SIGNS)
  np.testing.assert_array_equal(actual.rows, expected.rows)
  assert actual.rows[0, 0] == 2**-8 and len(actual.rows) == 1
  assert actual.exact_digest == expected.exact_digest
  other = dispatch_fingerprint(
    [leaves[0], jnp.int32(4), leaves[2]], jnp.asarray(SIGNS)
  )()
  assert "integers" in difference(actual, other, num_events=0)


def test_a_state_without_floats_has_no_rows():
  assert not dispatch_fingerprint([], jnp.asarray(SIGNS))().rows.size
  assert (
    len(dispatch_fingerprint([jnp.int32(3)], jnp.asarray(SIGNS))().rows) == 0
  )
