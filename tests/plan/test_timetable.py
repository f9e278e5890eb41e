import dataclasses

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dilocox_jax.plan.pipeline.orders import PIPELINES, Tick
from dilocox_jax.plan.pipeline.timeline import Pipeline
from dilocox_jax.plan.pipeline.timetable import ACTIONS, timetable

KINDS = {
  "saved": ("saved_slot", "saved_slot"),
  "activation": ("activation_put", "activation_slot"),
  "gradient": ("gradient_put", "gradient_slot"),
  "pair": ("pair_slot", "pair_slot"),
}


@st.composite
def pipelines(draw, names=PIPELINES, least_stages=1):
  name = draw(st.sampled_from(names))
  stages = draw(st.integers(least_stages, 6))
  if name != "interleaved":
    return Pipeline(name, stages, draw(st.integers(1, 12)))
  groups = draw(st.integers(1, 12 // stages))
  return Pipeline(name, stages, stages * groups, draw(st.integers(2, 3)))


class Stage:
  """Buffers that hold tags, and will neither lose nor invent one."""

  def __init__(self, table, stage):
    self.table, self.stage = table, stage
    self.held = {
      kind: [None] * getattr(table, f"num_{kind}_slots") for kind in KINDS
    }
    self.most = dict.fromkeys(KINDS, 0)
    self.unused = set()

  def begin(self, at):
    """Every slot that the row names has to be used before the next."""
    assert not self.unused
    self.at = at
    columns = {column for pair in KINDS.values() for column in pair}
    for column in (*columns, "turn_slot"):
      if self._slot(column) < len(self.held[self._kind(column)]):
        self.unused.add(column)

  def _kind(self, column):
    kind = column.split("_")[0]
    return "gradient" if kind == "turn" else kind

  def _slot(self, column):
    slot = getattr(self.table, column)[self.at, self.stage]
    assert 0 <= slot <= len(self.held[self._kind(column)])
    return slot

  def put(self, column, tag):
    held = self.held[self._kind(column)]
    self.unused.remove(column)
    assert held[self._slot(column)] is None  # Nobody needs it any more.
    held[self._slot(column)] = tag
    count = sum(value is not None for value in held)
    self.most[self._kind(column)] = max(self.most[self._kind(column)], count)

  def read(self, column, tag):
    held = self.held[self._kind(column)]
    self.unused.remove(column)
    assert held[self._slot(column)] == tag
    held[self._slot(column)] = None


def act(stage, tick, num_parts, is_forward_only):
  """Does what a row says; returns activations and gradients to send."""
  batch = tick.micro_batch
  part = tick.chunk * stage.table.num_stages + stage.stage
  is_last = part + 1 == num_parts
  if tick.direction == "forward":
    if part:
      stage.read("activation_slot", (part, batch))
    if not is_forward_only:
      stage.put("saved_slot", (part, batch))
    if is_last:
      if not is_forward_only:
        stage.put("turn_slot", ("turned", batch))
      return None, None
    return (part + 1, batch), None
  if tick.direction == "weight_gradient":
    stage.read("pair_slot", (part, batch))
    return None, None
  stage.read("saved_slot", (part, batch))
  stage.read("gradient_slot", ("turned", batch) if is_last else (part, batch))
  if tick.direction == "input_gradient":
    stage.put("pair_slot", (part, batch))
  return None, (part - 1, batch) if part else None


def walk(pipeline, table):
  """Runs the whole table; returns the stages and what each of them did."""
  num_stages = pipeline.num_stages
  num_parts = num_stages * pipeline.chunks_per_stage
  stages = [Stage(table, stage) for stage in range(num_stages)]
  done = [[] for _ in stages]
  sent = [(None, None)] * num_stages
  for at in range(len(table.action)):
    arrived, sent = sent, [(None, None)] * num_stages
    for number, stage in enumerate(stages):
      stage.begin(at)
      activation = arrived[(number - 1) % num_stages][0]
      gradient = arrived[(number + 1) % num_stages][1]
      for column, tag in (
        ("activation_put", activation),
        ("gradient_put", gradient),
      ):
        if tag is not None:
          stage.put(column, tag)
      action = ACTIONS[table.action[at, number]]
      batch, chunk = (
        int(values[at, number]) for values in (table.micro_batch, table.chunk)
      )
      if action == "idle":
        assert batch == chunk == 0
        continue
      tick = Tick(action, batch, chunk)
      done[number].append((at, tick))
      sent[number] = act(stage, tick, num_parts, pipeline.is_forward_only)
  for stage in stages:
    assert not stage.unused
  return stages, done


@given(pipelines())
def test_every_entry_runs_once_in_order_as_early_as_its_needs_allow(pipeline):
  """What is needed is there, buffers end empty, and no slot is left over."""
  table = timetable(pipeline)
  stages, done = walk(pipeline, table)  # Asserts at every read and write.
  assert tuple(tuple(t for _, t in row) for row in done) == pipeline.orders
  for kind in KINDS:
    assert all(set(stage.held[kind]) <= {None} for stage in stages)
    most = max(stage.most[kind] for stage in stages)
    assert getattr(table, f"num_{kind}_slots") == most
  row = {
    (stage, tick): at
    for stage, entries in enumerate(done)
    for at, tick in entries
  }
  for stage, entries in enumerate(done):
    before = -1
    for at, tick in entries:
      needed = [row[key] for key in pipeline.dependencies(stage, tick)]
      assert at == 1 + max([before, *needed])
      before = at
  batches = pipeline.num_micro_batches
  fewest = {"gpipe": batches, "interleaved": table.num_saved_slots}
  few = fewest.get(pipeline.name, min(batches, pipeline.num_stages))
  assert table.num_saved_slots == few
  for field in dataclasses.fields(table):
    value = getattr(table, field.name)
    if not field.name.startswith("num_"):
      assert value.dtype == np.int32
      assert value.shape == (len(table.action), pipeline.num_stages)


@given(pipelines(), st.integers(1, 12))
@example(Pipeline("interleaved", 4, 4, 3), 6)
def test_forwards_alone_run_in_order_without_a_stop(pipeline, num_batches):
  forwards = pipeline.forward_only(num_batches)
  table = timetable(forwards)
  stages, done = walk(forwards, table)
  assert tuple(tuple(t for _, t in row) for row in done) == forwards.orders
  num_parts = num_batches * pipeline.chunks_per_stage
  assert {len(row) for row in done} == {num_parts}
  # A group that is not full leaves the next chunk waiting for its first one.
  missing = -num_batches % pipeline.num_stages
  waits = missing * (pipeline.chunks_per_stage - 1)
  assert len(table.action) == num_parts + pipeline.num_stages - 1 + waits
  for stage in stages:
    assert all(set(held) <= {None} for held in stage.held.values())
  assert table.num_saved_slots == table.num_gradient_slots == 0


@pytest.mark.parametrize("name", PIPELINES)
@given(st.data())
def test_a_step_has_as_many_ticks_as_the_closed_form_says(name, data):
  pipeline = data.draw(pipelines((name,)))
  stages, batches = pipeline.num_stages, pipeline.num_micro_batches
  whole = 2 * (batches * pipeline.chunks_per_stage + stages - 1)
  ticks = {
    # Weight gradients fill what they can of the way back.
    "zb_h1": whole + batches - (min(batches, stages) - 1)
  }.get(name, whole)
  assert len(timetable(pipeline).action) == ticks
