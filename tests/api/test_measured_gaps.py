"""What the planner knows of losses is what the committed runs say."""

import json
import pathlib
import re

import pytest

from dilocox_jax.api import measured_gaps as module
from dilocox_jax.api.measured_gaps import measured_gaps, share_of_more_steps
from experiments.sweeps import measured

ROOT = pathlib.Path(__file__).parents[2]


def test_the_file_is_what_the_rows_say():
  assert json.loads(module.PATH.read_text()) == measured.collected()


def test_the_gaps_are_those_of_the_readme():
  """Its table has gaps at 4 x 4, and its text that of two replicas."""
  readme = (ROOT / "README.md").read_text()
  rows = re.findall(r"^\| `(\w+)` \|.*?\| \+([\d.]+) % \|$", readme, re.M)
  assert len(rows) == 5
  for method, gap in rows:
    (found,) = [g for g in measured_gaps(method, 4) if "," not in g.name]
    assert found.baseline == "allreduce, momentum of nine tenths, 4x4"
    assert 100 * found.gap == pytest.approx(float(gap), abs=0.051)
  assert "two ended 1.95 % above AllReduce" in " ".join(readme.split())
  words = [gap.words for gap in measured_gaps("overlap_loco", 2)]
  assert any(each.startswith("+1.95 ± 0.10 % (2 x 4, H = 16") for each in words)
  assert any(
    each.startswith("+1.99 ± 0.25 %") and "momentum 0.9" in each
    for each in words
  )


@pytest.mark.parametrize(
  ("num_replicas", "nearest"),
  [(1, 2), (2, 2), (3, 4), (4, 4), (5, 4), (6, 8), (11, 8), (12, 16), (99, 16)],
)
def test_the_nearest_number_of_replicas_counts(num_replicas, nearest):
  found = measured_gaps("overlap_loco", num_replicas)
  assert {gap.num_replicas for gap in found} == {nearest}
  others = measured_gaps("streaming_diloco", 2)
  assert {gap.num_replicas for gap in others} == {4}
  assert measured_gaps("delayed", 2) == []


def test_twice_as_many_steps_end_7_per_cent_lower():
  """AllReduce: 1.2475 after 2,000 and 1.0095 after 17,000 (three seeds)."""
  assert share_of_more_steps(8.5) == pytest.approx(1.0095 / 1.2475, rel=1e-3)
  assert share_of_more_steps(2) == pytest.approx(0.934, abs=1e-3)
  assert share_of_more_steps(1) == 1
