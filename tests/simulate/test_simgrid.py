"""Our engine beside SimGrid, an independent and older flow-level simulator."""

import json
import math
import pathlib

import numpy as np
import pytest

from dilocox_jax.simulate import engine, graph

GOLDEN = pathlib.Path(__file__).parent / "golden" / "simgrid.json"
CASES = json.loads(GOLDEN.read_text())["cases"]
# Both solve the same equations, so only rounding may differ.
TOLERANCE = 1e-9


def ends_s(case):
  """Ends of the case's flows; a clock of its own holds a late one back."""
  built = graph.Graph()
  numbers = []
  for index, each in enumerate(case["flows"]):
    after = [numbers[earlier] for earlier in each["after"]]
    if each["start_s"]:
      after.append(built.task("clock", f"clock{index}", each["start_s"]))
    numbers.append(
      built.flow(
        f"flow{index}",
        tuple(each["links"]),
        each["size_bytes"],
        after,
        limit_bytes_per_s=each["limit_bytes_per_s"] or math.inf,
      )
    )
  return engine.run_graph(built, case["links"]).end_s[numbers]


@pytest.mark.parametrize("name", CASES)
def test_every_flow_ends_when_simgrid_says(name):
  case = CASES[name]
  np.testing.assert_allclose(ends_s(case), case["end_s"], rtol=TOLERANCE)


def test_the_record_says_how_it_was_made():
  record = json.loads(GOLDEN.read_text())
  script = pathlib.Path(record["command"].split()[-1])
  assert (GOLDEN.parents[3] / script).is_file()
  assert record["simgrid"] and record["configuration"]
