import dataclasses
import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.plan.pipeline.orders import PIPELINES, Tick
from dilocox_jax.plan.pipeline.timeline import Pipeline, TickTimes, timeline

# A few hundred additions of float64.
ROUNDING = 1e-12

SECONDS = st.floats(1e-3, 1e3)


@st.composite
def pipelines(draw, names=PIPELINES):
  name = draw(st.sampled_from(names))
  stages = draw(st.integers(1, 6))
  if name != "interleaved":
    return Pipeline(name, stages, draw(st.integers(1, 14)))
  groups = draw(st.integers(1, 4))
  return Pipeline(name, stages, stages * groups, draw(st.integers(2, 4)))


@st.composite
def tick_times(draw, hops=False):
  hop_s = SECONDS if hops else st.just(0.0)
  return TickTimes(
    draw(SECONDS), draw(SECONDS), draw(st.floats(0, 1)), draw(hop_s)
  )


def chain(pipeline, batch):
  """A micro-batch's way through the model and back: stages with ticks."""
  there = [
    (stage, Tick("forward", batch, chunk))
    for chunk in range(pipeline.chunks_per_stage)
    for stage in range(pipeline.num_stages)
  ]
  back = "input_gradient" if pipeline.name == "zb_h1" else "backward"
  return there + [
    (stage, dataclasses.replace(tick, direction=back))
    for stage, tick in reversed(there)
  ]


def spans(pipeline, times):
  """Start and end by stage and tick."""
  run = timeline(pipeline, times)
  return {
    (stage, tick): (run.starts_s[stage][place], run.ends_s[stage][place])
    for stage, order in enumerate(pipeline.orders)
    for place, tick in enumerate(order)
  }


def waits(pipeline, times, span):
  """By stage and tick: whatever it waits for, as times it may not precede."""
  limits = {key: [0.0] for key in span}
  for stage, order in enumerate(pipeline.orders):
    for before, after in itertools.pairwise(order):
      limits[stage, after].append(span[stage, before][1])
  for batch in range(pipeline.num_micro_batches):
    for before, after in itertools.pairwise(chain(pipeline, batch)):
      hop_s = times.hop_s * (before[0] != after[0])
      limits[after].append(span[before][1] + hop_s)
  for stage, tick in span:
    if tick.direction == "weight_gradient":
      half = dataclasses.replace(tick, direction="input_gradient")
      limits[stage, tick].append(span[stage, half][1])
  return limits


@given(pipelines(), tick_times(hops=True))
def test_a_tick_starts_as_soon_as_nothing_is_left_to_wait_for(pipeline, times):
  span = spans(pipeline, times)
  for key, limits_s in waits(pipeline, times, span).items():
    assert span[key][0] == max(limits_s)


def closed_form_step_s(pipeline, times):
  """Seconds of a step without hops, from a formula instead of the lists.

  With F, B, I and W for forward, backward and its halves: GPipe and 1F1B take
  (m + p - 1)(F + B), interleaved m (F + B) + (p - 1)(F + B) / v, and ZB-H1
  m (F + B) + (p - 1)(F + I) - (min(m, p) - 1) min(F, I, W). All are exact.

  Source: GPipe, arXiv 1811.06965; arXiv 2104.04473, sections 2.2.1 and 2.2.2;
  ZB-H1, arXiv 2401.10241, Table 2: a bubble of (p - 1)(F + I - W).
  Differs: the table's bubble is this one for m >= p and W <= min(F, I) only.
  With fewer micro-batches fewer weight gradients are left to fill it, and one
  that is longer than a forward or an input gradient delays those behind it.
  """
  filling = pipeline.num_stages - 1
  both_s = times.forward_s + times.backward_s
  work_s = pipeline.num_micro_batches * both_s
  if pipeline.name != "zb_h1":
    return work_s + filling * both_s / pipeline.chunks_per_stage
  weight_s = times.backward_s * times.weight_gradient_share
  input_s = times.backward_s - weight_s
  filled = min(pipeline.num_micro_batches, pipeline.num_stages) - 1
  saved_s = filled * min(times.forward_s, input_s, weight_s)
  return work_s + filling * (times.forward_s + input_s) - saved_s


@pytest.mark.parametrize("name", PIPELINES)
@given(st.data(), tick_times())
def test_a_step_takes_as_long_as_the_closed_form_says(name, data, times):
  pipeline = data.draw(pipelines((name,)))
  run = timeline(pipeline, times)
  step_s = closed_form_step_s(pipeline, times)
  assert run.step_s == pytest.approx(step_s, rel=ROUNDING)
  # All stages do all the work, and are idle in between.
  work_s = pipeline.num_micro_batches * (times.forward_s + times.backward_s)
  assert 1 - run.bubble_fraction == pytest.approx(work_s / step_s, rel=1e-9)


@given(st.integers(1, 6), st.integers(1, 14), tick_times(hops=True))
def test_hops_delay_gpipe_by_one_way_there_and_one_back(stages, batches, times):
  pipeline = Pipeline("gpipe", stages, batches)
  hops_s = 2 * (stages - 1) * times.hop_s
  found_s = timeline(pipeline, times).step_s
  wanted_s = closed_form_step_s(pipeline, times) + hops_s
  assert found_s == pytest.approx(wanted_s, rel=ROUNDING)


def test_forwards_alone_follow_each_other():
  forwards = Pipeline("1f1b", 3, 3).forward_only(7)
  ends_s = timeline(forwards, TickTimes(1, 2)).ends_s
  assert [row[-1] for row in ends_s] == [7, 8, 9]


@pytest.mark.parametrize(
  "arguments, message",
  [
    (("pipedream", 2, 2), "name='pipedream' must be one of gpipe, 1f1b"),
    (("gpipe", 0, 2), "num_stages=0 must be at least 1"),
    (("1f1b", 2, -1), "num_micro_batches=-1 must be at least 1"),
    (("zb_h1", 2, 2, 0), "chunks_per_stage=0 must be at least 1"),
    (("1f1b", 2, 2, 2), "chunks_per_stage=2 must be 1 for 1f1b"),
    (("interleaved", 2, 2), "chunks_per_stage=1 must be at least 2"),
    (
      ("interleaved", 4, 6, 2),
      "num_micro_batches=6 must be a multiple of num_stages=4",
    ),
  ],
)
def test_a_schedule_that_cannot_be_names_the_field_to_change(
  arguments, message
):
  with pytest.raises(ValueError, match=re.escape(message)):
    Pipeline(*arguments)


@pytest.mark.parametrize(
  ("field", "values"),
  [
    ("forward_s", (0.0, math.inf)),
    ("backward_s", (0.0, math.inf)),
    ("weight_gradient_share", (1.5,)),
    ("hop_s", (math.inf,)),
  ],
)
def test_times_that_cannot_be_name_the_field_to_change(field, values):
  for value in (-1.0, math.nan, *values):
    arguments = {"forward_s": 1.0, "backward_s": 1.0, field: value}
    with pytest.raises(ValueError, match=re.escape(f"{field}={value} must")):
      TickTimes(**arguments)
