"""Draws text whose entropy is known exactly, for tests and golden values.

Python's library, the default corpus, changes with Python's version, and nobody
knows its entropy. This text is the same on every machine, and the loss of any
model on it has a known floor: 7/4 bits, or 1.213 nats, per token.
"""

import hashlib
import math

import numpy as np

from dilocox_jax.checks import require
from dilocox_jax.data.corpus import (
  VALIDATION_FRACTION,
  Corpus,
  check_fraction,
  digest_of,
)

# Index of the successor that each of eight equally likely draws chooses. So
# the four successors have the probabilities 1/2, 1/4, 1/8 and 1/8.
_BRANCHES = (0, 0, 0, 0, 1, 1, 2, 3)


def synthetic(
  seed: int = 0,
  *,
  num_tokens: int = 2**20,
  vocab_size: int = 64,
  validation_fraction: float = VALIDATION_FRACTION,
) -> Corpus:
  """Draws text of known entropy from a first-order Markov chain.

  A token t is followed by one of the four tokens p[t], p[t+1], p[t+2], p[t+3]
  with the probabilities 1/2, 1/4, 1/8, 1/8. Here p is a shuffle of the
  vocabulary, and indices wrap around. Every token is followed, and preceded,
  with the same four probabilities, so all tokens are equally frequent. Bits
  come from a standard hash of the seed, so no version of Python or numpy
  changes a token.

  Args:
    seed: Integer seed of the shuffle and of both streams.
    num_tokens: Number of training tokens.
    vocab_size: Number of different tokens, 4 or more.
    validation_fraction: Validation tokens for each training token.

  Returns:
    A corpus of two independent streams of the same chain.

  Raises:
    ValueError: If there are no tokens, or the vocabulary is too small.
  """
  check_fraction(validation_fraction)
  require(
    num_tokens >= 1 and vocab_size >= 4,
    f"num_tokens={num_tokens} must be at least 1 and vocab_size={vocab_size}"
    " at least 4",
  )
  keys = np.frombuffer(_noise(f"{seed}/chain", 8 * vocab_size), "<u8")
  table = np.argsort(keys, kind="stable").tolist()
  num_held_out = math.ceil(num_tokens * validation_fraction)
  train = _draw(table, f"{seed}/train", num_tokens)
  validation = _draw(table, f"{seed}/validation", num_held_out)
  streams = {"train": train, "validation": validation}
  little_endian = train.dtype.newbyteorder("<")
  return Corpus(
    name="synthetic",
    train=train,
    validation=validation,
    digest=digest_of(
      {name: x.astype(little_endian).tobytes() for name, x in streams.items()}
    ),
    vocab_size=vocab_size,
    num_files=0,
  )


def _noise(key: str, num_bytes: int) -> bytes:
  return hashlib.shake_256(f"synthetic/{key}".encode()).digest(num_bytes)


def _draw(table: list[int], key: str, num_tokens: int) -> np.ndarray:
  size = len(table)
  token = int.from_bytes(_noise(f"{key}/start", 8), "big") % size
  tokens = []
  for byte in _noise(key, num_tokens):
    token = table[(token + _BRANCHES[byte % len(_BRANCHES)]) % size]
    tokens.append(token)
  return np.asarray(tokens, np.uint8 if size <= 256 else np.int32)
