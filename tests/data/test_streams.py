import json

import numpy as np
import pytest

from dilocox_jax.data.streams import ReplicaStreams

LENGTH = 4
# And a rest of 3 tokens; neither 3 replicas nor batches of 2 divide it.
NUM_SEQUENCES = 1001
TOKENS = np.arange(NUM_SEQUENCES * (LENGTH + 1) + 3, dtype=np.int32)


def streams(seed=0, num_replicas=3, batch_size=2, tokens: np.ndarray = TOKENS):
  return ReplicaStreams(
    tokens,
    num_replicas=num_replicas,
    batch_size=batch_size,
    sequence_length=LENGTH,
    seed=seed,
  )


def sequence_ids(batches):
  """Index in `TOKENS` of each row, after checking that it is a sequence."""
  starts = batches[..., :1]
  np.testing.assert_array_equal(batches, starts + np.arange(LENGTH + 1))
  assert (starts % (LENGTH + 1) == 0).all()
  return starts[..., 0] // (LENGTH + 1)


def test_take_returns_one_batch_a_step_and_replica():
  taken = streams().take(5)
  assert taken.shape == (3, 5, 2, LENGTH + 1)
  assert taken.dtype == np.int32


def test_an_epoch_reads_every_sequence_once_and_no_replica_anothers():
  longest = NUM_SEQUENCES // 3 + 1
  ids = sequence_ids(streams(batch_size=1).take(2 * longest))[..., 0]
  assert (ids % 3 == np.arange(3)[:, None]).all()
  sizes = [len(range(m, NUM_SEQUENCES, 3)) for m in range(3)]
  for epoch in range(2):
    seen = [
      own[epoch * size : (epoch + 1) * size]
      for own, size in zip(ids, sizes, strict=True)
    ]
    np.testing.assert_array_equal(
      np.sort(np.concatenate(seen)), np.arange(NUM_SEQUENCES)
    )


def test_every_epoch_of_every_replica_has_an_order_of_its_own():
  # One sequence more, so that all replicas own equally many.
  tokens = np.arange((NUM_SEQUENCES + 1) * (LENGTH + 1), dtype=np.int32)
  size = len(tokens) // (LENGTH + 1) // 3
  taken = streams(batch_size=1, tokens=tokens).take(2 * size)
  orders = (sequence_ids(taken)[..., 0] // 3).reshape(3 * 2, size).tolist()
  assert len({tuple(order) for order in [*orders, range(size)]}) == 7


def test_the_seed_decides_the_order():
  np.testing.assert_array_equal(streams(7).take(9), streams(7).take(9))
  assert (streams(7).take(9) != streams(8).take(9)).any()


def test_any_integer_is_a_seed():
  assert (streams(-1).take(3) != streams(2**70).take(3)).any()


def test_the_order_does_not_depend_on_how_many_steps_are_taken_at_once():
  parts = streams()
  parts = np.concatenate([parts.take(3), parts.take(0), parts.take(7)], axis=1)
  np.testing.assert_array_equal(streams().take(10), parts)


def test_a_stream_goes_on_where_its_state_was_saved():
  whole = streams().take(40)
  first = streams()
  first.take(17)
  saved = json.loads(json.dumps(first.get_state()))
  second = streams()
  second.set_state(saved)
  np.testing.assert_array_equal(second.take(23), whole[:, 17:])
  first.set_state(streams().get_state())
  np.testing.assert_array_equal(first.take(5), whole[:, :5])


def test_a_replica_reads_the_same_whichever_others_are_read():
  whole = streams().take(20)
  for chosen in ([0], [1], [2, 0]):
    some = streams()
    taken = np.concatenate(
      [some.take(8, replicas=chosen), some.take(12, replicas=chosen)], axis=1
    )
    np.testing.assert_array_equal(taken, whole[chosen])


def test_replicas_move_on_together_whichever_are_read():
  whole = streams().take(20)
  one = streams()
  one.take(8, replicas=[0])
  assert one.get_state()["step"] == 8
  np.testing.assert_array_equal(one.take(12), whole[:, 8:])


@pytest.mark.parametrize(
  ("other", "text"),
  [
    (streams(seed=1), "seed=1 there and 0 here"),
    (streams(num_replicas=2), "num_replicas=2 there and 3 here"),
    (streams(batch_size=1), "batch_size=1 there and 2 here"),
    (streams(tokens=TOKENS[:200]), "num_windows=40 there and 1001 here"),
  ],
)
def test_a_state_of_other_streams_is_refused(other, text):
  with pytest.raises(ValueError, match=text) as error:
    streams().set_state(other.get_state())
  assert "resume with the same data" in str(error.value)


def test_too_little_text_for_a_batch_each_is_an_error_with_both_numbers():
  enough = 6 * (LENGTH + 1)
  streams(tokens=TOKENS[:enough])
  text = (
    "29 training tokens make 5 sequences of 5, but .* need 6: use more text"
  )
  with pytest.raises(ValueError, match=text):
    streams(tokens=TOKENS[: enough - 1])


def test_bytes_become_token_ids():
  # What is above 127 must not turn negative on the way.
  tokens = np.full(NUM_SEQUENCES * (LENGTH + 1), 200, np.uint8)
  assert (streams(tokens=tokens).take(2) == 200).all()
