import dataclasses
import itertools
import math
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dilocox_jax.plan.pipeline.orders import PIPELINES, Tick
from dilocox_jax.plan.pipeline.timeline import (
  Pipeline,
  TickTimes,
  timeline,
)
from tests.plan.pipeline.closed_form import closed_form_step_s

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
    draw(SECONDS),
    draw(SECONDS),
    draw(st.floats(0, 1)),
    draw(hop_s),
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


@given(pipelines())
def test_dependencies_are_the_steps_of_every_micro_batch_there_and_back(
  pipeline,
):
  wanted = {
    (stage, tick): set()
    for stage, order in enumerate(pipeline.orders)
    for tick in order
  }
  for batch in range(pipeline.num_micro_batches):
    way = chain(pipeline, batch)
    for before, after in itertools.pairwise(way):
      wanted[after].add(before)
    for there, back in zip(way, reversed(way), strict=True):
      if there[1].direction == "forward":
        wanted[back].add(there)
      if back[1].direction == "input_gradient":
        half = dataclasses.replace(back[1], direction="weight_gradient")
        wanted[back[0], half].add(back)
  for (stage, tick), needed in wanted.items():
    found = pipeline.dependencies(stage, tick)
    assert set(found) == needed and len(found) == len(needed)


@given(pipelines(), tick_times())
def test_a_stage_is_busy_for_as_long_as_its_work_takes(pipeline, times):
  busy_s = dict.fromkeys(range(pipeline.num_stages), 0.0)
  for (stage, _), (start_s, end_s) in spans(pipeline, times).items():
    assert end_s >= start_s
    busy_s[stage] += end_s - start_s
  work_s = pipeline.num_micro_batches * (times.forward_s + times.backward_s)
  for found_s in busy_s.values():
    assert found_s == pytest.approx(work_s, rel=1e-9)  # Differences of sums.


@pytest.mark.parametrize("name", PIPELINES)
@given(st.data(), tick_times())
def test_a_step_takes_as_long_as_the_closed_form_says(name, data, times):
  pipeline = data.draw(pipelines((name,)))
  found_s = timeline(pipeline, times).step_s
  wanted_s = closed_form_step_s(pipeline, times)
  assert found_s == pytest.approx(wanted_s, rel=ROUNDING)


@given(pipelines(("gpipe", "1f1b", "interleaved")), tick_times())
def test_the_bubble_does_not_depend_on_what_ticks_take(pipeline, times):
  filling = pipeline.num_stages - 1
  work = pipeline.num_micro_batches * pipeline.chunks_per_stage
  found = timeline(pipeline, times).bubble_fraction
  assert found == pytest.approx(filling / (work + filling), abs=ROUNDING)


@given(st.integers(1, 6), st.integers(0, 8), tick_times())
def test_zb_h1_has_its_papers_bubble_from_m_equal_p_while_w_is_shortest(
  stages, more, times
):
  forward_s = times.forward_s
  input_s, weight_s = map(times.work_s, ("input_gradient", "weight_gradient"))
  assume(weight_s <= min(forward_s, input_s))
  run = timeline(Pipeline("zb_h1", stages, stages + more), times)
  idle_s = (stages - 1) * (forward_s + input_s - weight_s)
  work_s = (stages + more) * (forward_s + times.backward_s)
  fraction = idle_s / (work_s + idle_s)
  assert run.bubble_fraction == pytest.approx(fraction, abs=ROUNDING)


@given(st.integers(2, 6), st.integers(0, 8), SECONDS)
def test_zb_h1_leaves_a_third_of_1f1bs_bubble_where_thirds_are_equal(
  stages, more, third_s
):
  times = TickTimes(third_s, 2 * third_s)
  idle_s = {}
  for name in ("1f1b", "zb_h1"):
    run = timeline(Pipeline(name, stages, stages + more), times)
    idle_s[name] = run.bubble_fraction * run.step_s
  assert 3 * idle_s["zb_h1"] == pytest.approx(idle_s["1f1b"], rel=1e-9)


@given(st.integers(1, 6), st.integers(1, 14), tick_times(hops=True))
def test_hops_delay_gpipe_by_one_way_there_and_one_back(stages, batches, times):
  pipeline = Pipeline("gpipe", stages, batches)
  near = dataclasses.replace(times, hop_s=0.0)
  hops_s = 2 * (stages - 1) * times.hop_s
  found_s = timeline(pipeline, times).step_s
  wanted_s = closed_form_step_s(pipeline, near) + hops_s
  assert found_s == pytest.approx(wanted_s, rel=ROUNDING)


def test_forwards_alone_follow_each_other():
  forwards = Pipeline("1f1b", 3, 3).forward_only(7)
  ends_s = timeline(forwards, TickTimes(1, 2)).ends_s
  assert [row[-1] for row in ends_s] == [7, 8, 9]


def test_a_schedule_is_a_value():
  one, same = (Pipeline("interleaved", 2, 4, 2) for _ in range(2))
  assert one.orders == same.orders
  assert len({one, same, Pipeline("interleaved", 2, 4, 3)}) == 2
  assert len(set(itertools.chain(*one.orders))) == 4 * 2 * 2
  for field in dataclasses.fields(one):
    with pytest.raises(dataclasses.FrozenInstanceError):
      setattr(one, field.name, getattr(same, field.name))


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
  with pytest.raises(ValueError, match=re.escape(message)) as caught:
    Pipeline(*arguments)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize(
  "field", [field.name for field in dataclasses.fields(TickTimes)]
)
def test_times_that_cannot_be_name_the_field_to_change(field, value):
  arguments = {"forward_s": 1.0, "backward_s": 1.0, field: value}
  with pytest.raises(ValueError, match=re.escape(f"{field}={value} must")):
    TickTimes(**arguments)


@pytest.mark.parametrize("field", ["forward_s", "backward_s"])
def test_work_takes_time(field):
  arguments = {"forward_s": 1.0, "backward_s": 1.0, field: 0.0}
  with pytest.raises(ValueError, match=f"{field}=0.0 must be above 0"):
    TickTimes(**arguments)


def test_there_is_no_closed_form_where_hops_take_time():
  times = TickTimes(1.0, 1.0, hop_s=2.0)
  with pytest.raises(ValueError, match="hop_s=2.0 must be 0"):
    closed_form_step_s(Pipeline("1f1b", 2, 2), times)
