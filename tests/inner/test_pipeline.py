"""Every schedule computes the plain gradient, with no more work and memory."""

import dataclasses
from fractions import Fraction
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.inner.activation_codec import ACTIVATION_CODECS
from dilocox_jax.inner.pipeline import CutModel
from dilocox_jax.inner.pipeline_layer import split_layer
from dilocox_jax.inner.pipeline_stage import Stage
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.choices import REMATS
from dilocox_jax.plan.model.shapes import flops_per_token
from dilocox_jax.plan.pipeline.timeline import PIPELINES, Pipeline
from dilocox_jax.plan.pipeline.timetable import ACTIONS, timetable
from tests.inner.pipelines import (
  BATCH_SIZE,
  LENGTH,
  SMALL,
  Case,
  counts,
  error,
  gradient_over_stages,
)
from tests.products import product_flops


def shaped(num_layers, **changes):
  return dataclasses.replace(SMALL, num_layers=num_layers, **changes)


OPT = {"activation": "relu", "biases": "all", "norm": "layer"}
OPT |= {"positions": "learned", "num_positions": LENGTH}
TIED = {"tied_head": True}
# Schedule, stages, micro-batches, chunks, what is kept, and the model.
CASES = [
  Case("gpipe", 1, 2, 1, "none", shaped(2)),
  Case("gpipe", 4, 4, 1, "dots", shaped(5, **TIED)),
  Case("1f1b", 2, 4, 1, "full", shaped(4, **OPT), end_of_text=3),
  Case("1f1b", 4, 3, 1, "dots", shaped(5)),
  Case("zb_h1", 2, 4, 1, "none", shaped(2, **TIED)),
  Case("zb_h1", 2, 3, 1, "dots", shaped(3, num_kv_heads=1)),
  Case("interleaved", 2, 4, 2, "dots", shaped(4), end_of_text=3),
  # Three of eight chunks have no layer.
  Case("interleaved", 4, 4, 2, "full", shaped(5, **TIED)),
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
  table = timetable(case.pipeline)
  ends = {"embed": 0, "head": case.num_stages - 1}

  def rounds_on(stage):
    done = [ACTIONS[number] for number in table.action[:, stage]]

    def rounds(name, branch):
      assert branch is None, "the step has no conditionals"
      scope = name.split("/")[-2]
      if scope in ACTIONS:
        return Fraction(done.count(scope), len(done))
      action = next(part for part in name.split("/") if part in ACTIONS)
      is_here = stage == ends[scope]
      return is_here * Fraction(
        case.num_micro_batches, max(1, done.count(action))
      )

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
  if np.ptp(case.counts) == 0:
    check_products(case, text)
  if case.end_of_text is not None:  # Else the documents would not matter.
    whole = dataclasses.replace(case, dtype="float64", end_of_text=None)
    masked = dataclasses.replace(whole, end_of_text=case.end_of_text)
    assert abs(whole.plain()[0] - masked.plain()[0]) > 1e-4


# Three micro-batches are no multiple of two stages.
LOSSES = [
  Case("gpipe", 4, 3, shape=shaped(5)),
  Case("zb_h1", 1, 2, shape=shaped(2)),
  Case("interleaved", 2, 3, 2, shape=shaped(5, **OPT), end_of_text=3),
]


@pytest.mark.parametrize("case", LOSSES, ids=named)
def test_the_last_stage_has_the_loss_of_the_plain_model(case):
  *others, last = case.losses()
  np.testing.assert_allclose(last, case.plain()[0], rtol=1e-6)
  assert not np.any(others)


@st.composite
def drawn_cases(draw):
  name = draw(st.sampled_from(PIPELINES))
  stages, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
  is_interleaved = name == "interleaved"
  shape = shaped(
    draw(st.integers(1, 6)),
    num_kv_heads=draw(st.sampled_from((0, 1))),
    activation=draw(st.sampled_from(("swiglu", "gelu"))),
    qk_norm=draw(st.booleans()),
    tied_head=draw(st.booleans()),
  )
  return Case(
    name,
    stages,
    groups * stages if is_interleaved else draw(st.integers(1, 5)),
    draw(st.integers(2, 3)) if is_interleaved else 1,
    draw(st.sampled_from(REMATS)),
    shape,
  )


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@hypothesis.settings(
  max_examples=40,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(drawn_cases())
def test_any_schedule_of_any_model_gives_the_plain_gradient(case):
  check_gradient(case)


def test_narrow_types_and_boundaries_cost_accuracy_but_not_much():
  case = Case("zb_h1", 2, 3, 1, "none", shaped(2))
  rounded = dataclasses.replace(case, dtype="bfloat16")
  loss, gradients, _ = rounded.pipelined()
  kinds = {x.dtype for x in (loss, *jax.tree.leaves(gradients))}
  assert kinds == {np.dtype("float32")}
  _, exact = case.plain()
  assert 0 < error(gradients, exact) < 1.5 * error(rounded.plain()[1], exact)
  for name, most in (("bfloat16", 0.03), ("int8", 0.1)):
    _, gradients, _ = case.pipelined(ACTIVATION_CODECS[name])
    assert 1e-5 < error(gradients, exact) < most


@pytest.mark.parametrize("name", ["zb_h1", "interleaved"])
def test_each_stage_does_what_its_list_says_and_nothing_else(name, monkeypatch):
  done, lost = [], []

  def logged(action, method):
    def run(stage, at, state):
      jax.debug.callback(
        lambda *where: done.append((action, *map(int, where))),
        *(stage.number, at.micro_batch, at.chunk),
      )
      return method(stage, at, state)

    return run

  def loss(rest, x, targets):
    stage = jax.lax.axis_index("stage")
    jax.debug.callback(lambda stage: lost.append(int(stage)), stage)
    return jnp.mean(x)

  model = CutModel(
    lambda rest, tokens: tokens.reshape(-1, 1).astype(jnp.float32),
    lambda layer, x, length, multiply: multiply("kernel", x, layer["kernel"]),
    loss,
  )
  for action in ACTIONS[1:]:
    monkeypatch.setattr(Stage, action, logged(action, getattr(Stage, action)))
  stages, chunks, batches = 4, 2 if name == "interleaved" else 1, 8
  pipeline = Pipeline(name, stages, batches, chunks)
  layers = counts(stages * chunks, stages, chunks)
  step = gradient_over_stages(model, timetable(pipeline), layers)
  blocks = {"kernel": jnp.full((stages, chunks, 1, 1, 1), 2.0)}
  tokens = jnp.ones((batches, 1, 3), jnp.int32)
  found, *_ = jax.block_until_ready(step(blocks, {}, tokens))
  jax.effects_barrier()
  expected = [
    (tick.direction, stage, tick.micro_batch, tick.chunk)
    for stage, order in enumerate(pipeline.orders)
    for tick in order
  ]
  assert float(found) == 2.0 ** (stages * chunks)
  assert sorted(done) == sorted(expected)
  assert lost == [stages - 1] * batches


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
  # Tokens, and a table of ten int32 columns, of all ticks of two stages.
  inputs = 4 * (batches[-1] * 8 * 17 + 2 * 10 * 2 * (batches[-1] + 1))
  assert max(flat) - min(flat) <= inputs
  model = build_model(shaped(2))
  blocks = jax.eval_shape(model.init, jax.random.key(0))["blocks"]
  layer = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), blocks
  )
  x = jax.ShapeDtypeStruct((8 * 16, SMALL.model_dim), np.float32)
  saved = split_layer(model.block, layer, x, 16, "dots").saved
  kept = 2 * sum(array.size * array.dtype.itemsize for array in saved)
  growth = np.diff([step_bytes("gpipe", 2, m) for m in batches])
  growth = growth / np.diff(batches) / kept
  # Kept once, not copied, and besides the tokens and the turned activations.
  assert np.all((growth >= 1) & (growth <= 1.2))
  # Two slots a stage against four.
  assert step_bytes("1f1b", 4, batches[0]) > 1.4 * flat[0]


def test_the_program_does_not_grow_with_ticks_or_layers():
  def operations(num_layers, num_micro_batches):
    case = Case("1f1b", 2, num_micro_batches, shape=shaped(num_layers))
    return sum(" = " in line for line in case.lowered().as_text().splitlines())

  assert operations(6, 3) == operations(14, 13)
