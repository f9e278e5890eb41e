"""Batches of replicas, and the sequences of evaluations."""

import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest

from dilocox_jax.data.streams import ReplicaStreams, held_out_batches, mix_of

LENGTH = 4
WIDTH = LENGTH + 1
# And a rest of 3 tokens; neither 3 replicas nor batches of 2 divide it.
NUM_SEQUENCES = 101
TOKENS = np.arange(NUM_SEQUENCES * WIDTH + 3, dtype=np.int32)
# Parts of a text, and weights of three replicas for each of them.
COUNTS = (20, 40, 31)
MIX = ((3.0, 1.0, 0.0), (0.0, 1.0, 1.0), (0.0, 1.0, 0.0))


def streams(tokens: np.ndarray = TOKENS, **options):
  usual: dict[str, Any] = {"num_replicas": 3, "batch_size": 2, "seed": 0}
  return ReplicaStreams(tokens, sequence_length=LENGTH, **usual | options)


def mixed(counts=COUNTS, mix=MIX, **options):
  """Streams of parts with numbers that rise, each with a rest of 2 tokens."""
  sizes = [count * WIDTH + 2 for count in counts]
  tokens = np.arange(sum(sizes), dtype=np.int32)
  weights = [[float(weight) for weight in row] for row in mix]
  options = {"parts": sizes, "num_replicas": len(mix), "mix": weights} | options
  return streams(tokens, **options)


def places(batches, counts=(NUM_SEQUENCES,)):
  """Part and number of every sequence, after checking that it is one."""
  starts = np.cumsum([0, *(count * WIDTH + 2 for count in counts)])
  first = batches[..., 0]
  np.testing.assert_array_equal(batches, first[..., None] + np.arange(WIDTH))
  part = np.searchsorted(starts, first, side="right") - 1
  number, rest = np.divmod(first - starts[part], WIDTH)
  assert not rest.any() and (number < np.asarray(counts)[part]).all()
  return part, number


def refused(text, function, *arguments, **options):
  with pytest.raises(ValueError, match=text) as error:
    function(*arguments, **options)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("counts", "mix"),
  [((NUM_SEQUENCES,), ((1.0,),) * 3), ((24, 18), ((1, 1),) * 2), (COUNTS, MIX)],
)
def test_an_epoch_reads_every_sequence_once_and_no_replica_anothers(
  counts, mix
):
  taken = mixed(counts, mix, batch_size=1).take(160)
  assert taken.shape == (len(mix), 160, 1, WIDTH) and taken.dtype == np.int32
  parts, numbers = (found[..., 0] for found in places(taken, counts))
  orders = []
  for p, count in enumerate(counts):
    readers = [m for m, row in enumerate(mix) if row[p]]
    for m in range(len(mix)):
      own = numbers[m][parts[m] == p]
      assert abs(np.mean(parts[m] == p) - mix[m][p] / sum(mix[m])) < 0.01
      if m not in readers:
        continue
      expected = list(range(readers.index(m), count, len(readers)))
      for epoch in range(len(own) // len(expected)):
        order = own[epoch * len(expected) :][: len(expected)].tolist()
        assert sorted(order) == expected != order
        orders.append((p, *(number // len(readers) for number in order)))
  # Every epoch of every replica has an order of its own.
  assert len(set(orders)) == len(orders) > 2 * len(counts)


def test_the_seed_decides_the_order():
  same, again, *others = (
    streams(seed=seed).take(9).tobytes() for seed in (7, 7, 8, -1, 2**70)
  )
  assert same == again and len({same, *others}) == 4


@pytest.mark.parametrize("make", [streams, mixed])
def test_neither_processes_nor_a_restart_change_a_batch(make):
  expected = make().take(24)
  for chosen in (None, [0], [2, 1]):
    rows = [0, 1, 2] if chosen is None else chosen
    before = make()
    again = make()
    taken = [before.take(n, chosen) for n in (5, 0, 8, 1)]
    again.set_state(json.loads(json.dumps(before.get_state())))
    whole = np.concatenate([*taken, again.take(10, chosen)], axis=1)
    np.testing.assert_array_equal(whole, expected[rows])


def test_too_little_text_for_a_batch_each_is_an_error():
  streams(TOKENS[: 6 * WIDTH])
  refused("make 5 sequences of 5, but .* need 6", streams, TOKENS[:29])
  mixed((4, 2), [[1, 1], [1, 0]])
  refused("3 sequences of 5, but 2", mixed, (4, 3), [[1, 1], [1, 1]])


def test_the_form_of_a_mix():
  assert mix_of("", 2, 3) is None
  assert mix_of("own", 3, 2) == [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
  assert mix_of("0.7,0.3", 2, 2) == [[0.7, 0.3]] * 2
  assert mix_of("1,0; 0,2", 2, 2) == [[1.0, 0.0], [0.0, 2.0]]
  refused("needs several parts", mix_of, "own", 2, 1)
  refused("leave out some of 3 parts", mix_of, "own", 2, 3)
  for bad in ("1,2,3", "1,0;0,1;1,1", "0,0", "-1,2", "1,nan", "1,inf", "a,b"):
    refused("must be 'own', or 2 weights", mix_of, bad, 2, 2)


def test_pages_of_a_file_that_were_read_are_not_held(tmp_path):
  smaps = pathlib.Path("/proc/self/smaps")
  path = tmp_path / "tokens"
  if not smaps.exists():
    pytest.skip("only Linux says which pages a process holds")

  def held_kb():
    blocks = smaps.read_text().split(str(path))[1:]
    sizes = [re.search(r"Rss:\s+(\d+) kB", block) for block in blocks]
    return sum(int(size.group(1)) for size in sizes if size)

  path.write_bytes(bytes(range(256)) * 2**17)  # 32 MB.
  tokens = np.memmap(path, np.uint8, "r")
  tokens.sum()
  assert held_kb() > 30_000
  streams(tokens, batch_size=4).take(60)
  assert held_kb() < 8_000


def evaluated(tokens: np.ndarray = TOKENS, batch_size=4, max_sequences=20):
  sizes = {"batch_size": batch_size, "sequence_length": LENGTH}
  return held_out_batches(tokens, max_sequences=max_sequences, **sizes)


@pytest.mark.parametrize(
  ("asked", "found"), [(48, 48), (11, 8), (1000, NUM_SEQUENCES // 4 * 4)]
)
def test_validation_takes_whole_batches_evenly_spaced(asked, found):
  (batches,) = evaluated(max_sequences=asked)
  assert batches.shape == (found // 4, 4, WIDTH) and batches.dtype == np.int32
  numbers = places(batches)[1].ravel()
  gap = NUM_SEQUENCES // found
  assert numbers[0] == 0 and set(np.diff(numbers)) <= {gap, gap + 1}
  assert numbers[-1] >= NUM_SEQUENCES - gap - 1


@pytest.mark.parametrize("num_tokens", [2, 5, 6, 7, 41, 42, 44, 400])
def test_a_whole_pass_predicts_every_token_but_the_first_once(num_tokens):
  parts = list(evaluated(TOKENS[:num_tokens], 3, 0))
  predicted = [token for part in parts for token in part[..., 1:].ravel()]
  assert predicted == list(range(1, num_tokens))
  for part in parts:
    np.testing.assert_array_equal(part[..., 1:], part[..., :-1] + 1)
    assert part.dtype == np.int32 and part.shape[1] <= 3
  assert len(parts) <= -(-num_tokens // (3 * LENGTH)) + 1


def test_a_text_without_a_batch_is_refused():
  refused("make 3 sequences .* needs 4", evaluated, TOKENS[:19])
  refused("max_sequences is 3", evaluated, TOKENS, 4, 3)
  refused("none to predict", evaluated, TOKENS[:1], 3, 0)


def test_bytes_become_token_ids():
  # What is above 127 must not turn negative on the way.
  tokens = np.full(NUM_SEQUENCES * WIDTH, 200, np.uint8)
  for taken in (streams(tokens).take(2), *evaluated(tokens)):
    assert (taken == 200).all()


@pytest.mark.parametrize("wrong", [2**32 + 5, -(2**32) + 5])
def test_an_id_above_int32_is_refused_and_never_becomes_another(wrong):
  tokens = np.full(64, 3, np.int64)
  tokens[40] = wrong
  streams = ReplicaStreams(
    tokens, num_replicas=1, batch_size=8, sequence_length=7, seed=0
  )
  with pytest.raises(ValueError, match=f"{wrong}.*int32"):
    streams.take(1)
  for num_sequences in (0, 8):
    with pytest.raises(ValueError, match=f"{wrong}.*int32"):
      list(
        held_out_batches(
          tokens, batch_size=8, sequence_length=7, max_sequences=num_sequences
        )
      )
