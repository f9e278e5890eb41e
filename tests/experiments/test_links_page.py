"""The page of real links: ratios the right way round."""

import pytest

from experiments.tools import links_page
from experiments.tools.link_collectives import middle_mean
from experiments.tools.link_runs import Row

ALLREDUCE = Row("2 x 50 Mbit/s", "allreduce", 2.4, 2.0, 1.01)
OTHER = Row("2 x 50 Mbit/s", "dilocox", 0.2, 0.4, 1.0204)


def test_a_speed_up_is_the_time_of_allreduce_over_the_methods():
  assert links_page.cells_of(OTHER, ALLREDUCE) == {
    "links": "2 x 50 Mbit/s",
    "what": "dilocox",
    "predicted (s)": "0.2000",
    "measured (s)": "0.4000",
    "predicted / measured": "0.500",
    "counted / planned bytes": "1.020",
    "speed-up over AllReduce": "5.00",
    "by the simulator": "12.00",
  }
  alone = links_page.cells_of(OTHER, None)
  assert alone["speed-up over AllReduce"] == alone["by the simulator"] == ""


def test_methods_are_compared_with_allreduce_on_the_same_links(tmp_path):
  fast = Row("2 x 200 Mbit/s", "allreduce", 0.6, 0.8, 1.01)
  lines = links_page.report([ALLREDUCE, fast, OTHER], tmp_path)
  assert any("| dilocox |" in x and "| 5.00 | 12.00 |" in x for x in lines)


@pytest.mark.parametrize(
  ("values", "mean"),
  [([9.0, 1.0, 2.0, 3.0, 4.0], 3.0), ([1.0, 3.0], 2.0), ([7.0], 7.0)],
)
def test_the_middle_half_is_averaged(values, mean):
  assert middle_mean(values) == mean
