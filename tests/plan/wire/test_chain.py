"""Bytes by formula; that they are sent is held in contracts/test_codecs."""

import math
import re

import pytest

from dilocox_jax.plan.wire.chain import Chain, links_of, num_bytes
from dilocox_jax.plan.wire.payload import E3M0, Dense, Int
from dilocox_jax.plan.wire.reduction import LowRank, RandomMask, TopK
from tests.plan.sizes import LOCAL, SHARED, wire_bytes

SPARSE_LOCO = Chain((TopK(64 / 4096, 4096), Int(2, "tensor")))


@pytest.mark.parametrize("num_blocks", [1, 3, 250])
def test_sparse_loco_sends_7_bits_for_32_values_and_its_scales_on_top(
  num_blocks,
):
  values = 4096 * num_blocks
  found = wire_bytes(SPARSE_LOCO, "embed", (values,))
  bits = 8 * (found["indices"] + found["codes"]) / values
  assert bits == 0.21875 == 64 * (12 + 2) / 4096
  # Two magnitudes for the whole tensor, whatever its size.
  assert found.pop("scales") == 2 * 2
  assert found.keys() == {"indices", "codes"}


@pytest.mark.parametrize(
  "mask, kept, bits, known", [(0.1, 0.2, 4, 0.1825), (0.4, 0.5, 4, 1.225)]
)
def test_cocktail_sgd_sends_what_its_formula_says(mask, kept, bits, known):
  parts = RandomMask(mask), TopK(kept, 4000, "bitmap"), Int(bits)
  # Blocks of 4000 divide what is drawn, blocks of 128 what is kept.
  values = 6_400_000
  sent = num_bytes(Chain(parts), {"embed": (values,)})
  found = 8 * sent / values
  assert math.isclose(found, mask * (kept * (bits + 16 / 128) + 1))
  assert math.isclose(found, known)


def test_a_chain_without_an_end_sends_fp32():
  assert links_of(RandomMask()) == (RandomMask(), Dense())
  assert Chain((SHARED,)).links == (SHARED, Dense())
  assert links_of(Int(4)) == (Int(4),)


@pytest.mark.parametrize(
  "parts",
  [
    (Int(4), SHARED),
    (TopK(), SHARED, Int(4)),
    (TopK(), RandomMask()),
    (LOCAL, RandomMask()),
    (Int(4), Int(8)),
    (Dense(), E3M0()),
    (Int(4), TopK()),
  ],
)
def test_a_chain_in_the_wrong_order_is_refused_by_name(parts):
  names = " -> ".join(type(part).__name__ for part in parts)
  with pytest.raises(ValueError, match=re.escape(names)) as caught:
    Chain(parts)
  assert "come first" in str(caught.value)
  assert "\n" not in str(caught.value)


def test_a_chain_inside_a_chain_is_one_chain():
  inner = Chain((TopK(), Int(2)))
  assert Chain((SHARED, inner)) == Chain((SHARED, TopK(), Int(2)))
  with pytest.raises(ValueError, match="TopK -> Int -> TopK -> Int"):
    Chain((inner, inner))


def test_a_chain_of_nothing_is_refused():
  with pytest.raises(ValueError, match="at least one link"):
    Chain(())


@pytest.mark.parametrize(
  "parts", [(SHARED, TopK(), Int(2)), (RandomMask(), SHARED), (LOCAL, TopK())]
)
def test_projections_then_selections_then_a_quantiser_is_a_chain(parts):
  assert Chain(parts).links[: len(parts)] == parts


def test_a_second_low_rank_is_refused():
  with pytest.raises(ValueError, match="one low rank at most"):
    Chain((LowRank(4), LowRank(1), Int(2)))
