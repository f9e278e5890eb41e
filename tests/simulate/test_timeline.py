from dilocox_jax.simulate.graph import Graph
from dilocox_jax.simulate.timeline import link_bytes, rates_of


def test_a_link_carries_the_flows_that_cross_it():
  graph = Graph()
  graph.task("step", "up", 64.0)  # A resource may be called like a link.
  graph.flow("send", ("up", "down"), 1.0)
  graph.flow("send", ("up", "down"), 2)
  graph.flow("send", ("up",), 4.0)
  carried = link_bytes(graph, ["up", "down", "idle"])
  assert carried == {"up": 7.0, "down": 3.0, "idle": 0.0}


def test_changes_of_rates_become_columns():
  rates = rates_of([(0.0, 3, 5.0), (1.5, 3, 0.0)])
  assert rates.time_s.tolist() == [0.0, 1.5]
  assert rates.number.tolist() == [3, 3]
  assert rates.bytes_per_s.tolist() == [5.0, 0.0]
  assert rates_of([]).time_s.shape == (0,)
