"""Sizes of models, and how their arrays are divided among devices."""

import dataclasses
import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from dilocox_jax.plan.model.division import Division
from dilocox_jax.plan.model.presets import MODEL_PRESETS, nano
from dilocox_jax.plan.model.shapes import flops_per_token, parameter_count


# Published counts. OPT's has two positions more, which nothing reads; that of
# TinyLlama is its checkpoint's; the names of the other models are rounded.
@pytest.mark.parametrize(
  "name, count, tolerance",
  [
    ("opt_1_3b", 1_315_758_080 - 2 * 2048, 0),
    ("llama_1_1b", 1_100_048_384, 0),
    ("qwen_107b", 107e9, 0.015),
    ("chinchilla_35m", 35e6, 0.02),
    ("chinchilla_100m", 100e6, 0.2),
    ("chinchilla_200m", 200e6, 0.2),
    ("chinchilla_300m", 300e6, 0.2),
    ("chinchilla_500m", 500e6, 0.2),
    ("chinchilla_1b", 1e9, 0.3),
    ("chinchilla_4b", 4e9, 0.1),
  ],
)
def test_models_of_the_papers_have_about_the_size_of_their_name(
  name, count, tolerance
):
  found = parameter_count(MODEL_PRESETS[name])
  assert found == pytest.approx(count, rel=tolerance)


def test_flops_are_the_operations_of_every_product_counted_one_by_one():
  length = 32
  d = nano.model_dim
  k = nano.head_width
  heads = nano.num_heads * k
  # (rows, inner, columns) of every matrix product for one sequence.
  block = [(length, d, heads)] * 3 + [(length, heads, d)]
  block += [(length, d, nano.ff_dim)] * 2 + [(length, nano.ff_dim, d)]
  block += [(length, k, length), (length, length, k)] * nano.num_heads
  products = block * nano.num_layers + [(length, d, nano.vocab_size)]
  forward = sum(2 * m * n * o for m, n, o in products)
  assert flops_per_token(nano, length) * length == 3 * forward
  tied = dataclasses.replace(nano, tied_head=True)
  assert flops_per_token(tied, 8) == flops_per_token(nano, 8)
  # A wider vocabulary adds its head's 6 D V, and nothing for the table.
  wider = dataclasses.replace(nano, vocab_size=2 * nano.vocab_size)
  added = flops_per_token(wider, 8) - flops_per_token(nano, 8)
  assert added == 6 * nano.model_dim * nano.vocab_size


KERNEL = "blocks/mlp/up/kernel"
divisions = st.builds(
  Division, st.integers(1, 8), st.integers(1, 8), st.booleans()
)
shapes = st.lists(st.integers(1, 64), min_size=1, max_size=5).map(tuple)
paths = st.sampled_from(
  [
    KERNEL,
    f"exchange/first/codec/leaves/{KERNEL}/right",
    "blocks/attention/norm/scale",
    "embed/embedding",
    "head/kernel",
    "outer/optimizer/count",
  ]
)


@hypothesis.given(divisions, paths, shapes)
def test_a_division_comes_out_even_and_uses_an_axis_once(division, path, shape):
  spec = division.spec(path, shape)
  assert len(spec) == len(shape)
  assert division.divides(spec, shape)
  used = [axis for axes in spec for axis in axes]
  assert len(used) == len(set(used))
  spec = division.flat_spec(shape)
  if spec is not None:
    assert division.divides(spec, shape)
    parts = math.prod(map(division.num_shards, spec))
    assert parts == division.num_devices
  else:
    assert all(size % division.num_devices for size in shape)


WHOLE = ()
DATA = ("data",)
STAGE = ("stage",)
BOTH = ("data", "stage")
ON_STAGES = (STAGE, DATA, WHOLE)
SPREAD = Division(2, 2, layers_on_stages=False)
TENSOR = Division(2, 2, num_tensor_shards=2)
FIVE = Division(5, 16, layers_on_stages=False)


@pytest.mark.parametrize(
  ("division", "path", "shape", "spec"),
  [
    (Division(2, 2), KERNEL, (4, 8, 8), ON_STAGES),
    (SPREAD, KERNEL, (4, 8, 8), (WHOLE, BOTH, WHOLE)),
    # Layers that do not come out even are spread over all devices.
    (Division(2, 4), KERNEL, (5, 16, 32), (WHOLE, BOTH, WHOLE)),
    # What stands before the layers is kept whole.
    (Division(2, 2), KERNEL, (3, 4, 8, 8), (WHOLE, *ON_STAGES)),
    (Division(2, 2), f"v_row/{KERNEL}", (4, 8), (WHOLE, WHOLE)),
    # Of 80 devices no size is a multiple of 5.
    (FIVE, KERNEL, (78, 8192, 49152), (WHOLE, STAGE, WHOLE)),
    (FIVE, "embed/embedding", (152064, 8192), (WHOLE, STAGE)),
    # Tensor shards divide the outputs of a layer's first matrices, and the
    # inputs of its last ones.
    (TENSOR, KERNEL, (4, 8, 8), (STAGE, DATA, ("tensor",))),
    (TENSOR, "blocks/mlp/down/kernel", (4, 8, 8), (STAGE, ("tensor",), DATA)),
    # Leaves that a model has named itself.
    (Division(2, 2), "blocks/mix/decay", (4, 16), (STAGE, WHOLE)),
    (Division(2, 2), "blocks/mix/weights", (4, 16, 6), ON_STAGES),
    (Division(2, 2), "memory/strange", (3, 4), (WHOLE, BOTH)),
    (Division(2, 2), "count", (), ()),
  ],
)
def test_leaves_are_divided_in_the_first_way_that_fits(
  division, path, shape, spec
):
  assert division.spec(path, shape) == spec


def test_data_shards_divide_the_tokens_of_tables_if_they_can():
  large = MODEL_PRESETS["qwen_107b"]
  tied = MODEL_PRESETS["opt_1_3b"]
  both = {"embed/embedding", "head/kernel"}
  assert Division(8, 16).divided_tables(large) == both
  # 128 x 256 devices do not divide 152064 tokens, but 128 shards do.
  assert Division(128, 256).divided_tables(large) == both
  assert Division(4, 4).divided_tables(tied) == {"embed/embedding"}
  assert Division(1, 16).divided_tables(large) == set()
  assert Division(5, 16).divided_tables(large) == set()


@pytest.mark.parametrize("name", ["num_layers", "vocab_size", "num_kv_heads"])
def test_a_size_is_a_whole_number(name):
  for wrong in (2.0, True, "2"):
    sizes: Any = {name: wrong}
    with pytest.raises(ValueError, match=f"{name}=.* must be of type int"):
      dataclasses.replace(nano, **sizes)
