"""Streaming DiLoCo's Table 4, layer by layer, against an event simulation."""

import collections
import dataclasses
import heapq

import numpy as np
import pytest

from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule
from experiments.tables import layers, streaming_diloco
from experiments.tables.layers import LayerMethod, LayerModel
from experiments.tables.table import load_published

FIGURES = load_published("streaming_diloco")
SMALL = LayerModel(3e6, 7, 0.02)
ROWS = tuple(layers.table_methods(24))


def test_the_table_of_streaming_diloco_is_reproduced():
  (rows, _) = (made.rows for made in streaming_diloco.build_tables())
  cells = np.abs([row.grid_steps for row in rows])
  assert cells.size == 75
  assert (cells == 0).sum() >= 63
  assert cells.max() <= 1
  for row in rows:
    assert row.grid_steps == 0 or "Streaming" in row.name


def free_running(model, method, bandwidth_bps, num_rounds):
  """One bandwidth, one node at a time, on an event heap; returns end times."""
  count, interval = model.num_layers, method.schedule.sync_interval
  parts = method.schedule.num_fragments
  num_steps = num_rounds * interval
  duration = {
    "forward": model.forward_share * model.step_s / count,
    "backward": (1 - model.forward_share) * model.step_s / (2 * count - 1),
    "reduce": model.num_parameters / count * method.bits / bandwidth_bps,
  }

  def is_sent(step, layer):
    fragment = layer % (parts - 1) + 1 if parts > 1 else 0
    phase = fragment * interval // parts
    return step >= interval and (step - phase) % interval == 0

  program = collections.deque()
  for step in range(1, num_steps + 1):
    program.extend(("forward", step, layer) for layer in range(count))
    for layer in reversed(range(count)):
      if layer:
        program.append(("activation", step, layer))
      program.append(("weight", step, layer))
  events, queue, reduced = [], collections.deque(), set()
  ends, is_computing, on_link, number = {}, False, False, 0
  now = 0.0
  while True:
    if program and not is_computing:
      kind, step, layer = program[0]
      source = step - 1 - method.schedule.overlap_steps
      waits = kind == "forward" and source > 0 and is_sent(source, layer)
      if not waits or (source, layer) in reduced:
        length = duration["forward" if kind == "forward" else "backward"]
        number += 1
        heapq.heappush(events, (now + length, number, program.popleft()))
        is_computing = True
    if queue and not on_link:
      number += 1
      node = ("reduce", *queue.popleft())
      heapq.heappush(events, (now + duration["reduce"], number, node))
      on_link = True
    if not events:
      return ends
    now, _, node = heapq.heappop(events)
    ends[node] = now
    kind, step, layer = node
    if kind == "reduce":
      on_link = False
      reduced.add((step, layer))
      continue
    is_computing = False
    if kind == "weight" and is_sent(step, layer):
      queue.append((step, layer))


@pytest.mark.parametrize("row", ROWS)
def test_the_recurrence_agrees_with_an_event_simulation_of_every_node(row):
  method = layers.table_methods(7)[row]
  model, num_rounds = dataclasses.replace(SMALL, forward_share=0.3), 3
  bandwidths = np.array([3e7, 2e8, 1e9, 2e10])
  found = layers.simulate_layers(model, method, bandwidths, num_rounds)
  for index, bandwidth in enumerate(bandwidths):
    ends = free_running(model, method, bandwidth, num_rounds)
    num_steps = num_rounds * method.schedule.sync_interval
    expected = [ends["weight", s, 0] for s in range(1, num_steps + 1)]
    np.testing.assert_allclose(found.ends_s[:, index], expected, rtol=1e-12)


def test_an_unreachable_utilisation_needs_infinite_bandwidth():
  model = dataclasses.replace(SMALL, num_parameters=1e18)
  found = layers.needed_bandwidth_bps(model, LayerMethod(SyncSchedule(1)))
  assert np.all(found == np.inf)
