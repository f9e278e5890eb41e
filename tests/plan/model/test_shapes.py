import dataclasses
import re

import pytest

from dilocox_jax.plan.model.presets import MODEL_PRESETS, nano
from dilocox_jax.plan.model.shapes import (
  ModelShape,
  flops_per_token,
  parameter_count,
  parameter_shapes,
)

LARGE = ModelShape(
  num_layers=80,
  model_dim=8192,
  num_heads=64,
  ff_dim=40960,
  vocab_size=152064,
  qk_norm=True,
)


def counted_by_formula(shape):
  d, k = shape.model_dim, shape.head_width
  matrices = {"swiglu": 3, "gelu": 2}[shape.activation]
  block = 2 * d * k * (shape.num_heads + shape.kv_heads)
  block += matrices * d * shape.ff_dim + 2 * d
  block += 2 * k if shape.qk_norm else 0
  tables = 1 if shape.tied_head else 2
  return tables * shape.vocab_size * d + d + shape.num_layers * block


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("head_dim", [0, 6])
@pytest.mark.parametrize("num_kv_heads, tied_head", [(0, False), (1, True)])
def test_the_count_is_the_formula_of_its_docstring(
  activation, qk_norm, head_dim, num_kv_heads, tied_head
):
  shape = dataclasses.replace(
    nano,
    activation=activation,
    qk_norm=qk_norm,
    head_dim=head_dim,
    num_kv_heads=num_kv_heads,
    tied_head=tied_head,
  )
  assert parameter_count(shape) == counted_by_formula(shape)


def test_a_model_of_a_hundred_billion_parameters_is_counted_without_arrays():
  assert parameter_count(LARGE) == counted_by_formula(LARGE)
  assert parameter_count(LARGE) > 1e11


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_stacked_leaves_and_no_others_have_a_leading_layer_axis(name):
  deeper = dataclasses.replace(MODEL_PRESETS[name], num_layers=37)
  before, after = (
    parameter_shapes(MODEL_PRESETS[name]),
    parameter_shapes(deeper),
  )
  assert before.keys() == after.keys()
  for path, leaf in after.items():
    if path.startswith("blocks/"):
      assert leaf == (37, *before[path][1:])
    else:
      assert leaf == before[path]


def test_flops_are_the_operations_of_every_product_counted_one_by_one():
  length, d, k = 32, nano.model_dim, nano.head_width
  heads = nano.num_heads * k
  # (rows, inner, columns) of every matrix product for one sequence.
  block = [(length, d, heads)] * 3 + [(length, heads, d)]
  block += [(length, d, nano.ff_dim)] * 2 + [(length, nano.ff_dim, d)]
  block += [(length, k, length), (length, length, k)] * nano.num_heads
  products = block * nano.num_layers + [(length, d, nano.vocab_size)]
  forward = sum(2 * m * n * o for m, n, o in products)
  assert flops_per_token(nano, length) * length == 3 * forward


def test_a_tied_head_costs_the_operations_of_a_head_of_its_own():
  tied = dataclasses.replace(nano, tied_head=True)
  assert flops_per_token(tied, 8) == flops_per_token(nano, 8)


# Published counts. OPT's has two positions more, which nothing reads; that of
# TinyLlama is its checkpoint's; the names of the other models are rounded.
@pytest.mark.parametrize(
  "name, count, tolerance",
  [
    ("opt_1_3b", 1_315_758_080, 4e-6),
    ("llama_1_1b", 1_100_048_384, 0),
    ("qwen_107b", 107e9, 0.02),
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
  assert parameter_count(MODEL_PRESETS[name]) == pytest.approx(
    count, rel=tolerance
  )


def test_the_name_of_the_smaller_llama_leaves_out_its_tables():
  llama = MODEL_PRESETS["llama_150m"]
  tables = 2 * llama.vocab_size * llama.model_dim
  assert parameter_count(llama) - tables == pytest.approx(150e6, rel=0.01)


def test_a_token_costs_the_operations_of_its_own_experts():
  experts = dataclasses.replace(nano, num_experts=8, experts_per_token=2)
  wider = dataclasses.replace(nano, ff_dim=2 * nano.ff_dim)
  router = nano.num_layers * nano.model_dim * 8
  added = flops_per_token(experts, 8) - flops_per_token(wider, 8)
  assert added == 6 * router
  assert parameter_count(experts) == router + parameter_count(
    dataclasses.replace(nano, ff_dim=8 * nano.ff_dim)
  )


def test_the_embedding_table_costs_no_operations():
  # A wider vocabulary adds its head's 6 D V, and nothing for the table.
  wider = dataclasses.replace(nano, vocab_size=2 * nano.vocab_size)
  added = flops_per_token(wider, 8) - flops_per_token(nano, 8)
  assert added == 6 * nano.model_dim * nano.vocab_size


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"num_layers": 0}, "num_layers=0 must be at least 1"),
    ({"ff_dim": -3}, "ff_dim=-3 must be at least 1"),
    ({"num_heads": 3}, "model_dim=16 must be divisible by num_heads=3"),
    ({"head_dim": -2}, "head_dim=-2 must be at least 0"),
    ({"head_dim": 5}, "head width 5 (head_dim=5"),
    ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=2"),
    ({"num_heads": 16}, "model_dim=16 / num_heads=16) must be even"),
    ({"activation": "selu"}, "activation='selu' must be one of"),
    ({"positions": "learned"}, "does not go with num_positions=0"),
    ({"num_positions": 8}, "positions='rope' does not go with num_positions=8"),
    ({"num_experts": 2, "experts_per_token": 3}, "experts_per_token=3 exceeds"),
    ({"norm": "batch"}, "norm='batch' must be one of rms, layer"),
    ({"biases": "some"}, "biases='some' must be one of none, qkv, all"),
  ],
)
def test_a_shape_that_cannot_be_built_says_which_values_clash(change, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    dataclasses.replace(nano, **change)
