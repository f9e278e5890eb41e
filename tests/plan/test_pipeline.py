"""Schedules of pipelines: their order, their time and their buffers."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.plan.model.division import StageLayers
from dilocox_jax.plan.pipeline import (
  ACTIONS,
  PIPELINES,
  Pipeline,
  Tick,
  timeline,
)

SECONDS = st.floats(1e-3, 1e3)
PIPELINE = st.builds(
  Pipeline, st.sampled_from(PIPELINES), st.integers(1, 6), st.integers(1, 12)
)


@pytest.mark.parametrize(
  ("name", "stage", "drawn"),
  [
    # arXiv 1811.06965, Figure 2c.
    ("gpipe", 0, "F1 F2 F3 F4 B4 B3 B2 B1"),
    ("gpipe", 3, "F1 F2 F3 F4 B4 B3 B2 B1"),
    # arXiv 2104.04473, Figure 4, above.
    ("1f1b", 0, "F1 F2 F3 F4 B1 F5 B2 F6 B3 F7 B4 F8 B5 B6 B7 B8"),
    ("1f1b", 1, "F1 F2 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 F8 B6 B7 B8"),
    ("1f1b", 3, "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8"),
  ],
)
def test_the_orders_are_those_of_the_papers_figures(name, stage, drawn):
  order = Pipeline(name, 4, drawn.count("F")).order(stage)
  written = [f"{t.action[0].upper()}{t.micro_batch + 1}" for t in order]
  assert written == drawn.split()


def waits(pipeline, hop_s, end_s):
  """By stage and tick: whatever it waits for, as times it may not precede."""
  limits = {key: [0.0] for key in end_s}
  stages = range(pipeline.num_stages)
  for stage in stages:
    for before, after in itertools.pairwise(pipeline.order(stage)):
      limits[stage, after].append(end_s[stage, before])
  for batch in range(pipeline.num_micro_batches):
    there = [(stage, Tick("forward", batch)) for stage in stages]
    back = [(stage, Tick("backward", batch)) for stage in reversed(stages)]
    for before, after in itertools.pairwise(there + back):
      limits[after].append(end_s[before] + hop_s * (before[0] != after[0]))
  return limits


@given(PIPELINE, SECONDS, SECONDS, st.just(0.0) | SECONDS)
def test_a_tick_starts_as_soon_as_nothing_is_left_to_wait_for(
  pipeline, forward_s, backward_s, hop_s
):
  found = timeline(pipeline, forward_s, backward_s, hop_s)
  work_s = {"forward": forward_s, "backward": backward_s}
  end_s = {key: s + work_s[key[1].action] for key, s in found.start_s.items()}
  for key, limits_s in waits(pipeline, hop_s, end_s).items():
    assert found.start_s[key] == max(limits_s)
  assert found.step_s == max(end_s.values())
  stages = pipeline.num_stages
  batches = pipeline.num_micro_batches
  if pipeline.name == "gpipe" or not hop_s:
    # arXiv 1811.06965; arXiv 2104.04473, section 2.2.1.
    step_s = (batches + stages - 1) * (forward_s + backward_s)
    step_s += 2 * (stages - 1) * hop_s
    assert found.step_s == pytest.approx(step_s, rel=1e-12)
  busy_s = batches * (forward_s + backward_s)
  share = 1 - busy_s / found.step_s
  assert found.bubble_fraction == pytest.approx(share, abs=1e-9)


@given(PIPELINE)
def test_what_a_stage_reads_in_lockstep_is_what_it_needs(pipeline):
  """Runs the table with names in place of arrays.

  Each stage sends its newest results at the end of every tick.
  """
  stages = range(pipeline.num_stages)
  table = pipeline.timetable
  newest = {(s, kind): None for s in stages for kind in ACTIONS[1:]}
  arrived = dict(newest)
  saved = [{} for _ in stages]
  outputs = [{} for _ in stages]
  done = [[] for _ in stages]
  for row in zip(*table, strict=True):
    for stage, (action, batch, slot, output) in enumerate(
      np.array(row).T.tolist()
    ):
      if action == 0:
        continue
      tick = Tick(ACTIONS[action], batch)
      done[stage].append(tick)
      newest[stage, tick.action] = batch
      if tick.action == "forward":
        assert stage == 0 or arrived[stage - 1, "forward"] == batch
        assert slot not in saved[stage]  # Nobody needs it any more.
        saved[stage][slot] = batch
        outputs[stage][output] = batch
      else:
        assert saved[stage].pop(slot) == batch
        is_last = stage == stages[-1]
        gradient = arrived.get((stage + 1, "backward"))
        assert (outputs[stage][output] if is_last else gradient) == batch
    arrived = dict(newest)
  assert done == [pipeline.order(stage) for stage in stages]
  batches = pipeline.num_micro_batches
  assert len(table.action) == 2 * (batches + len(stages) - 1)
  fewest = min(batches, len(stages)) if pipeline.name == "1f1b" else batches
  assert pipeline.num_saved_slots == fewest
  assert {column.dtype for column in table} == {np.dtype(np.int32)}


@given(st.integers(1, 40), st.integers(1, 6))
def test_layers_are_cut_into_even_neighboring_parts(layers, stages):
  if stages > layers:
    with pytest.raises(ValueError, match=f"num_layers={layers} cannot be cut"):
      StageLayers(layers, stages)
    return
  parts = StageLayers(layers, stages)
  found = []
  for count, row in zip(parts.counts, parts.table, strict=True):
    assert all(row[count:] == layers)
    found.extend(row[:count])
  assert found == list(range(layers))
  assert parts.counts.max() - 1 <= parts.counts.min() == parts.counts[-1] > 0
  np.testing.assert_array_equal(parts.table.reshape(-1)[parts.rows], found)
  assert parts.is_even == (parts.table.size == layers)
