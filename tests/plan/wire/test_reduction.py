"""Bytes by formula; that they are sent is held in contracts/test_codecs."""

import math
import re

import pytest

from dilocox_jax.plan.wire.chain import Chain, leaf_messages, num_bytes
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import Dense, Int
from dilocox_jax.plan.wire.reduction import LowRank, RandomMask, TopK
from tests.plan.sizes import LOCAL, SHARED, wire_bytes


def test_low_rank_sends_both_factors_once_a_power_iteration():
  matrix = {"blocks/w": (3, 20, 30)}
  factors = 4 * 3 * 2 * (20 + 30)
  assert num_bytes(SHARED, matrix) == factors
  assert num_bytes(LowRank(2, 4), matrix) == 4 * factors
  assert num_bytes(LowRank(2, 4, "local"), matrix) == factors


@pytest.mark.parametrize("low_rank", [SHARED, LOCAL])
@pytest.mark.parametrize("shape", [(), (50,), (2, 20, 30), (4, 4), (1, 9)])
def test_what_is_no_matrix_or_too_thin_for_factors_is_sent_whole(
  low_rank, shape
):
  dense = num_bytes(Dense(), {"w": shape})
  assert num_bytes(low_rank, {"w": shape}) == dense


def test_factors_are_used_only_where_they_hold_fewer_values():
  assert not LowRank(2).factorises(Leaf(1, (4, 4)))  # 16 values for 16
  assert LowRank(2).factorises(Leaf(1, (4, 5)))  # 18 for 20
  assert not LowRank(3).factorises(Leaf(1, (4, 5)))


def test_shared_factors_take_turns_and_local_ones_travel_together():
  leaf = Leaf(3, (20, 30))
  left, right = Leaf(3, (20, 2)), Leaf(3, (30, 2))
  shared = leaf_messages(Chain((LowRank(2, 2), Int(4))), leaf)
  assert [part for _, part in shared] == [left, right, left, right]
  assert {encoding.links for encoding, _ in shared} == {(Int(4),)}
  ((encoding, whole),) = leaf_messages(Chain((LOCAL, Int(4))), leaf)
  assert whole == leaf
  assert encoding.links == (LOCAL, Int(4))
  assert encoding.num_bytes(leaf) == sum(
    part.num_bytes(leaf) for part, leaf in shared[:2]
  )


def test_top_k_keeps_at_least_one_value_and_indexes_it_in_at_least_a_bit():
  top = TopK(0.01, 16)
  assert [top.num_kept(width) for width in (1, 16, 300)] == [1, 1, 3]
  bits = [top.index_bits(width) for width in (1, 2, 3, 16, 17)]
  assert bits == [1, 1, 2, 4, 5]


def test_a_bitmap_has_a_bit_a_value_however_many_are_kept():
  for fraction in (0.1, 1.0):
    found = wire_bytes(TopK(fraction, 20, "bitmap"), "blocks/w", (3, 40))
    assert found["indices"] == 3 * 2 * 3  # 20 bits are 3 bytes
    assert found["values"] == 3 * 2 * round(20 * fraction) * 4


def test_a_random_mask_sends_no_more_than_its_values():
  found = wire_bytes(RandomMask(0.25), "blocks/w", (3, 40))
  assert found == {"values": 3 * 10 * 4}


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda: LowRank(0), "rank=0 must be at least 1"),
    (lambda: LowRank(power_iterations=0), "power_iterations=0 must be"),
    (lambda: LowRank(2, 1, "own"), "factorisation='own' must be one of"),
    (lambda: TopK(0.0), "fraction=0.0 must be above 0 and at most 1"),
    (lambda: TopK(1.5), "fraction=1.5 must be above 0 and at most 1"),
    (lambda: TopK(block_size=0), "block_size=0 must be at least 1"),
    (lambda: TopK(indices="runs"), "indices='runs' must be one of packed"),
    (lambda: RandomMask(math.nan), "fraction=nan must be above 0"),
  ],
)
def test_a_bad_attribute_is_refused_with_what_it_may_be(make, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    make()
