"""Computes fingerprints: random sums by which replicas compare their states.

Replicas on different machines average the same messages, but rounding makes
their states differ. So each replica sends a *fingerprint* with its message:
random sums of the values of its state. The difference of two fingerprints tells
roughly how far the states are apart.

Each array is read in blocks of 2^20 values. Every value x_i of a block is
multiplied by a random sign s_i, +1 or -1, and added to one of 32 sums:

    sum_j = s_j x_j + s_(j+32) x_(j+32) + s_(j+64) x_(j+64) + ...

If two blocks differ by a vector d, their sums differ by the sums of d. The
squares of the 32 differences add up to |d|^2 on average over random signs, and
to exactly |d|^2 if only one value differs. The fingerprint also has the norm of
the block, with which |d| can be compared.

For example, the block (3, 4) with the signs (+, -) has the norm 5 and the sums
3 and -4. The block (3, 4.04) has the sums 3 and -4.04. The sums differ by 0 and
0.04, so |d| is 0.04.

All blocks in one exchange have the same signs, and the next exchange has
others. The signs are the bits of SHAKE-256 of the text "<run> <event>", where
<event> is the number of the exchange. So they are equal on all machines.

Source: the count sketch, Charikar et al., 2002, "Finding frequent items in data
streams". Differs: value i belongs to sum i modulo 32, and not to a random one.
"""

import hashlib

import numpy as np

BLOCK_VALUES = 2**20
NUM_SUMS = 32
# Each row of a fingerprint: rounding unit, norm and sums of a block.
UNIT = 0
NORM = 1
FIRST_SUM = 2
ROW_VALUES = FIRST_SUM + NUM_SUMS

# Largest relative error when a value is rounded to a type. Whoever stores the
# state in one of these types cannot be closer to the other replicas.
_ROUNDING_UNITS = {
  "float64": 2.0**-24,  # The fingerprint is computed in float32.
  "float32": 2.0**-24,
  "float16": 2.0**-11,
  "bfloat16": 2.0**-8,
}
_ROUNDING_UNIT_OF_OTHERS = 2.0**-3  # Types of 8 bits and fewer.
# Values of a chunk, a part of a block. The chunks of a block are added in
# float32. The result has 128 values for each sum, which are added in float64.
_CHUNK_VALUES = 128 * NUM_SUMS


def random_signs(
  run: str, event: int, num_values: int = BLOCK_VALUES
) -> np.ndarray:
  """Returns the signs of the first values of a block, float32 of +1 and -1.

  The signs are the bits of a hash of run and event: bit k of byte n belongs to
  the value 8 n + k, and a set bit means -1.

  Args:
    run: Identifier of the run.
    event: Number of the exchange in the run.
    num_values: Number of signs, at least the size of the largest block.
  """
  text = f"{run} {event}".encode()
  digest = hashlib.shake_256(text).digest(-(-num_values // 8))
  bits = np.unpackbits(np.frombuffer(digest, np.uint8), bitorder="little")
  return 1 - 2 * bits[:num_values].astype(np.float32)


def num_blocks(num_values: int) -> int:
  """Returns the number of blocks (of at most 2^20 values) of an array."""
  return -(-num_values // BLOCK_VALUES)


def rounding_unit(type_name: str) -> float:
  """Returns the largest relative error when a value is rounded to a type.

  Args:
    type_name: Name of a floating-point type, e.g. "float32". "float64" counts
      as "float32", and unknown types count as types of 8 bits.
  """
  return _ROUNDING_UNITS.get(type_name, _ROUNDING_UNIT_OF_OTHERS)


def fingerprint(array: np.ndarray, signs: np.ndarray) -> np.ndarray:
  """Computes the fingerprint of an array: random sums of its values, by blocks.

  A block has 2^20 values; the last one may have fewer.

  Args:
    array: Floating-point values of any shape; they are read in C order.
    signs: Random signs of the exchange, float32 of +1 and -1 (`random_signs`),
      at least as many as the largest block has values.

  Returns:
    float32 [B, 34] for B blocks: the rounding unit, the norm and 32 sums of
    each block.
  """
  flat = array.reshape(-1).astype(np.float32, copy=False)
  rows = np.zeros([num_blocks(flat.size), ROW_VALUES], np.float32)
  for number, row in enumerate(rows):
    start = number * BLOCK_VALUES
    block = flat[start : start + BLOCK_VALUES]
    num_chunks = -(-block.size // _CHUNK_VALUES)
    signed = np.zeros(num_chunks * _CHUNK_VALUES, np.float32)
    np.multiply(block, signs[: block.size], out=signed[: block.size])
    # Chunks of 128 x 32 values are added in float32.
    chunks_added = signed.reshape(num_chunks, _CHUNK_VALUES).sum(axis=0)
    # Column j has the 128 values that belong to sum j. They are added in
    # float64.
    by_sum = chunks_added.reshape(-1, NUM_SUMS)
    row[UNIT] = rounding_unit(array.dtype.name)
    row[NORM] = np.sqrt(np.dot(block, block))
    row[FIRST_SUM:] = by_sum.sum(axis=0, dtype=np.float64)
  return rows
