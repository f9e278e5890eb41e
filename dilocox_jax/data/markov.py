"""Text whose entropy is known exactly, for tests and golden values.

The embedded corpus changes with Python's version, and nobody knows its
entropy. This one is the same everywhere, and a model's loss on it has a floor
to be compared with.
"""

import hashlib
import math

import numpy as np

from dilocox_jax.data.corpus import (
  VALIDATION_FRACTION,
  Corpus,
  check_fraction,
  digest_of,
)

# Which of a token's four successors an eighth of the draws picks.
_BRANCHES = (0, 0, 0, 0, 1, 1, 2, 3)


def synthetic(
  seed: int = 0,
  *,
  num_tokens: int = 2**20,
  vocab_size: int = 64,
  validation_fraction: float = VALIDATION_FRACTION,
) -> Corpus:
  """Draws text of known entropy from a first-order Markov chain.

  A token t is followed by one of four tokens p[t], p[t+1], p[t+2], p[t+3]
  with probabilities 1/2, 1/4, 1/8, 1/8, where p is a shuffle of the
  vocabulary. Every token is followed, and preceded, with the same four
  probabilities, so all tokens are equally frequent. All randomness is a
  standard hash of the seed: no version of Python or numpy changes a token.

  Args:
    seed: Chooses the shuffle and both streams.
    num_tokens: Training tokens.
    vocab_size: Tokens in the vocabulary, 4 or more.
    validation_fraction: Validation tokens for each training token.

  Returns:
    Two independent streams of one chain.

  Raises:
    ValueError: There are no tokens, or the vocabulary is too small.
  """
  check_fraction(validation_fraction)
  num_held_out = math.ceil(num_tokens * validation_fraction)
  if num_tokens < 1 or vocab_size < 4:
    raise ValueError(
      f"num_tokens={num_tokens} must be at least 1 and vocab_size={vocab_size}"
      " at least 4"
    )
  keys = np.frombuffer(_noise(f"{seed}/chain", 8 * vocab_size), "<u8")
  table = np.argsort(keys, kind="stable").tolist()
  train = _walk(table, f"{seed}/train", num_tokens)
  validation = _walk(table, f"{seed}/validation", num_held_out)
  parts = {"train": train, "validation": validation}
  little_endian = train.dtype.newbyteorder("<")
  return Corpus(
    name="synthetic",
    train=train,
    validation=validation,
    digest=digest_of(
      {name: p.astype(little_endian).tobytes() for name, p in parts.items()}
    ),
    vocab_size=vocab_size,
    num_files=0,
  )


def synthetic_entropy_nats() -> float:
  """Entropy of a `synthetic` token given the one before it, exactly.

  It is the same for every token, hence the entropy rate of the chain and the
  least loss any model can reach: 7/4 bits, in nats.

  Returns:
    Nats a token.
  """
  shares = np.bincount(_BRANCHES) / len(_BRANCHES)
  return float(-np.sum(shares * np.log(shares)))


def _noise(key: str, num_bytes: int) -> bytes:
  return hashlib.shake_256(f"synthetic/{key}".encode()).digest(num_bytes)


def _walk(table: list[int], key: str, num_tokens: int) -> np.ndarray:
  size = len(table)
  token = int.from_bytes(_noise(f"{key}/start", 8), "big") % size
  tokens = []
  for draw in _noise(key, num_tokens):
    token = table[(token + _BRANCHES[draw % len(_BRANCHES)]) % size]
    tokens.append(token)
  return np.asarray(tokens, np.uint8 if size <= 256 else np.int32)
