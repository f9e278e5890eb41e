import pytest

from dilocox_jax.plan.collective import (
  PARTS,
  Collective,
  stretch_ends,
  stretches,
)


def ring_all_reduce(operand_bytes, num_replicas):
  """Bytes each replica sends, chunk by chunk, where chunks are equal."""
  chunk = operand_bytes // num_replicas
  return sum(2 * chunk for _ in range(num_replicas - 1))


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_a_ring_sends_what_its_hops_add_up_to(num_replicas):
  size = 24 * num_replicas
  sent = {
    kind: Collective(kind, size).sent_bytes(num_replicas)
    for kind in ("all_reduce", "all_gather", "all_to_all")
  }
  assert sent["all_reduce"] == ring_all_reduce(size, num_replicas)
  assert sent["all_gather"] == (num_replicas - 1) * size
  assert 2 * sent["all_to_all"] == sent["all_reduce"]


def test_a_part_of_a_byte_counts_as_one():
  assert Collective("all_reduce", 10).sent_bytes(3) == 14  # 13.33
  assert Collective("all_to_all", 10).sent_bytes(3) == 7  # 6.67


def test_steps_behind_an_exchange_are_divided_by_bytes():
  operations = [
    Collective("all_gather", 2_000_000),
    Collective("all_gather", 1_000_000),
    Collective("all_gather", 1_000_000, 1),
  ]
  ends = stretch_ends(operations, 2)
  assert ends == (PARTS * 3 // 4, PARTS)
  assert list(stretches(8, ends)) == [6, 2]
  # A single step hides the larger one.
  assert list(stretches(1, ends)) == [1, 0]
  assert sum(stretches(125, ends)) == 125
  # A third of the bytes takes one step of two or three, and not none.
  thirds = stretch_ends(
    [Collective("all_gather", 1), Collective("all_gather", 2, 1)], 2
  )
  assert list(stretches(2, thirds)) == [1, 1]
  assert list(stretches(3, thirds)) == [1, 2]


def test_turns_without_bytes_have_equal_stretches():
  operations = [Collective("all_gather", 8, turn) for turn in range(2)]
  assert list(stretches(10, stretch_ends(operations, 1))) == [5, 5]
  assert list(stretches(10, stretch_ends([], 2))) == [10]


def test_a_copy_of_one_replica_passes_everybody_once():
  copy = Collective("broadcast", 12)
  assert [copy.sent_bytes(m) for m in (1, 2, 5)] == [0, 12, 12]
