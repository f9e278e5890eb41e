import dataclasses
import itertools

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
from dilocox_jax.plan.pipeline.timeline import PIPELINES, Pipeline
from dilocox_jax.plan.pipeline.timetable import ACTIONS, timetable
from tests.inner.pipelines import SMALL, Case, counts, error, over_stages

FLOAT32_TOLERANCE = 1e-5
FLOAT64_TOLERANCE = 1e-12
TIED = dataclasses.replace(SMALL, tied_head=True)
OPT = dataclasses.replace(
  SMALL,
  activation="relu",
  biases="all",
  norm="layer",
  positions="learned",
  num_positions=6,
)


EXPERTS = dataclasses.replace(
  SMALL, num_experts=3, experts_per_token=2, balance_loss=0.5
)


def temporary_bytes(compiled):
  """What a program needs beside its arguments and results (bytes)."""
  return compiled.memory_analysis().temp_size_in_bytes


def named(case):
  kind = {SMALL: "small", TIED: "tied", OPT: "opt", EXPERTS: "experts"}[
    case.shape
  ]
  return f"{case.schedule}-{case.num_stages}-{case.remat}-{kind}"


def case(schedule, num_stages, **options):
  chunks = 2 if schedule == "interleaved" else 1
  return Case(schedule, num_stages, num_chunks=chunks, **options)


CASES = [
  case("gpipe", 1, remat="none"),
  case("gpipe", 4, shape=TIED),
  case("1f1b", 2, remat="full", shape=TIED),
  case("1f1b", 4),
  case("1f1b", 2, shape=OPT),
  case("zb_h1", 2, remat="none", shape=OPT),
  case("zb_h1", 2, shape=EXPERTS),
  case("interleaved", 4, shape=TIED),  # Three of eight chunks have no layer.
  case("zb_h1", 2, remat="full", shape=TIED),
  case("zb_h1", 4, remat="none"),
]
ALL = [
  case(name, num_stages, remat=remat, shape=shape)
  for name, num_stages, remat, shape in itertools.product(
    PIPELINES, (1, 2, 4), REMATS, (SMALL, TIED)
  )
]


def _quick(cases):
  """Leaves every second case to `make check`."""
  return [
    pytest.param(case, marks=pytest.mark.slow if number % 2 else [])
    for number, case in enumerate(cases)
  ]


def check_float32(case):
  loss, gradients = case.pipelined()
  expected_loss, expected = case.plain()
  assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
  assert error(gradients, expected) < FLOAT32_TOLERANCE


def check_float64(case):
  case = dataclasses.replace(case, dtype="float64")
  loss, gradients = case.pipelined()
  expected_loss, expected = case.plain()
  assert loss.dtype == jnp.float64
  assert float(loss) == pytest.approx(float(expected_loss), rel=1e-12)
  assert error(gradients, expected) < FLOAT64_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[3::3], ids=named)
def test_every_gradient_is_that_of_the_plain_step(case):
  check_float32(case)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", _quick(CASES), ids=map(named, CASES))
def test_every_gradient_is_that_of_the_plain_step_in_float64(case):
  check_float64(case)


MASKED = [
  case("1f1b", 2, shape=OPT),
  case("gpipe", 1, remat="none"),
  case("zb_h1", 2, remat="none"),
  case("interleaved", 2, remat="full"),
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", _quick(MASKED), ids=map(named, MASKED))
def test_documents_are_kept_apart_in_every_stage(case):
  masked = dataclasses.replace(case, end_of_text=3)
  check_float64(masked)
  both = [dataclasses.replace(c, dtype="float64") for c in (case, masked)]
  (loss, _), (apart, _) = [each.plain() for each in both]
  assert abs(loss - apart) > 1e-4  # Else the documents would not matter.


@pytest.mark.slow
@pytest.mark.parametrize(
  "case", [case for case in ALL if case.remat == "dots"], ids=named
)
def test_all_ways_to_run_it_give_the_plain_gradient(case):
  check_float32(case)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", ALL, ids=named)
def test_all_ways_to_run_it_give_the_plain_gradient_in_float64(case):
  check_float64(case)


@st.composite
def drawn_cases(draw):
  name = draw(st.sampled_from(PIPELINES))
  stages = draw(st.integers(1, 3))
  groups = draw(st.integers(1, 3))
  shape = dataclasses.replace(
    SMALL,
    num_layers=draw(st.integers(1, 6)),
    num_kv_heads=draw(st.sampled_from((0, 1))),
    activation=draw(st.sampled_from(("swiglu", "gelu"))),
    qk_norm=draw(st.booleans()),
    tied_head=draw(st.booleans()),
  )
  is_interleaved = name == "interleaved"
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
  max_examples=2,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(drawn_cases())
def test_any_schedule_of_any_model_gives_the_plain_gradient(case):
  check_float64(case)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@hypothesis.settings(
  max_examples=40,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(drawn_cases())
def test_many_schedules_of_many_models_give_the_plain_gradient(case):
  check_float64(case)


def test_what_buffers_hold_before_they_are_written_changes_nothing():
  one = case("zb_h1", 2, num_micro_batches=3, remat="full")
  filled, empty = one.pipelined(fill=np.nan), one.pipelined(fill=0.0)
  assert np.all(np.isfinite(filled[0]))
  for a, b in zip(jax.tree.leaves(filled), jax.tree.leaves(empty), strict=True):
    np.testing.assert_array_equal(a, b)


def test_bfloat16_gradients_are_as_near_as_plain_ones_and_summed_in_float32():
  one = case("zb_h1", 2, remat="none")
  rounded = dataclasses.replace(one, dtype="bfloat16")
  loss, gradients = rounded.pipelined()
  assert loss.dtype == jnp.float32
  assert {x.dtype for x in jax.tree.leaves(gradients)} == {np.dtype("float32")}
  _, exact = one.plain()
  _, plain = rounded.plain()
  assert 0 < error(gradients, exact) < 1.5 * error(plain, exact)


@pytest.mark.parametrize(
  ("name", "least", "most"), [("bfloat16", 1e-5, 0.03), ("int8", 1e-4, 0.1)]
)
def test_a_compressed_boundary_costs_accuracy_but_not_much(name, least, most):
  one = case("1f1b", 2)
  _, gradients = one.pipelined(codec=ACTIVATION_CODECS[name])
  _, expected = one.plain()
  assert least < error(gradients, expected) < most


def scaled_model(lost):
  """A model of one number a layer; lists the stages that compute a loss."""

  def loss(rest, x, targets):
    stage = jax.lax.axis_index("stage")
    jax.debug.callback(lambda stage: lost.append(int(stage)), stage)
    return jnp.mean(x)

  return CutModel(
    lambda rest, tokens: tokens.reshape(-1, 1).astype(jnp.float32),
    lambda layer, x, length, multiply: multiply("kernel", x, layer["kernel"]),
    loss,
  )


@pytest.mark.parametrize("name", PIPELINES)
def test_each_stage_does_what_its_list_says_and_nothing_else(name, monkeypatch):
  done, lost = [], []

  def logged(action, method):
    def run(stage, at, state):
      jax.debug.callback(
        lambda *where: done.append((action, *map(int, where))),
        stage.number,
        at.micro_batch,
        at.chunk,
      )
      return method(stage, at, state)

    return run

  for action in ACTIONS[1:]:
    monkeypatch.setattr(Stage, action, logged(action, getattr(Stage, action)))
  stages, chunks, batches = 4, 2 if name == "interleaved" else 1, 8
  pipeline = Pipeline(name, stages, batches, chunks)
  step = over_stages(
    scaled_model(lost),
    timetable(pipeline),
    counts(stages * chunks, stages, chunks),
  )
  blocks = {"kernel": jnp.full((stages, chunks, 1, 1, 1), 2.0)}
  tokens = jnp.ones((batches, 1, 3), jnp.int32)
  (loss, _), _ = jax.block_until_ready(step(blocks, {}, tokens))
  jax.effects_barrier()
  expected = [
    (tick.direction, stage, tick.micro_batch, tick.chunk)
    for stage, order in enumerate(pipeline.orders)
    for tick in order
  ]
  assert float(loss) == 2.0 ** (stages * chunks)
  assert sorted(done) == sorted(expected)
  assert lost == [stages - 1] * batches


def deep(num_stages):
  return dataclasses.replace(SMALL, num_layers=2 * num_stages)


def step_bytes(name, num_stages, num_micro_batches):
  one = Case(name, num_stages, num_micro_batches, shape=deep(num_stages))
  return temporary_bytes(one.lowered(batch_size=8, length=16).compile())


def input_bytes(num_micro_batches):
  """Tokens, and a table of ten int32 columns, of all ticks of two stages."""
  ticks = 2 * (num_micro_batches + 1)
  return 4 * (num_micro_batches * 8 * 17 + 2 * 10 * ticks)


def kept_bytes():
  """What the two layers of a stage keep of one micro-batch."""
  model = build_model(deep(1))
  block = jax.eval_shape(
    lambda: jax.tree.map(
      lambda x: x[0], model.init(jax.random.key(0))["blocks"]
    )
  )
  x = jax.ShapeDtypeStruct((8 * 16, SMALL.model_dim), np.float32)
  saved = split_layer(model.block, block, x, 16, "dots").saved
  return 2 * sum(array.size * array.dtype.itemsize for array in saved)


def check_memory(micro_batches):
  few, *_, many = micro_batches
  flat = [step_bytes("1f1b", 2, m) for m in micro_batches]
  assert max(flat) - min(flat) <= input_bytes(many)
  growing = [step_bytes("gpipe", 2, m) for m in micro_batches]
  growth = np.diff(growing) / np.diff(micro_batches)
  # Kept once, not copied, and besides the tokens and the turned activations.
  assert np.all(growth >= kept_bytes())
  assert np.all(growth <= 1.2 * kept_bytes())
  # Two slots a stage against four.
  assert step_bytes("1f1b", 4, few) > 1.4 * flat[0]


@pytest.mark.slow
def test_memory_of_1f1b_grows_with_stages_and_of_gpipe_with_micro_batches():
  check_memory((4, 32))


@pytest.mark.slow
def test_memory_grows_that_way_at_every_number_of_micro_batches():
  check_memory((4, 8, 16, 32))


def test_the_program_does_not_grow_with_ticks_or_layers():
  def operations(num_layers, num_micro_batches):
    shape = dataclasses.replace(SMALL, num_layers=num_layers)
    one = case("1f1b", 2, num_micro_batches=num_micro_batches, shape=shape)
    return sum(" = " in line for line in one.lowered().as_text().splitlines())

  assert operations(6, 3) == operations(14, 13)
