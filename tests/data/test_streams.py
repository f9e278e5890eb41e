import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox_jax.data.streams import ReplicaStreams, mix_of

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


def part_sizes(num_sequences):
  """Tokens of parts, each with a rest that makes no sequence."""
  return [count * (LENGTH + 1) + 2 for count in num_sequences]


def mixed(counts, mix, **options):
  """Streams of parts, with numbers that rise from part to part."""
  sizes = part_sizes(counts)
  return ReplicaStreams(
    np.arange(sum(sizes), dtype=np.int32),
    num_replicas=len(mix),
    sequence_length=LENGTH,
    parts=sizes,
    mix=[[float(weight) for weight in row] for row in mix],
    **({"batch_size": 1, "seed": 0} | options),
  )


def part_and_id(batches, counts):
  """The part of every sequence, and its number there."""
  starts = np.cumsum([0, *part_sizes(counts)])
  first = batches[..., 0]
  np.testing.assert_array_equal(batches, first[..., None] + np.arange(5))
  part = np.searchsorted(starts, first, side="right") - 1
  number, rest = np.divmod(first - starts[part], LENGTH + 1)
  assert not rest.any() and (number < np.asarray(counts)[part]).all()
  return part, number


@settings(deadline=None, max_examples=10)
@given(st.data())
def test_replicas_share_no_example_within_an_epoch_of_any_mix(data):
  num_replicas = data.draw(st.integers(1, 4))
  counts = data.draw(st.lists(st.integers(4, 12), min_size=1, max_size=3))
  weights = st.lists(
    st.sampled_from([0.0, 0.25, 1.0, 3.0]),
    min_size=len(counts),
    max_size=len(counts),
  ).filter(any)
  rows = st.lists(weights, min_size=num_replicas, max_size=num_replicas)
  mix = data.draw(rows)
  made = mixed(counts, mix, seed=data.draw(st.integers(0, 9)))
  taken = made.take(50)[:, :, 0]
  parts, numbers = part_and_id(taken, counts)
  for p, count in enumerate(counts):
    seen = []
    for m, row in enumerate(mix):
      own = numbers[m][parts[m] == p]
      share = len(
        range(
          sum(bool(r[p]) for r in mix[:m]),
          count,
          max(1, sum(bool(r[p]) for r in mix)),
        )
      )
      assert bool(len(own)) <= bool(row[p])
      epoch = own[:share]
      assert len(set(epoch)) == len(epoch)
      seen += list(set(own))
      # A whole epoch has every example of the replica's share.
      if len(own) >= share and row[p]:
        assert len(set(epoch)) == share
    assert len(seen) == len(set(seen))


def test_a_replica_reads_the_parts_in_proportion_to_its_weights():
  counts = [40, 40, 40]
  made = mixed(counts, [[3, 1, 0], [0, 1, 1]], batch_size=4)
  parts, _ = part_and_id(made.take(25), counts)
  shares = [np.bincount(own.ravel(), minlength=3) / 100 for own in parts]
  np.testing.assert_allclose(shares, [[0.75, 0.25, 0], [0, 0.5, 0.5]])


def test_parts_of_a_mix_that_are_one_are_the_plain_stream():
  plain = ReplicaStreams(
    np.arange(5 * 40 + 2),
    num_replicas=2,
    batch_size=3,
    sequence_length=LENGTH,
    seed=0,
  )
  one = mixed([40], [[1.0], [1.0]], batch_size=3)
  np.testing.assert_array_equal(one.take(30), plain.take(30))
  assert one.get_state() == plain.get_state()


def test_a_stream_of_another_mix_is_not_gone_on_with():
  made = mixed([20, 20], [[1, 0], [0, 1]])
  made.take(7)
  state = json.loads(json.dumps(made.get_state()))
  again = mixed([20, 20], [[1, 0], [0, 1]])
  again.set_state(state)
  np.testing.assert_array_equal(again.take(9), made.take(9))
  with pytest.raises(ValueError, match="mix="):
    mixed([20, 20], [[1, 1], [0, 1]]).set_state(state)


def test_the_form_of_a_mix():
  assert mix_of("", 2, 3) is None
  assert mix_of("own", 3, 2) == [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
  assert mix_of("0.7,0.3", 2, 2) == [[0.7, 0.3]] * 2
  assert mix_of("1,0; 0,2", 2, 2) == [[1.0, 0.0], [0.0, 2.0]]


@pytest.mark.parametrize(
  ("mix", "num_parts", "text"),
  [
    ("own", 1, "needs several parts"),
    ("own", 3, "would leave out some of 3 parts"),
    ("1,2,3", 2, "must be 'own', or 2 weights"),
    ("1,0;0,1;1,1", 2, "each of 2 replicas"),
    ("0,0", 2, "must be"),
    ("-1,2", 2, "must be"),
    ("1,nan", 2, "must be"),
    ("a,b", 2, "must be"),
  ],
)
def test_a_mix_of_another_form_is_one_line(mix, num_parts, text):
  with pytest.raises(ValueError, match=text) as error:
    mix_of(mix, 2, num_parts)
  assert "\n" not in str(error.value)


def test_a_part_with_less_than_a_batch_for_each_reader_is_refused():
  mixed([4, 2], [[1, 1], [1, 0]], batch_size=2)
  with pytest.raises(ValueError, match="make 3 sequences of 5, but 2 replicas"):
    mixed([4, 3], [[1, 1], [1, 1]], batch_size=2)


@pytest.mark.parametrize("mix", [None, [[1, 1], [0, 1], [1, 0]]])
@pytest.mark.parametrize("num_workers", [1, 4])
def test_workers_and_processes_change_no_batch(num_workers, mix):
  def made(num_workers):
    if mix:
      return mixed([50, 70], mix, batch_size=2, num_workers=num_workers)
    return ReplicaStreams(
      TOKENS,
      num_replicas=3,
      batch_size=2,
      sequence_length=LENGTH,
      seed=0,
      num_workers=num_workers,
    )

  expected = made(0).take(60)
  # One process reads all replicas, or each of two reads its own.
  for chosen in (None, [0], [1, 2]):
    rows = [0, 1, 2] if chosen is None else chosen
    working = made(num_workers)
    taken = [working.take(n, chosen) for n in (20, 20, 3, 7)]
    state = working.get_state()
    taken.append(working.take(4, chosen))
    working.set_state(state)  # What was read ahead is not what comes now.
    taken.append(working.take(10, chosen))
    whole = np.concatenate(taken[:4] + taken[5:], axis=1)
    np.testing.assert_array_equal(whole, expected[rows])
    np.testing.assert_array_equal(taken[4], expected[rows, 50:54])


READER = """
import hashlib, sys
import numpy as np
from dilocox_jax.data.streams import ReplicaStreams

num_workers, replicas = int(sys.argv[1]), list(map(int, sys.argv[2:]))
streams = ReplicaStreams(
  np.arange(5 * 1001 + 3),
  num_replicas=2,
  batch_size=2,
  sequence_length=4,
  seed=0,
  num_workers=num_workers,
)
batches = np.concatenate([streams.take(n, replicas) for n in (9, 2, 9)], axis=1)
for own in batches:
  print(hashlib.sha256(own.tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_one_process_or_two_of_any_workers_read_the_same():
  def digests(num_workers, *replicas):
    arguments = map(str, (num_workers, *replicas))
    done = subprocess.run(
      [sys.executable, "-c", READER, *arguments],
      capture_output=True,
      text=True,
      check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()

  both = digests(0, 0, 1)
  assert len(set(both)) == 2
  for num_workers in (0, 1, 4):
    assert digests(num_workers, 0, 1) == both
    assert digests(num_workers, 0) + digests(num_workers, 1) == both


def test_what_fails_in_a_worker_is_raised_where_it_is_taken():
  made = ReplicaStreams(
    TOKENS,
    num_replicas=1,
    batch_size=2,
    sequence_length=LENGTH,
    seed=0,
    num_workers=2,
  )
  made._windows = made._windows[:3]
  with pytest.raises(IndexError):
    made.take(50)


def held_pages_kb(path):
  """Memory (kB) of this process that is mapped from a file."""
  smaps = pathlib.Path("/proc/self/smaps")
  if not smaps.exists():
    pytest.skip("only Linux says which pages a process holds")
  blocks = smaps.read_text().split(str(path))[1:]
  sizes = [re.search(r"Rss:\s+(\d+) kB", block) for block in blocks]
  return sum(int(size.group(1)) for size in sizes if size)


def test_pages_of_a_file_that_were_read_are_not_held(tmp_path):
  path = tmp_path / "tokens"
  path.write_bytes(bytes(range(256)) * 2**17)  # 32 MB.
  tokens = np.memmap(path, np.uint8, "r")
  tokens.sum()
  assert held_pages_kb(path) > 30_000
  made = ReplicaStreams(
    tokens, num_replicas=2, batch_size=4, sequence_length=128, seed=0
  )
  made.take(60)
  assert held_pages_kb(path) < 8_000


def test_a_common_mix_goes_on_with_another_number_of_replicas():
  state = mixed((400, 600), [[0.7, 0.3]] * 3).get_state()
  mixed((400, 600), [[0.7, 0.3]] * 2).set_state(state)
  with pytest.raises(ValueError, match="is of other streams"):
    mixed((400, 600), [[0.6, 0.4]] * 3).set_state(state)
  with pytest.raises(ValueError, match="is of other streams"):
    mixed((400, 600), [[0.7, 0.3], [0.3, 0.7]]).set_state(state)
