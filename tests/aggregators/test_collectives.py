import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.aggregators.collectives import (
  chosen_collective,
  collectives,
  message_bytes,
)
from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.codecs.low_rank import LocalLowRank, LowRank
from dilocox_jax.codecs.quantize import Float, Int
from dilocox_jax.codecs.sparse import RandomMask, TopK
from dilocox_jax.plan.collective import Collective
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.run_plan import RunPlan

FP32 = Float()
FP16 = Float("float16")
INT4 = Int(4)
SPARSE = TopK(then=Int(2))
SHAPES = {"embed": (30, 20), "blocks/w": (3, 20, 10), "blocks/b": (3, 7)}


@pytest.mark.parametrize(
  "codec, two, three, four",
  [
    (FP32, "all_reduce", "all_reduce", "all_reduce"),
    (FP16, "all_gather", "reduce_scatter", "reduce_scatter"),
    (INT4, "all_gather", "reduce_scatter", "reduce_scatter"),
    # Means of signs have two bits: three replicas would save nothing.
    (Int(1), "all_gather", "all_gather", "reduce_scatter"),
    (SPARSE, "all_gather", "all_gather", "all_gather"),
    (LocalLowRank(), "all_gather", "all_gather", "all_gather"),
    (LowRank(), "all_reduce", "all_reduce", "all_reduce"),
    (LowRank(then=INT4), "all_gather", "reduce_scatter", "reduce_scatter"),
  ],
)
def test_the_choice_by_itself_follows_from_codec_and_replicas(
  codec, two, three, four
):
  found = [chosen_collective(codec, "auto", m) for m in (2, 3, 4, 8)]
  assert found == [two, three, four, four]


@pytest.mark.parametrize("num_replicas", [2, 3, 5])
@pytest.mark.parametrize("shape", [(128 * 5 * 3 * 2,), (30, 1280)])
@pytest.mark.parametrize(
  "codec",
  [FP16, INT4, Int(1), Int(8, "tensor"), Int(8, "row"), RandomMask(then=FP16)],
)
def test_the_choice_by_itself_sends_no_more_than_another(
  codec, shape, num_replicas
):
  shapes = {"w": shape}
  sent = {
    choice: sum(
      part.sent_bytes(num_replicas)
      for part in collectives(codec, shapes, num_replicas, choice)
    )
    for choice in ("auto", "all_gather", "reduce_scatter")
  }
  assert sent["auto"] == min(sent.values())


@pytest.mark.parametrize(
  ("codec", "choice", "message"),
  [
    (FP32, "all_gather", ""),
    (FP32, "reduce_scatter", ""),
    (FP16, "all_reduce", ""),
    (INT4, "reduce_scatter", ""),
    (INT4, "all_reduce", "collective='all_reduce' would add up codes: take"),
    (LowRank(then=INT4), "all_reduce", "would add up codes: take"),
    (SPARSE, "all_reduce", "would add up codes: take"),
    (SPARSE, "reduce_scatter", "selects values: take 'all_gather'"),
    (FP32, "ring", "collective='ring' must be one of auto, all_reduce, "),
  ],
)
def test_a_choice_is_kept_where_it_is_possible(codec, choice, message):
  if not message:
    assert chosen_collective(codec, choice, 2) == choice
    return
  with pytest.raises(ValueError, match=re.escape(message)):
    collectives(codec, SHAPES, 2, choice)


def test_sixteen_bits_do_not_count_any_number_of_replicas():
  assert chosen_collective(FP16, "all_reduce", 256) == "all_reduce"
  assert chosen_collective(FP32, "all_reduce", 257) == "all_reduce"
  with pytest.raises(ValueError, match="at most 256 replicas in 16 bits"):
    chosen_collective(FP16, "all_reduce", 257)


@pytest.mark.parametrize("projection", [LowRank(2), RandomMask(0.5)])
def test_projections_may_be_added_up_if_what_they_carry_may(projection):
  parts = collectives(projection, SHAPES, 4, "all_reduce")
  assert {part.kind for part in parts} == {"all_reduce"}
  flags = 4 * len(parts)
  total = sum(part.operand_bytes for part in parts)
  assert total == message_bytes(projection, SHAPES) + flags


def test_what_is_asked_for_in_turn_is_sent_in_turn():
  # Both factors of [30, 20] at rank 2 in 8 bits, a scale each 128 values.
  factors = LowRank(2, then=Int(8))
  found = collectives(factors, {"w": (30, 20), "u": (30, 20)}, 2)
  sizes = [2 * (values + 2) + 1 for values in (60, 40)]
  assert found == [
    Collective("all_gather", size, turn) for turn, size in enumerate(sizes)
  ]


def test_means_that_are_gathered_have_a_turn_of_their_own():
  factors = LowRank(2, then=Int(8))
  found = collectives(factors, {"w": (30, 20), "b": (7,)}, 3)
  assert [(each.kind, each.turn) for each in found] == [
    ("all_to_all", 0),
    ("all_gather", 1),
    ("all_to_all", 2),
    ("all_gather", 3),
  ]


@pytest.mark.parametrize("codec", [TopK(0.1, 64, then=Int(2)), LocalLowRank(2)])
def test_what_is_gathered_is_the_message(codec):
  (part,) = collectives(codec, SHAPES, 5)
  flag = 1
  assert part == Collective("all_gather", message_bytes(codec, SHAPES) + flag)


def test_scattering_exchanges_slices_and_gathers_their_means():
  # 600 values are 5 rows of 120 in 4 bits, with a scale each: two rows a slice.
  slice_bytes = 2 * (60 + 2)
  shapes = {"w": (30, 20)}
  found = collectives(Int(4), shapes, 3)
  assert found == [
    Collective("all_to_all", 3 * (slice_bytes + 1)),  # A flag for each owner.
    Collective("all_gather", slice_bytes, turn=1),
  ]


def test_means_of_signs_travel_in_two_bits():
  # 5 rows of 120: two rows a slice, with a scale each, or two for a mean.
  found = collectives(Int(1), {"w": (30, 20)}, 4)
  assert found == [
    Collective("all_to_all", 4 * (2 * (15 + 2) + 1)),
    Collective("all_gather", 2 * (30 + 4), turn=1),
  ]


# Bytes by formula; that they are sent is held in contracts/test_codecs.


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
def test_floats_have_the_size_of_their_type(dtype, size):
  shapes = {"scalar": (), "blocks/w": (3, 5, 7), "none": (0, 4)}
  assert message_bytes(Float(dtype), shapes) == size * (1 + 105)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_codes_are_packed_a_group_and_layer_at_a_time(bits):
  # 21 values: three blocks of seven.
  a_block = math.ceil(7 * bits / 8) + (4 if bits == 2 else 2)
  for codec, shape, rows in (
    (Int(bits, block_size=10), (5, 3, 7), 15),
    (Int(bits, "row"), (5, 2, 7), 10),
    (Int(bits, "tensor"), (5, 7), 5),
  ):
    assert message_bytes(codec, {"blocks/w": shape}) == rows * a_block


def test_stochastic_rounding_needs_one_scale_even_at_two_bits():
  sizes = [
    message_bytes(Int(2, "tensor", rounding=rounding), {"w": (8,)})
    for rounding in ("nearest", "stochastic")
  ]
  assert sizes == [2 + 4, 2 + 2]


@pytest.mark.parametrize("num_blocks", [1, 3, 250])
def test_sparse_loco_sends_7_bits_for_32_values_and_its_scales_on_top(
  num_blocks,
):
  codec, values = TopK(64 / 4096, 4096, then=Int(2, "tensor")), 4096
  found = message_bytes(codec, {"embed": (values * num_blocks,)})
  # Two magnitudes for the whole tensor, whatever its size.
  bits = 8 * (found - 2 * 2) / (values * num_blocks)
  assert bits == 0.21875 == 64 * (12 + 2) / 4096


@pytest.mark.parametrize(
  "mask, kept, bits, known", [(0.1, 0.2, 4, 0.1825), (0.4, 0.5, 4, 1.225)]
)
def test_cocktail_sgd_sends_what_its_formula_says(mask, kept, bits, known):
  codec = RandomMask(mask, then=TopK(kept, 4000, "bitmap", Int(bits)))
  # Blocks of 4000 divide what is drawn, blocks of 128 what is kept.
  values = 6_400_000
  found = 8 * message_bytes(codec, {"embed": (values,)}) / values
  assert math.isclose(found, mask * (kept * (bits + 16 / 128) + 1))
  assert math.isclose(found, known)


def test_low_rank_sends_both_factors_once_a_power_iteration():
  matrix = {"blocks/w": (3, 20, 30)}
  factors = 4 * 3 * 2 * (20 + 30)
  assert message_bytes(LowRank(2), matrix) == factors
  assert message_bytes(LowRank(2, 4), matrix) == 4 * factors
  assert message_bytes(LocalLowRank(2, 4), matrix) == factors


@pytest.mark.parametrize("codec", [LowRank(2), LocalLowRank(2)])
@pytest.mark.parametrize("shape", [(), (50,), (2, 20, 30), (4, 4), (1, 9)])
def test_what_is_no_matrix_or_too_thin_for_factors_is_sent_whole(codec, shape):
  dense = message_bytes(Float(), {"w": shape})
  assert message_bytes(codec, {"w": shape}) == dense


def test_top_k_keeps_at_least_one_value_and_indexes_it_in_at_least_a_bit():
  top = TopK(0.01, 16)
  assert [top.num_kept(width) for width in (1, 16, 300)] == [1, 1, 3]
  for size in (1, 2, 3, 16):
    # One value of 4 bytes, and its index of 1 to 4 bits in a byte.
    assert message_bytes(top, {"w": (size,)}) == 4 + 1


TREE = {"embed": (7, 3), "blocks/w": (5, 3, 2), "blocks/b": (5, 3)}
NUM_VALUES = 21 + 30 + 15
# Strided in three: layers 0, 2, 4 and layers 1, 3, with nine values each; the
# shorter one is padded.
FRAGMENT_VALUES = (21, 27, 27)


def traffic(method, num_replicas, **settings):
  fragments = Fragments(method.schedule.num_fragments, 5, method.fragment_order)
  return Traffic(method, fragments, TREE, num_replicas, **settings)


def ring(num_values, num_replicas):
  """Bytes of fp32 values and a flag on a ring."""
  return Collective("all_reduce", 4 * num_values + 4).sent_bytes(num_replicas)


def run_bytes(plan, num_replicas):
  counted = traffic(plan.method, num_replicas)
  total = sum(counted.segment_bytes(segment) for segment in plan.segments())
  if plan.local_start < plan.total_steps:
    total += counted.flush_bytes(plan.total_steps - plan.local_start)
  return total


@given(
  st.sampled_from([1, 3]),
  st.integers(3, 12),
  st.integers(0, 36),
  st.integers(1, 60),
  st.integers(0, 9),
)
def test_every_send_of_a_run_is_paid_for_once(
  parts, interval, overlap, steps, warm_steps
):
  method = methods.delayed(interval, parts, overlap)
  plan = RunPlan(method, steps + warm_steps, warm_steps, 4)
  expected = warm_steps * ring(NUM_VALUES, 3)
  for fragment in range(parts):
    phase = fragment * interval // parts
    sent = [s for s in range(1, steps + 1) if (s - phase) % interval == 0]
    # What is done since the last send is exchanged at the end.
    sends = len(sent) + (max(sent, default=0) < steps)
    values = FRAGMENT_VALUES[fragment] if parts > 1 else NUM_VALUES
    expected += sends * ring(values, 3)
  assert run_bytes(plan, 3) == expected
  assert run_bytes(plan, 1) == 0


def test_bytes_fall_due_when_a_fragment_arrives():
  plan = RunPlan(methods.streaming_diloco(30, 3, 4), 60)
  first, second = plan.segments()
  counted = traffic(plan.method, 2)
  # Fragment 0 leaves with step 30 and arrives in the second round.
  layers = 2 * ring(27, 2)
  assert counted.segment_bytes(first) == layers
  assert counted.segment_bytes(second) == ring(21, 2) + layers
  # In flight is fragment 0; 1 and 2 have steps that were never sent.
  assert counted.flush_bytes(60) == ring(21, 2) + layers


def test_gradients_are_sent_whole_and_by_a_codec_only_if_the_method_has_one():
  allreduce = RunPlan(methods.allreduce(), 7, steps_per_dispatch=3)
  assert run_bytes(allreduce, 2) == 7 * ring(NUM_VALUES, 2)
  warm, *rounds = RunPlan(methods.diloco(4), 11, 3).segments()
  counted = traffic(methods.diloco(4), 2)
  assert counted.segment_bytes(warm) == 3 * ring(NUM_VALUES, 2)
  assert {counted.segment_bytes(s) for s in rounds} == {ring(NUM_VALUES, 2)}
  counted = traffic(methods.diloco(4), 2, codec=Int(8))
  assert counted.exchange_bytes(0) == message_bytes(Int(8), TREE) + 1
  assert counted.gradient_bytes() == ring(NUM_VALUES, 2)
  every_step = traffic(methods.allreduce(), 2, codec=Int(8))
  assert every_step.gradient_bytes() == message_bytes(Int(8), TREE) + 1
