"""Every schedule computes the plain gradient, with no more work and memory."""

import dataclasses
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.inner.pipeline_layer import (
  layer_passes,
  replace_saved_arguments,
)
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.choices import REMATS
from dilocox_jax.plan.model.shapes import flops_per_token
from dilocox_jax.plan.pipeline import ACTIONS
from tests.inner.pipelines import BATCH_SIZE, LENGTH, SMALL, Case, error
from tests.products import product_flops
from tests.tiers import slow


def shaped(num_layers, **changes):
  return dataclasses.replace(SMALL, num_layers=num_layers, **changes)


OPT = {"activation": "relu", "biases": "all", "norm": "layer"}
OPT |= {"positions": "learned", "num_positions": LENGTH}
TIED = {"tied_head": True}
# Schedule, stages, micro-batches, what is kept, and the model.
CASES = [
  Case("gpipe", 4, 4, "dots", shaped(5, **TIED)),
  Case("1f1b", 2, 4, "full", shaped(4, **OPT), end_of_text=3),
  Case("1f1b", 2, 5, "none", shaped(2, num_kv_heads=1)),
  *slow(
    Case("gpipe", 1, 2, "none", shaped(2)),
    Case("1f1b", 4, 3, "dots", shaped(5)),
    Case("1f1b", 3, 1, "full", shaped(3, activation="gelu", qk_norm=False)),
  ),
]


def named(case):
  return f"{case.schedule}-{case.num_stages}-{case.remat}"


def check_gradient(case):
  case = dataclasses.replace(case, dtype="float64")
  loss, gradients, text = case.pipelined()
  expected_loss, expected = case.plain()
  assert loss.dtype == jnp.float64
  assert float(loss) == pytest.approx(float(expected_loss), rel=1e-12)
  assert error(gradients, expected) < 1e-12
  return text


def check_products(case, text):
  """No stage multiplies more than the model needs."""
  action = case.pipeline.timetable.action
  ends = {"embed": 0, "head": case.num_stages - 1}

  def rounds_on(stage):
    done = [ACTIONS[number] for number in action[:, stage]]

    def rounds(name, branch):
      assert branch is None, "the step has no conditionals"
      scope = name.split("/")[-2]
      if scope in ACTIONS:
        return Fraction(done.count(scope), len(done))
      return Fraction(stage == ends[scope])

    return rounds

  stages = range(case.num_stages)
  executed = [product_flops(text, rounds_on(stage)) for stage in stages]
  tokens = case.num_micro_batches * BATCH_SIZE * LENGTH
  excess = sum(executed) / (tokens * flops_per_token(case.shape, LENGTH))
  # Two thirds of the products of a step are backward. With "full" the forward
  # ones are run again, but for the last of a layer.
  low, high = (1.05, 4 / 3) if case.remat == "full" else (1, 1.05)
  assert low <= excess <= high
  # A stage that is idle runs none of the step's loops.
  assert product_flops(text, lambda *_: 0) == 0
  head = tokens * 6 * case.shape.model_dim * case.shape.vocab_size
  assert case.num_stages == 1 or executed[-1] - executed[0] == head


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_schedule_computes_the_plain_gradient_and_nothing_else(case):
  text = check_gradient(case)
  if np.ptp(case.layers.counts) == 0:
    check_products(case, text)


LOSSES = [
  Case("gpipe", 2, 3, shape=shaped(5, **OPT), end_of_text=3),
  *slow(
    Case("gpipe", 4, 3, shape=shaped(5)), Case("gpipe", 1, 2, shape=shaped(2))
  ),
]


@pytest.mark.parametrize("case", LOSSES, ids=named)
def test_the_last_stage_has_the_loss_of_the_plain_model(case):
  *others, last = case.losses()
  np.testing.assert_allclose(last, case.plain()[0], rtol=1e-6)
  assert not np.any(others)


@pytest.mark.slow
def test_narrow_types_cost_accuracy_but_not_much():
  case = Case("1f1b", 2, 5, "none", shaped(2, num_kv_heads=1))
  rounded = dataclasses.replace(case, dtype="bfloat16")
  loss, gradients, text = rounded.pipelined()
  # No kernel [8, 12] is saved for each micro-batch, as a copy in bfloat16.
  assert "[2,1,8,12]" not in (text or "")
  kinds = {x.dtype for x in (loss, *jax.tree.leaves(gradients))}
  assert kinds == {np.dtype("float32")}
  with jax.enable_x64(True):  # Most likely another test has computed it.
    _, exact = dataclasses.replace(case, dtype="float64").plain()
  assert 0 < error(gradients, exact) < 1.5 * error(rounded.plain()[1], exact)


@pytest.mark.slow
def test_memory_of_1f1b_grows_with_stages_and_of_gpipe_with_micro_batches():
  def step_bytes(name, num_stages, num_micro_batches):
    """What a step needs beside its arguments and results (bytes)."""
    case = Case(name, num_stages, num_micro_batches)
    case = dataclasses.replace(case, shape=shaped(2 * num_stages))
    compiled: Any = case.lowered(batch_size=8, length=16).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  batches = 4, 8, 32
  flat = [step_bytes("1f1b", 2, m) for m in batches]
  # Tokens, and a table of four int32 columns, of all ticks of two stages.
  inputs = 4 * (batches[-1] * 8 * 17 + 2 * 4 * 2 * (batches[-1] + 1))
  assert max(flat) - min(flat) <= inputs
  block, layer, x, _ = drawn_layer(SMALL, 8 * 16)
  saved = passes_of(block, layer, x, 16, "dots").saved
  kept = 2 * sum(array.size * array.dtype.itemsize for array in saved)
  growth = np.diff([step_bytes("gpipe", 2, m) for m in batches])
  growth = growth / np.diff(batches) / kept
  # Kept once, not copied, and besides the tokens and the outputs.
  assert np.all((growth >= 1) & (growth <= 1.2))
  # Two slots a stage against four.
  assert step_bytes("1f1b", 4, batches[0]) > 1.4 * flat[0]


def test_the_program_does_not_grow_with_ticks_or_layers():
  def operations(num_layers, num_micro_batches):
    case = Case("1f1b", 2, num_micro_batches, shape=shaped(num_layers))
    return sum(" = " in line for line in case.lowered().as_text().splitlines())

  assert operations(6, 3) == operations(14, 13)


def drawn_layer(shape, tokens, dtype=jnp.float32):
  """A block, its parameters, the stream and a gradient of its output."""
  model = build_model(shape, dtype=dtype)
  params = jax.eval_shape(model.init, jax.random.key(0))
  rng = np.random.default_rng(0)
  layer = jax.tree.map(
    lambda x: jnp.asarray(0.5 * rng.normal(size=x.shape[1:]), x.dtype),
    params["blocks"],
  )
  streams = rng.normal(size=(2, tokens, shape.model_dim))
  return model.block, layer, *jnp.asarray(streams, dtype)


def passes_of(block, layer, x, length, remat):
  layer, x = jax.eval_shape(lambda: (layer, x))
  return layer_passes(block, layer, x, length, remat, {})


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_layer_keeps_no_parameter_and_each_way_keeps_less(dtype):
  # Sizes of which no two are equal, so that a shape says what it is.
  shape = dataclasses.replace(SMALL, model_dim=10, head_dim=6)
  block, layer, x, gradient = drawn_layer(shape, 21, dtype)
  layer = jax.tree.map(
    lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, layer
  )
  shapes = {leaf.shape for leaf in jax.tree.leaves(layer)}
  sizes = []
  for remat in REMATS:
    passes = passes_of(block, layer, x, 3, remat)
    _, saved = jax.eval_shape(passes.forward, layer, x, {})
    assert saved == passes.saved
    assert not shapes & {kept.shape for kept in saved}
    sizes.append(sum(kept.size for kept in saved))
    gradients, _ = jax.eval_shape(passes.backward, layer, saved, gradient)
    assert gradients == jax.eval_shape(lambda: layer)
  assert sizes[0] > sizes[1] > sizes[2] == x.size


@dataclasses.dataclass(frozen=True)
class Pullback:
  args_res: list | tuple


def test_a_jax_that_keeps_arguments_in_another_way_is_refused():
  text = f"^JAX {jax.__version__} does not keep .*pinned in constraints/"
  for pullback in (object(), Pullback((1, 2)), Pullback([1]), Pullback([1, 2])):
    with pytest.raises(RuntimeError, match=text):
      replace_saved_arguments(pullback, [])
