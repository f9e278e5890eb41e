"""The event oracle beside SimGrid, an independent flow-level simulator."""

import json
import math
import pathlib

import numpy as np
import pytest

from dilocox_jax.simulate.cluster import Outage
from tests.oracles import events

# Asked of SimGrid 3.32 with its model of TCP switched off as far as it departs
# from max-min shares; the file says with which configuration.
GOLDEN = pathlib.Path(__file__).parent / "golden" / "simgrid.json"
CASES = json.loads(GOLDEN.read_text())["cases"]


@pytest.mark.parametrize("name", CASES)
def test_every_flow_ends_when_simgrid_says(name):
  case, graph, numbers = CASES[name], events.Graph(), []
  for each in case["flows"]:
    after = [numbers[earlier] for earlier in each["after"]]
    after.append(graph.flow((), 0.0, (), each["start_s"]))
    limit = each["limit_bytes_per_s"] or math.inf
    args = tuple(each["links"]), each["size_bytes"], after, 0.0, limit
    numbers.append(graph.flow(*args))
  _, end_s = events.run_graph(graph, case["links"])
  np.testing.assert_allclose(end_s[numbers], case["end_s"], rtol=1e-9)


def test_a_flow_waits_while_its_link_is_down():
  graph = events.Graph()
  graph.flow(("up",), 4.0)
  _, end_s = events.run_graph(graph, {"up": 2.0}, [Outage("up", 1.0, 6.5)])
  assert end_s == pytest.approx([7.5])
