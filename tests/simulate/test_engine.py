import math

import pytest

from dilocox_jax.simulate.engine import run_graph
from dilocox_jax.simulate.graph import Graph, Outage
from tests.simulate.graphs import alone, sends


def test_an_empty_graph_takes_no_time():
  timeline = run_graph(Graph(), alone())
  assert not timeline.end_s.size and timeline.num_events == 0


def test_a_resource_runs_one_task_at_a_time_in_order_of_readiness():
  graph = Graph()
  first = graph.task("first", "gpu", 2.0)
  early = graph.task("early", "other", 1.0)
  late = graph.task("late", "third", 1.5)
  third = graph.task("third", "gpu", 1.0, (late,))
  second = graph.task("second", "gpu", 4.0, (early,))
  timeline = run_graph(graph, {})
  assert timeline.start_s[[first, second, third]].tolist() == [0.0, 2.0, 6.0]
  assert timeline.end_s.max() == 7.0


def test_of_tasks_ready_at_one_time_the_lower_number_runs_first():
  graph = Graph()
  gates = [graph.task("gate", f"gate{n}", 1.0) for n in range(2)]
  graph.task("step", "gpu", 4.0, (gates[1],))
  graph.task("step", "gpu", 2.0, (gates[0],))
  # Takes no time, so what follows it is ready at the same moment.
  instant = graph.task("instant", "other", 0.0, (gates[1],))
  graph.task("step", "gpu", 1.0, (instant,))
  assert run_graph(graph, {}).start_s.tolist()[2:] == [1.0, 5.0, 1.0, 7.0]


def test_flows_share_a_fair_link():
  timeline = run_graph(sends(8.0, 2.0), alone(4.0))
  assert timeline.end_s.tolist() == [2.5, 1.0]
  assert timeline.start_s.tolist() == [0.0, 0.0]


def test_a_flow_keeps_to_its_own_limit():
  timeline = run_graph(sends(4.0, limit_bytes_per_s=0.5), alone())
  assert timeline.end_s.tolist() == [8.0]
  graph = Graph()
  graph.flow("copy", (), 6.0, limit_bytes_per_s=3.0)
  assert run_graph(graph, {}).end_s.tolist() == [2.0]


def test_the_link_is_free_while_bytes_travel():
  graph = sends(4.0, latency_s=10.0)
  follower = graph.flow("send", ("up",), 4.0, (0,))
  graph.task("gate", "gate", 1.0)
  other = graph.flow("send", ("up",), 4.0, (2,))
  timeline = run_graph(graph, alone(4.0))
  assert timeline.end_s[0] == 11.0 and timeline.end_s[other] == 2.0
  assert timeline.start_s[follower] == 11.0


def test_a_flow_of_nothing_needs_no_link():
  graph = sends(0.0, latency_s=0.5)
  graph.task("step", "gpu", 1.0, (0,))
  timeline = run_graph(graph, alone(0.0))
  assert timeline.end_s.tolist() == [0.5, 1.5]


@pytest.mark.parametrize("start_s", [0.0, 0.25, 1.0])
def test_an_outage_delays_a_blocked_flow_by_what_it_lasts(start_s):
  links = alone(2.0)
  outage = Outage("up", start_s, start_s + 5.5)
  assert run_graph(sends(4.0), links).end_s.tolist() == [2.0]
  assert run_graph(sends(4.0), links, [outage]).end_s.tolist() == [7.5]


def test_outages_that_overlap_are_one():
  outages = [Outage("up", 1.0, 3.0), Outage("up", 2.0, 5.0)]
  assert run_graph(sends(4.0), alone(2.0), outages).end_s.tolist() == [6.0]


def test_an_outage_of_one_link_stops_a_flow_over_two():
  graph = Graph()
  graph.flow("send", ("up", "down"), 4.0)
  graph.flow("send", ("up",), 6.0)
  links = {"up": 4.0, "down": 4.0}
  # The other has the first link for itself meanwhile.
  timeline = run_graph(graph, links, [Outage("down", 1.0, 2.0)])
  assert timeline.end_s.tolist() == [2.5, 2.0]


def test_an_outage_of_an_idle_link_delays_nobody():
  outages = [Outage("up", 2.0, 9.0)]
  assert run_graph(sends(4.0), alone(2.0), outages).end_s.tolist() == [2.0]


def test_more_bandwidth_can_end_a_run_later():
  """Graham's anomaly: what comes first to a queue need not be urgent."""
  graph = sends(6.0)
  bulk = graph.task("bulk", "gpu", 10.0, (0,))
  gate = graph.task("gate", "gate", 2.0)
  urgent = graph.task("urgent", "gpu", 1.0, (gate,))
  graph.task("rest", "other", 10.0, (urgent,))
  slow = run_graph(graph, alone(2.0))
  fast = run_graph(graph, alone(6.0))
  assert slow.start_s[urgent] < slow.start_s[bulk]
  assert fast.start_s[urgent] > fast.start_s[bulk]
  assert (slow.end_s.max(), fast.end_s.max()) == (13.0, 22.0)


def test_every_start_end_and_change_of_a_link_is_an_event():
  graph = sends(4.0, latency_s=1.0)
  graph.task("step", "gpu", 1.0)
  graph.flow("nothing", ("up",), 0.0)
  outages = [Outage("up", 0.5, 1.0)]
  assert run_graph(graph, alone(), outages).num_events == 3 + 2 + 2 + 2


@pytest.mark.parametrize(
  ("capacity", "outages"), [(0.0, []), (1.0, [Outage("up", 0.5, math.inf)])]
)
def test_a_flow_that_can_never_finish_is_an_error(capacity, outages):
  graph = sends(1.0, 1.0)
  with pytest.raises(ValueError, match="flow 'send' can never .* link 'up'"):
    run_graph(graph, alone(capacity), outages)


def test_a_link_that_never_comes_back_hurts_only_those_who_need_it():
  timeline = run_graph(sends(4.0), alone(4.0), [Outage("up", 1.0, math.inf)])
  assert timeline.end_s.max() == 1.0
