import math

import pytest

from dilocox_jax.simulate.graph import Graph
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
