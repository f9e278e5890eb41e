import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.aggregators.collective import chosen_collective
from dilocox_jax.aggregators.sizes import message_bytes
from dilocox_jax.aggregators.traffic import Traffic, exchange_operations
from dilocox_jax.codecs.low_rank import LocalLowRank, LowRank
from dilocox_jax.codecs.quantize import Float, Int
from dilocox_jax.codecs.sparse import RandomMask, TopK
from dilocox_jax.plan.choices import loaded
from dilocox_jax.plan.collectives import COLLECTIVES
from dilocox_jax.plan.operations import operation
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.run_plan import RunPlan

FP32 = Float()
FP16 = Float("float16")
INT4 = Int(4)
SPARSE = TopK(then=Int(2))


def name_of(codec, choice, num_replicas):
  """The name under which a chosen collective is registered."""
  chosen = chosen_collective(codec, choice, num_replicas)
  return next(
    name for name, place in COLLECTIVES.items() if loaded(place) is type(chosen)
  )


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
  found = [name_of(codec, "auto", m) for m in (2, 3, 4, 8)]
  assert found == [two, three, four, four]


@pytest.mark.parametrize(
  ("codec", "choice", "num_replicas", "message"),
  [
    (FP32, "all_gather", 2, ""),
    (FP32, "reduce_scatter", 2, ""),
    (FP32, "all_reduce", 257, ""),
    (INT4, "reduce_scatter", 2, ""),
    (LowRank(then=INT4), "all_reduce", 2, "would add up codes: take"),
    (FP32, "ring", 2, "collective='ring' must be one of auto, all_reduce, "),
    (FP32, 5, 2, "collective=5 must be a name or a dilocox_jax.Collective"),
  ],
)
def test_a_choice_is_kept_where_it_is_possible(
  codec, choice, num_replicas, message
):
  if not message:
    assert name_of(codec, choice, num_replicas) == choice
    return
  with pytest.raises(ValueError, match=re.escape(message)):
    exchange_operations(codec, {"w": (30, 20)}, num_replicas, choice)


# A flag is a byte, or one more number of a sum.
@pytest.mark.parametrize(
  ("codec", "shapes", "num_replicas", "expected"),
  [
    # Both factors of [30, 20] at rank 2 in 8 bits, a scale each 128 values.
    (
      LowRank(2, then=Int(8)),
      {"w": (30, 20), "u": (30, 20)},
      2,
      [
        ("all_gather", 2 * (60 + 2) + 1, 0),
        ("all_gather", 2 * (40 + 2) + 1, 1),
      ],
    ),
    # A vector travels with the left factor.
    (
      LowRank(2),
      {"w": (30, 20), "b": (7,)},
      3,
      [("all_reduce", 4 * (60 + 7 + 1), 0), ("all_reduce", 4 * (40 + 1), 1)],
    ),
    # One value in each packed block, and its index of 6 bits.
    (TopK(0.01, 64), {"w": (64,)}, 5, [("all_gather", 4 + 1 + 1, 0)]),
    # 5 rows of 120 in 4 bits, with a scale each: two rows a slice.
    (
      INT4,
      {"w": (30, 20)},
      3,
      [("all_to_all", 3 * (2 * (60 + 2) + 1), 0), ("all_gather", 2 * 62, 1)],
    ),
    # Means of signs have two bits and two scales.
    (
      Int(1),
      {"w": (30, 20)},
      4,
      [("all_to_all", 4 * (2 * (15 + 2) + 1), 0), ("all_gather", 2 * 34, 1)],
    ),
  ],
)
def test_what_is_asked_for_in_turn_is_sent_in_turn(
  codec, shapes, num_replicas, expected
):
  found = exchange_operations(codec, shapes, num_replicas)
  assert found == [operation(*each) for each in expected]


MATRIX = {"blocks/w": (3, 20, 30)}
FACTORS = 4 * 3 * 2 * (20 + 30)
BLOCK = 4096
DRAWN = 6_400_000


# Bytes by formula; that they are sent is held in contracts/test_codecs.
@pytest.mark.parametrize(
  ("codec", "shapes", "size"),
  [
    (FP32, {"scalar": (), "blocks/w": (3, 5, 7), "none": (0, 4)}, 4 * 106),
    (Float("bfloat16"), {"scalar": (), "blocks/w": (3, 5, 7)}, 2 * 106),
    # 21 values are three blocks of seven, or three rows.
    *(
      (Int(bits, scale, 10), {"blocks/w": (5, 3, 7)}, 15 * size)
      for bits, size in ((8, 7 + 2), (4, 4 + 2), (2, 2 + 4), (1, 1 + 2))
      for scale in ("block", "row")
    ),
    (Int(4, "tensor"), {"blocks/w": (5, 7)}, 5 * (4 + 2)),
    # SparseLoCo: 7 bits for 32 values, and two magnitudes for the whole.
    (
      TopK(64 / BLOCK, BLOCK, then=Int(2, "tensor")),
      {"embed": (250 * BLOCK,)},
      250 * BLOCK * 7 // 32 // 8 + 4,
    ),
    # CocktailSGD draws 0.1, keeps 0.2 of it in 4 bits, and says which in one.
    (
      RandomMask(0.1, then=TopK(0.2, 4000, "bitmap", INT4)),
      {"embed": (DRAWN,)},
      int(DRAWN * 0.1 * (0.2 * (4 + 16 / 128) + 1) / 8 + 0.5),
    ),
    (LowRank(2), MATRIX, FACTORS),
    (LowRank(2, 4), MATRIX, 4 * FACTORS),
    (LocalLowRank(2, 4), MATRIX, FACTORS),
    # What is no matrix, or too thin for factors, is sent whole.
    *(
      (codec, {"w": shape}, 4 * math.prod(shape))
      for codec in (LowRank(2), LocalLowRank(2))
      for shape in ((), (50,), (2, 20, 30), (4, 4), (1, 9))
    ),
    # At least one value of 4 bytes, and its index of 1 to 4 bits in a byte.
    *((TopK(0.01, 16), {"w": (size,)}, 4 + 1) for size in (1, 2, 3, 16)),
  ],
)
def test_a_message_has_the_bytes_of_the_formula(codec, shapes, size):
  assert message_bytes(codec, shapes) == size


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
  return operation("all_reduce", 4 * num_values + 4).sent_bytes(num_replicas)


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
  coded = message_bytes(Int(8), TREE) + 1
  counted = traffic(methods.diloco(4), 2, codec=Int(8))
  assert counted.exchange_bytes(0) == coded
  assert counted.gradient_bytes() == ring(NUM_VALUES, 2)
  every_step = traffic(methods.allreduce(), 2, codec=Int(8))
  assert every_step.gradient_bytes() == coded
