"""Computes the fingerprint (some random sums) of a state, on the devices.

Replicas compare the fingerprints of the state that they share, to find out
whether they still agree. `reference.fingerprint` defines a fingerprint. The
devices compute sums over chunks of 4,096 values in float32, and the host adds
up the sums of the chunks in float64.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from dilocox_jax.mailbox_protocol.fingerprints import (
  NOTHING,
  Fingerprint,
  exact_digest,
)
from dilocox_jax.reference.fingerprint import (
  BLOCK_VALUES,
  FIRST_SUM,
  NORM,
  NUM_SUMS,
  ROW_VALUES,
  UNIT,
  num_blocks,
  rounding_unit,
)
from dilocox_jax.trees import Array

# A chunk has 128 rows of one value for each sum. So a device adds 128 values in
# float32, as `reference.fingerprint` does, before the host adds in float64.
_CHUNK_ROWS = 128
_CHUNK_VALUES = _CHUNK_ROWS * NUM_SUMS


def dispatch_fingerprint(
  leaves: Sequence[Array], signs: Array
) -> Callable[[], Fingerprint]:
  """Lets the devices compute the fingerprint of a fragment's shared state.

  Args:
    leaves: The leaves of the state. The devices add up leaves of floats; the
      host reads all other leaves as a whole.
    signs: Random signs, float32 [2^20], on all devices of the replica, equal in
      all replicas.

  Returns:
    A function that waits for the devices, and returns the fingerprint. Any
    thread may call it.
  """
  floats = []
  exact_leaves = []
  for leaf in leaves:
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    (floats if is_float else exact_leaves).append(leaf)
  sums_of_leaves = _chunk_sums_program(signs.sharding)(floats, signs)

  def read() -> Fingerprint:
    rows = [NOTHING.rows]  # No row, for a state without leaves of floats.
    chunk_sums = jax.device_get(sums_of_leaves)
    for leaf, (sums, squares) in zip(floats, chunk_sums, strict=True):
      rows_of_leaf = np.zeros([len(sums), ROW_VALUES], np.float32)
      rows_of_leaf[:, UNIT] = rounding_unit(leaf.dtype.name)
      rows_of_leaf[:, NORM] = np.sqrt(squares.sum(axis=1, dtype=np.float64))
      rows_of_leaf[:, FIRST_SUM:] = sums.sum(axis=1, dtype=np.float64)
      rows.append(rows_of_leaf)
    return Fingerprint(
      rows=np.concatenate(rows),
      exact_digest=exact_digest(jax.device_get(exact_leaves)),
    )

  return read


@functools.cache
def _chunk_sums_program(sharding: Sharding) -> Callable:
  """Returns the jitted `_chunk_sums`, whose results have the given sharding."""
  return jax.jit(_chunk_sums, out_shardings=sharding)


def _chunk_sums(
  leaves: Sequence[Array], signs: Array
) -> list[tuple[Array, Array]]:
  """Returns the result of `_sums_of_leaf` for each leaf."""
  return [_sums_of_leaf(leaf, signs) for leaf in leaves]


def _sums_of_leaf(leaf: Array, signs: Array) -> tuple[Array, Array]:
  """Returns the sums of the chunks of one leaf.

  The leaf is padded with zeros, and divided into B blocks of C chunks of 4,096
  values.

  Args:
    leaf: Array of floats.
    signs: Random signs of the values of a block, float32 [2^20].

  Returns:
    The sums of the values with their signs [B, C, 32], and the sums of squares
    [B, C].
  """
  blocks = num_blocks(leaf.size)
  values_of_block = BLOCK_VALUES
  if blocks == 1:
    # A small leaf is not filled up to a whole block.
    values_of_block = -(-leaf.size // _CHUNK_VALUES) * _CHUNK_VALUES
  flat = leaf.reshape(-1).astype(jnp.float32)
  padded = jnp.pad(flat, (0, blocks * values_of_block - leaf.size))
  num_chunks = values_of_block // _CHUNK_VALUES
  chunks = padded.reshape(blocks, num_chunks, _CHUNK_ROWS, NUM_SUMS)
  signs_of_block = signs[:values_of_block].reshape(1, *chunks.shape[1:])
  signed = chunks * signs_of_block
  return signed.sum(axis=2), jnp.square(chunks).sum(axis=(2, 3))
