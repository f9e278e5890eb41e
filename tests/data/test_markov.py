import math

import numpy as np
import pytest

from dilocox_jax.data import markov

VOCAB_SIZE = 16
NUM_TOKENS = 200_000
# The spread of a mean over this many draws of -log p is 0.002 nats; counting
# 64 transitions from the same text biases it by 1e-4 at most.
ENTROPY_TOLERANCE_NATS = 0.01
# The successors of a token have these probabilities: 7/4 bits, in nats.
ENTROPY_NATS = -sum(p * math.log(p) for p in (1 / 2, 1 / 4, 1 / 8, 1 / 8))
# Digest for seed 0 and 1000 tokens, from a second program without numpy.
GOLDEN_DIGEST = "a801deeb65440c84"


@pytest.fixture(scope="module")
def text():
  return markov.synthetic(
    3, num_tokens=NUM_TOKENS, vocab_size=VOCAB_SIZE, validation_fraction=0.5
  )


def bigrams(tokens):
  counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
  np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
  return counts / counts.sum(axis=1, keepdims=True)


def test_a_bigram_model_reaches_the_stated_entropy_and_no_less(text):
  model = bigrams(text.train)
  for part in (text.train, text.validation):
    loss = -np.log(model[part[:-1], part[1:]]).mean()
    assert abs(loss - ENTROPY_NATS) < ENTROPY_TOLERANCE_NATS


def test_no_longer_context_helps(text):
  # Mutual information of tokens two apart, given the one between, is zero.
  trigrams = np.zeros((VOCAB_SIZE,) * 3)
  tokens = text.train
  np.add.at(trigrams, (tokens[:-2], tokens[1:-1], tokens[2:]), 1)
  model = trigrams / np.maximum(trigrams.sum(axis=2, keepdims=True), 1)
  loss = -np.log(model[tokens[:-2], tokens[1:-1], tokens[2:]]).mean()
  assert abs(loss - ENTROPY_NATS) < ENTROPY_TOLERANCE_NATS


def test_all_tokens_are_equally_frequent(text):
  shares = np.bincount(text.train, minlength=VOCAB_SIZE) / NUM_TOKENS
  np.testing.assert_allclose(shares, 1 / VOCAB_SIZE, rtol=0.1)


def test_every_token_has_four_successors(text):
  assert ((bigrams(text.train) > 0).sum(axis=1) == 4).all()


def test_the_parts_are_different_streams_of_the_length_asked_for(text):
  assert len(text.train) == NUM_TOKENS
  assert len(text.validation) == NUM_TOKENS // 2
  agreeing = (text.train[: NUM_TOKENS // 2] == text.validation).mean()
  # Independent streams agree by chance once in VOCAB_SIZE tokens.
  assert agreeing < 2 / VOCAB_SIZE


def test_the_seed_decides_every_token_and_the_digest():
  first, again = (markov.synthetic(5, num_tokens=1000) for _ in range(2))
  other = markov.synthetic(6, num_tokens=1000)
  np.testing.assert_array_equal(first.train, again.train)
  assert first.digest == again.digest != other.digest
  assert (first.train != other.train).any()
  # Another chain, not only another walk: successors are others as well.
  pairs = [
    set(zip(t[:-1], t[1:], strict=True))
    for t in (first.train.tolist(), other.train.tolist())
  ]
  assert len(pairs[0] & pairs[1]) < len(pairs[0]) / 2


def test_a_longer_text_begins_with_the_shorter_one():
  short, long = (markov.synthetic(num_tokens=n) for n in (1000, 2000))
  np.testing.assert_array_equal(long.train[:1000], short.train)


def test_no_release_of_python_or_numpy_changes_a_token():
  assert markov.synthetic(0, num_tokens=1000).digest == GOLDEN_DIGEST


@pytest.mark.parametrize("vocab_size", [4, 256, 1000])
def test_tokens_stay_below_the_vocabulary(vocab_size):
  drawn = markov.synthetic(num_tokens=20_000, vocab_size=vocab_size)
  assert drawn.train.max() == vocab_size - 1
  assert drawn.train.min() == 0
  assert drawn.vocab_size == vocab_size


@pytest.mark.parametrize(
  ("num_tokens", "vocab_size"), [(0, 64), (100, 3)], ids=["tokens", "vocab"]
)
def test_a_text_that_cannot_be_drawn_is_refused(num_tokens, vocab_size):
  with pytest.raises(ValueError, match=f"={num_tokens} .*={vocab_size} "):
    markov.synthetic(num_tokens=num_tokens, vocab_size=vocab_size)
