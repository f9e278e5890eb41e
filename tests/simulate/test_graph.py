import math

import pytest

from dilocox_jax.simulate.graph import Graph, Outage
from tests.simulate.graphs import predecessors


@pytest.fixture
def graph():
  """A graph with one task, number 0."""
  graph = Graph()
  graph.task("step", "gpu", 1.0)
  return graph


def test_numbers_count_tasks_and_flows_together(graph):
  assert graph.flow("send", ("up",), 8.0, after=(0,)) == 1
  assert graph.task("step", "gpu", 2.0, after=(0, 1)) == 2
  assert len(graph) == 3


def test_columns_hold_what_was_given(graph):
  graph.flow("send", ("up", "down"), 8, (0,), 0.25, 16, tag="outer")
  assert graph.names == ["step", "send"]
  assert graph.tags == ["", "outer"]
  assert graph.places == ["gpu", ("up", "down")]
  assert graph.amounts.tolist() == [1.0, 8.0]
  assert graph.latencies_s.tolist() == [0.0, 0.25]
  assert graph.limits_bytes_per_s.tolist() == [math.inf, 16.0]


def test_predecessors_are_those_given(graph):
  graph.task("step", "gpu", 1.0, after=iter((0,)))
  graph.task("step", "gpu", 1.0)
  graph.task("step", "gpu", 1.0, after=(0, 2))
  lists = [predecessors(graph, number) for number in range(4)]
  assert lists == [[], [0], [], [0, 2]]


def test_flows_over_the_same_links_share_one_route(graph):
  for _ in range(2):
    graph.flow("send", tuple(["up", "down"]), 1.0)
  assert graph.places[1] is graph.places[2]


def refusal(function, *arguments, **fields):
  with pytest.raises(ValueError) as refused:
    function(*arguments, **fields)
  message = str(refused.value)
  assert "\n" not in message
  return message


@pytest.mark.parametrize("duration_s", [-1.0, math.nan, math.inf])
def test_a_task_has_a_duration(graph, duration_s):
  message = refusal(graph.task, "step", "gpu", duration_s)
  assert f"task 'step': duration_s={duration_s}" in message


@pytest.mark.parametrize("size_bytes", [-1.0, math.nan, math.inf])
def test_a_flow_has_a_size(graph, size_bytes):
  message = refusal(graph.flow, "send", ("up",), size_bytes)
  assert f"flow 'send': size_bytes={size_bytes}" in message


@pytest.mark.parametrize("after", [(1,), (2,), (-1,), (0, 1)])
def test_a_node_waits_for_earlier_ones_only(graph, after):
  message = refusal(graph.task, "step", "gpu", 1.0, after)
  assert f"after={after}" in message and "from 0 to 0" in message
  message = refusal(graph.flow, "send", ("up",), 1.0, after)
  assert f"flow 'send': after={after}" in message


@pytest.mark.parametrize("latency_s", [-1.0, math.nan, math.inf])
def test_a_flow_arrives(graph, latency_s):
  message = refusal(graph.flow, "send", ("up",), 1.0, latency_s=latency_s)
  assert f"latency_s={latency_s}" in message


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_flow_may_move(graph, limit):
  message = refusal(graph.flow, "send", ("up",), 1.0, limit_bytes_per_s=limit)
  assert f"limit_bytes_per_s={limit}" in message


def test_a_flow_crosses_a_link_once(graph):
  assert "'up', 'up'" in refusal(graph.flow, "send", ("up", "up"), 1.0)


def test_a_refused_node_leaves_no_trace(graph):
  refusal(graph.task, "step", "gpu", 1.0, (5,))
  refusal(graph.flow, "send", ("up",), -1.0)
  assert graph.task("step", "gpu", 1.0, (0,)) == 1
  assert predecessors(graph, 1) == [0]


@pytest.mark.parametrize(
  ("start_s", "stop_s"), [(-1.0, 1.0), (1.0, 1.0), (2.0, 1.0), (0.0, math.nan)]
)
def test_an_outage_takes_time(start_s, stop_s):
  message = refusal(Outage, "up", start_s, stop_s)
  assert f"'up': start_s={start_s}" in message and str(stop_s) in message
