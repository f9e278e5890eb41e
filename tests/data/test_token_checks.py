"""Token ids are held against what knows them, batch by batch."""

import numpy as np
import pytest

from dilocox_jax.data.streams import ReplicaStreams
from dilocox_jax.data.token_checks import (
  CheckedBatches,
  CheckedStreams,
  check_token_batch,
)
from dilocox_jax.token_ids import TokenError, Vocabulary, check_token_ids

FIFTY = Vocabulary(50, "vocab_size=50")


@pytest.mark.parametrize(
  ("tokens", "message"),
  [
    (np.array([[3, 50]]), "go from 3 to 50, but vocab_size=50 allows 0 to 49"),
    (np.array([-1, 4]), "go from -1 to 4, but vocab_size=50 allows 0 to 49"),
    (np.array([0.0, 1.0]), "are float64: pass integers"),
    (np.array([True]), "are bool: pass integers"),
    (np.array([-100, 4]), "go from -100 to 4, but vocab_size=50 .* 49"),
    (
      np.array([2**63 + 11], np.uint64),
      "go from .* to 9223372036854775819, .*",
    ),
  ],
)
def test_ids_that_are_not_known_are_one_line(tokens, message):
  with pytest.raises(TokenError, match=f"^tokens of x {message}$"):
    check_token_ids(tokens, FIFTY, "tokens of x")


def test_ids_at_the_ends_are_known():
  for tokens in ([0, 49], np.zeros((0, 3), int), np.array([49], np.uint8)):
    check_token_ids(np.asarray(tokens), FIFTY, "tokens")


@pytest.mark.parametrize(
  ("batch", "message"),
  [
    ({"image": np.ones(3)}, "is a dict of arrays: without loss="),
    (np.ones((2, 3)), r"is float64\[2, 3\]: without loss="),
    (np.ones(8, int), r"is int64\[8\]: without loss="),
    (np.ones((2, 3, 4), int), r"is int64\[2, 3, 4\]: without loss="),
    (np.ones((2, 1), int), "rows of one token"),
    (np.ones((0, 6), int), "has no rows"),
  ],
)
def test_a_batch_that_is_no_rows_of_tokens_is_one_line(batch, message):
  with pytest.raises(ValueError, match=f"^a batch .*{message}"):
    check_token_batch(batch, "a batch")
  check_token_batch(np.ones((2, 2), np.uint8), "a batch")


def test_streams_and_held_out_batches_are_checked_as_they_are_read():
  tokens = np.arange(400) % 50
  tokens[350] = 50

  def streams():
    return ReplicaStreams(
      tokens, num_replicas=2, batch_size=4, sequence_length=9, seed=0
    )

  checked = CheckedStreams(streams(), FIFTY)
  plain = streams()
  with pytest.raises(TokenError, match="tokens of a training batch go from"):
    checked.take(5)  # An epoch.
  checked = CheckedStreams(streams(), Vocabulary(51, "vocab_size=51"))
  np.testing.assert_array_equal(checked.take(5), plain.take(5))
  assert checked.get_state() == plain.get_state()
  checked.set_state({"step": 2})
  assert checked.get_state() == {"step": 2}
  batches = CheckedBatches([tokens[:40], tokens[340:380]], FIFTY)
  for _ in range(2):
    read = iter(batches)
    assert next(read).shape == (40,)
    with pytest.raises(TokenError, match="a validation batch go from 1 to 50"):
      next(read)
