"""The compiled step multiplies no more than the model needs."""

import dataclasses
import functools
import itertools
from fractions import Fraction

import pytest

from dilocox_jax.plan.model.shapes import flops_per_token
from dilocox_jax.plan.pipeline.timeline import PIPELINES
from dilocox_jax.plan.pipeline.timetable import ACTIONS
from tests.inner.pipelines import SMALL, Case
from tests.products import product_flops

BATCH_SIZE, LENGTH = 4, 8
EXCESS = 1.05
# Two thirds of the products of a step are backward. The forward ones are run
# again, but for the last of a layer.
FULL_EXCESS = 4 / 3


def case(schedule, remat, layers_per_part=1, num_stages=2, **shape):
  chunks = 2 if schedule == "interleaved" else 1
  num_layers = layers_per_part * num_stages * chunks
  return Case(
    schedule,
    num_stages,
    num_chunks=chunks,
    remat=remat,
    shape=dataclasses.replace(SMALL, num_layers=num_layers, **shape),
  )


CASES = [
  case("gpipe", "dots"),
  case("1f1b", "none", 2, tied_head=True),
  case("interleaved", "dots"),
  case("zb_h1", "none"),
]
ALL = [
  case(name, remat, layers, stages, tied_head=layers == 2)
  for name, remat, layers, stages in itertools.product(
    PIPELINES, ("none", "dots"), (1, 2), (1, 2, 4)
  )
]


def rounds_on(stage, case):
  """How often the loops of the step run on a stage, whenever met."""
  table = case.table
  count = {
    name: int((table.action[:, stage] == number).sum())
    for number, name in enumerate(ACTIONS)
  }
  ends = {"embed": 0, "head": table.num_stages - 1}

  def rounds(name, branch):
    assert branch is None, "the step has no conditionals"
    scope = name.split("/")[-2]
    if scope in ACTIONS:
      return Fraction(count[scope], len(table.action))
    action = next(part for part in name.split("/") if part in ACTIONS)
    is_here = stage == ends[scope]
    return is_here * Fraction(case.num_micro_batches, max(1, count[action]))

  return rounds


@functools.cache
def program(case):
  return case.lowered(BATCH_SIZE, LENGTH).compile().as_text()


def executed(text, case):
  return [
    product_flops(text, rounds_on(stage, case))
    for stage in range(case.num_stages)
  ]


def needed(case):
  tokens = case.num_micro_batches * BATCH_SIZE * LENGTH
  return tokens * flops_per_token(case.shape, LENGTH)


def check_products(case):
  text = program(case)
  assert 1 <= sum(executed(text, case)) / needed(case) <= EXCESS
  # A stage that is idle runs none of the step's loops.
  assert product_flops(text, lambda *_: 0) == 0


@pytest.mark.parametrize(
  "case", CASES, ids=lambda case: f"{case.schedule}-{case.remat}"
)
def test_the_step_runs_no_product_that_the_model_does_not_need(case):
  check_products(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_no_way_to_run_the_step_needs_more_products(case):
  check_products(case)


def test_the_head_is_multiplied_on_the_last_stage_alone():
  one = CASES[0]
  first, last = executed(program(one), one)
  tokens = one.num_micro_batches * BATCH_SIZE * LENGTH
  head = tokens * 6 * one.shape.model_dim * one.shape.vocab_size
  assert last - first == head


def test_full_rematerialisation_costs_at_most_another_forward():
  one = case("gpipe", "full")
  excess = sum(executed(program(one), one)) / needed(one)
  assert EXCESS < excess <= FULL_EXCESS
