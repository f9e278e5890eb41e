from dilocox_jax.simulate.graph import Graph
from dilocox_jax.simulate.timeline import link_bytes


def test_a_link_carries_the_flows_that_cross_it():
  graph = Graph()
  graph.task("step", "up", 64.0)  # A resource may be called like a link.
  graph.flow("send", ("up", "down"), 1.0)
  graph.flow("send", ("up", "down"), 2)
  graph.flow("send", ("up",), 4.0)
  carried = link_bytes(graph, ["up", "down", "idle"])
  assert carried == {"up": 7.0, "down": 3.0, "idle": 0.0}
