"""A trace that a viewer opens."""

import collections
import json

import pytest

from dilocox_jax.simulate.engine import run_graph
from dilocox_jax.simulate.graph import Graph
from dilocox_jax.simulate.lowering import lower, simulate
from dilocox_jax.simulate.trace import chrome_trace
from tests.simulate import small


def traced(name="streaming_diloco", num_replicas=3):
  one = small.cluster(num_replicas)
  script, plan = small.script(name, num_replicas)
  link_costs = small.link_costs(one)
  lowered = lower(link_costs, small.work(one), script.ops(plan))
  _, timeline = simulate(lowered)
  return lowered.graph, timeline


@pytest.mark.parametrize("name", ["diloco", "dilocox", "streaming_diloco"])
def test_events_of_one_track_never_overlap(name):
  graph, timeline = traced(name)
  trace = json.loads(json.dumps(chrome_trace(graph, timeline)))
  tracks = collections.defaultdict(list)
  for event in trace["traceEvents"]:
    if event["ph"] == "X":
      tracks[event["pid"], event["tid"]].append(event)
  assert sum(map(len, tracks.values())) == len(graph)
  for events in tracks.values():
    events.sort(key=lambda event: event["ts"])
    for one, other in zip(events, events[1:], strict=False):
      assert one["ts"] + one["dur"] <= other["ts"] * (1 + 1e-12)


def test_flows_that_share_a_route_get_lanes_of_their_own():
  graph = Graph()
  for _ in range(3):
    graph.flow("x", ("wire",), 100)
  timeline = run_graph(graph, {"wire": 10.0})
  trace = chrome_trace(graph, timeline)
  lanes = {e["tid"] for e in trace["traceEvents"] if e["ph"] == "X"}
  assert len(lanes) == 3


def test_every_track_has_a_name_and_every_flow_its_bytes():
  graph, timeline = traced()
  events = chrome_trace(graph, timeline)["traceEvents"]
  named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
  drawn = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
  assert drawn == named
  sizes = [e["args"]["bytes"] for e in events if "bytes" in e.get("args", {})]
  assert sum(sizes) == pytest.approx(
    sum(
      a
      for a, p in zip(graph.amounts, graph.places, strict=True)
      if not isinstance(p, str)
    )
  )
