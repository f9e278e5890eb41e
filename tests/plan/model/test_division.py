import math

import hypothesis
import hypothesis.strategies as st
import pytest

from dilocox_jax.plan.model.division import Division
from dilocox_jax.plan.model.presets import MODEL_PRESETS
from dilocox_jax.plan.model.shapes import parameter_shapes

KERNEL = "blocks/mlp/up/kernel"
DIVISIONS = (Division(2, 2), Division(1, 4), Division(4, 1), Division(8, 8))

divisions = st.builds(
  Division, st.integers(1, 8), st.integers(1, 8), st.booleans()
)
shapes = st.lists(st.integers(1, 64), min_size=1, max_size=5).map(tuple)
paths = st.sampled_from(
  [
    KERNEL,
    f"optimizer/mu/{KERNEL}",
    f"exchange/first/codec/leaves/{KERNEL}/right",
    f"residual/{KERNEL}/0",
    "blocks/attention/norm/scale",
    "embed/embedding",
    "head/kernel",
    "final_norm/scale",
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


@pytest.mark.parametrize("preset", MODEL_PRESETS)
@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_every_parameter_of_every_preset_has_a_rule(preset, division):
  for path, shape in parameter_shapes(MODEL_PRESETS[preset]).items():
    division.spec(path, shape)


@pytest.mark.parametrize("preset", ["qwen_107b", "chinchilla_35m", "tiny"])
def test_a_device_holds_little_more_than_its_share(preset):
  division = Division(2, 2)
  held = whole = 0
  for path, shape in parameter_shapes(MODEL_PRESETS[preset]).items():
    parts = math.prod(map(division.num_shards, division.spec(path, shape)))
    whole += math.prod(shape)
    held += math.prod(shape) // parts
  assert whole / 4 <= held < 1.01 * whole / 4


@pytest.mark.parametrize(
  ("path", "shape", "spec"),
  [
    ("blocks/mix/decay", (4, 16), (("stage",), ())),
    ("blocks/mix/weights", (4, 16, 6), (("stage",), ("data",), ())),
    ("memory/strange", (3, 4), ((), ("data", "stage"))),
    ("memory/bias", (4,), ((),)),
    ("count", (), ()),
  ],
)
def test_leaves_that_a_model_has_named_itself_are_divided(path, shape, spec):
  assert Division(2, 2).spec(path, shape) == spec


def test_devices_that_do_not_divide_a_leaf_together_divide_it_alone():
  # 80 devices of 16 stages and 5 shards: no size is a multiple of 5.
  five = Division(5, 16, layers_on_stages=False)
  kernel = five.spec("blocks/mlp/up/kernel", (78, 8192, 49152))
  assert kernel == ((), ("stage",), ())
  table = five.spec("embed/embedding", (152064, 8192))
  assert table == ((), ("stage",))


def test_data_shards_divide_the_tokens_of_tables_if_they_can():
  large, tied = MODEL_PRESETS["qwen_107b"], MODEL_PRESETS["opt_1_3b"]
  both = {"embed/embedding", "head/kernel"}
  assert Division(8, 16).divided_tables(large) == both
  # 128 x 256 devices do not divide 152064 tokens, but 128 shards do.
  assert Division(128, 256).divided_tables(large) == both
  assert Division(4, 4).divided_tables(tied) == {"embed/embedding"}
  assert Division(1, 16).divided_tables(large) == set()
  assert Division(5, 16).divided_tables(large) == set()


def test_layers_lie_on_the_stages_that_compute_them_unless_told_otherwise():
  shape = (8, 16, 32)
  assert Division(2, 4).spec(KERNEL, shape)[0] == ("stage",)
  spread = Division(2, 4, layers_on_stages=False).spec(KERNEL, shape)
  assert spread[0] == ()
  assert set(spread[1]) == {"data", "stage"}


def test_layers_that_do_not_come_out_even_are_spread_over_all_devices():
  assert Division(2, 4).spec(KERNEL, (5, 16, 32)) == ((), ("data", "stage"), ())


def test_what_stands_before_the_layers_is_kept_whole():
  own = Division(2, 2).spec(KERNEL, (4, 8, 8))
  assert Division(2, 2).spec(KERNEL, (3, 4, 8, 8)) == ((), *own)


def test_a_leaf_with_fewer_dimensions_than_its_rule_is_kept_whole():
  assert Division(2, 2).spec(f"v_row/{KERNEL}", (4, 8)) == ((), ())


@hypothesis.given(divisions, shapes)
def test_an_array_is_divided_among_all_devices_or_not_at_all(division, shape):
  spec = division.flat_spec(shape)
  if spec is not None:
    assert division.divides(spec, shape)
    parts = math.prod(map(division.num_shards, spec))
    assert parts == division.num_devices
  else:
    assert all(size % division.num_devices for size in shape)


def test_at_least_one_device_is_needed():
  with pytest.raises(ValueError, match="num_data_shards=0 must be at least 1"):
    Division(num_data_shards=0)
  with pytest.raises(ValueError, match="num_stages=0 must be at least 1"):
    Division(num_stages=0)
