import re

import pytest

from dilocox_jax.plan.wire.chain import Chain, Encoding, num_bytes
from dilocox_jax.plan.wire.collectives import (
  COLLECTIVES,
  PARTS,
  Collective,
  check_collective,
  chosen_collective,
  collectives,
  stretch_ends,
  stretches,
)
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import Dense, Int
from dilocox_jax.plan.wire.reduction import LowRank, RandomMask, TopK

FP32 = Encoding((Dense(),))
FP16 = Encoding((Dense("float16"),))
INT4 = Encoding((Int(4),))
SPARSE = Encoding((TopK(), Int(2)))
SHAPES = {"embed": (30, 20), "blocks/w": (3, 20, 10), "blocks/b": (3, 7)}


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


@pytest.mark.parametrize(
  "encoding, two, three",
  [
    (FP32, "all_reduce", "all_reduce"),
    (FP16, "all_gather", "reduce_scatter"),
    (INT4, "all_gather", "reduce_scatter"),
    (SPARSE, "all_gather", "all_gather"),
  ],
)
def test_the_choice_by_itself_follows_from_the_encoding(encoding, two, three):
  found = [chosen_collective(encoding, "auto", m) for m in (2, 3, 8)]
  assert found == [two, three, three]


@pytest.mark.parametrize("num_replicas", [2, 3, 5])
@pytest.mark.parametrize("encoding", [FP16, INT4])
def test_the_choice_by_itself_sends_no_more_than_another(
  encoding, num_replicas
):
  payload, shapes = encoding.links[0], {"w": (128 * 5 * 3 * 2,)}
  sent = {
    choice: sum(
      part.sent_bytes(num_replicas)
      for part in collectives(payload, shapes, num_replicas, choice)
    )
    for choice in ("auto", "all_gather", "reduce_scatter")
  }
  assert sent["auto"] == min(sent.values())


@pytest.mark.parametrize(
  "encoding, possible",
  [
    (FP32, {"all_reduce", "all_gather", "reduce_scatter"}),
    (FP16, {"all_reduce", "all_gather", "reduce_scatter"}),
    (INT4, {"all_gather", "reduce_scatter"}),
    (SPARSE, {"all_gather"}),
  ],
)
def test_a_choice_is_kept_where_it_is_possible(encoding, possible):
  for choice in set(COLLECTIVES) - {"auto"}:
    if choice in possible:
      assert chosen_collective(encoding, choice, 2) == choice
    else:
      with pytest.raises(ValueError, match=f"collective='{choice}'"):
        chosen_collective(encoding, choice, 2)


@pytest.mark.parametrize(
  "payload, choice, message",
  [
    (Int(4), "all_reduce", "collective='all_reduce' would add up codes: take"),
    (TopK(), "reduce_scatter", "selects values: take 'all_gather'"),
    (Dense(), "ring", "collective='ring' must be one of auto, all_reduce, "),
    (
      Chain((LowRank(2), Int(4))),
      "all_reduce",
      "collective='all_reduce' would add up codes: take",
    ),
  ],
)
def test_a_payload_that_cannot_travel_that_way_is_refused_at_once(
  payload, choice, message
):
  with pytest.raises(ValueError, match=re.escape(message)):
    check_collective(payload, choice)
  with pytest.raises(ValueError, match=re.escape(message)):
    collectives(payload, SHAPES, 2, choice)


def test_sixteen_bits_do_not_count_any_number_of_replicas():
  assert chosen_collective(FP16, "all_reduce", 256) == "all_reduce"
  assert chosen_collective(FP32, "all_reduce", 257) == "all_reduce"
  with pytest.raises(ValueError, match="at most 256 replicas in 16 bits"):
    chosen_collective(FP16, "all_reduce", 257)


@pytest.mark.parametrize("projection", [LowRank(2), RandomMask(0.5)])
def test_projections_may_be_added_up_if_what_they_carry_may(projection):
  check_collective(projection, "all_reduce")
  parts = collectives(projection, SHAPES, 4)
  assert {part.kind for part in parts} == {"all_reduce"}
  flags = 4 * len(parts)
  total = sum(part.operand_bytes for part in parts)
  assert total == num_bytes(projection, SHAPES) + flags


def test_what_is_asked_for_in_turn_is_sent_in_turn():
  # Both factors of [30, 20] at rank 2 in 8 bits, a scale each 128 values.
  factors = Chain((LowRank(2), Int(8)))
  found = collectives(factors, {"w": (30, 20), "u": (30, 20)}, 2)
  sizes = [2 * (values + 2) + 1 for values in (60, 40)]
  assert found == [
    Collective("all_gather", size, turn) for turn, size in enumerate(sizes)
  ]


def test_means_that_are_gathered_have_a_turn_of_their_own():
  factors = Chain((LowRank(2), Int(8)))
  found = collectives(factors, {"w": (30, 20), "b": (7,)}, 3)
  assert [(each.kind, each.turn) for each in found] == [
    ("all_to_all", 0),
    ("all_gather", 1),
    ("all_to_all", 2),
    ("all_gather", 3),
  ]


def test_steps_behind_an_exchange_are_divided_by_bytes():
  operations = [
    Collective("all_gather", 2_000_000),
    Collective("all_gather", 1_000_000),
    Collective("all_gather", 1_000_000, 1),
  ]
  ends = stretch_ends(operations, 2)
  assert ends == (PARTS * 3 // 4, PARTS)
  assert list(stretches(8, ends)) == [6, 2]
  assert list(stretches(1, ends)) == [0, 1]
  assert sum(stretches(125, ends)) == 125


def test_turns_without_bytes_have_equal_stretches():
  operations = [Collective("all_gather", 8, turn) for turn in range(2)]
  assert list(stretches(10, stretch_ends(operations, 1))) == [5, 5]
  assert list(stretches(10, stretch_ends([], 2))) == [10]


def test_leaves_are_cut_into_equal_chunks_across_layers():
  leaf = Leaf(3, (7, 5))
  assert INT4.links[0].slices(leaf, 4) == Leaf(
    4, (27,)
  )  # 105 values and 3 zeros
  assert FP16.links[0].slices(leaf, 5) == Leaf(5, (21,))


def test_rows_that_share_a_scale_are_not_cut():
  rows = Encoding((Int(4, "row"),))
  assert rows.links[0].slices(Leaf(3, (7, 5)), 4) == Leaf(4, (6, 5))
  assert rows.links[0].slices(Leaf(3, ()), 2) == Leaf(2, (2, 1))


def test_what_is_gathered_is_the_payload():
  payload = Chain((TopK(0.1, 64), Int(2)))
  (part,) = collectives(payload, SHAPES, 5)
  flag = 1
  assert part == Collective("all_gather", num_bytes(payload, SHAPES) + flag)


def test_scattering_exchanges_chunks_and_gathers_their_means():
  # A third of 600 values: two blocks of 100 in 4 bits, with a scale each.
  chunk_bytes = 2 * (50 + 2)
  shapes = {"w": (30, 20)}
  found = collectives(Int(4), shapes, 3)
  assert found == [
    Collective("all_to_all", 3 * (chunk_bytes + 1)),  # A flag for each owner.
    Collective("all_gather", chunk_bytes, turn=1),
  ]


def test_a_phase_is_one_message_each_way_however_many_leaves():
  mixed = Chain((RandomMask(0.5), Int(4)))
  kinds = [part.kind for part in collectives(mixed, SHAPES, 3)]
  assert sorted(kinds) == ["all_gather", "all_to_all"]


def test_a_copy_of_one_replica_passes_everybody_once():
  copy = Collective("broadcast", 12)
  assert [copy.sent_bytes(m) for m in (1, 2, 5)] == [0, 12, 12]
