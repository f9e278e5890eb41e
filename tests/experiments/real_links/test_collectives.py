import math
import time

import pytest

from experiments.real_links import collectives


@pytest.mark.parametrize("kind", list(collectives._MOVES))
def test_each_kind_is_timed_also_by_a_single_process(kind):
  ((seconds, sent, busy),) = collectives.measure([(kind, 1 << 26)], 3)
  assert 0 < seconds < 60 and math.isnan(sent)  # It has no link to count.
  assert math.isnan(busy) or 0 <= busy <= 1  # Unknown if no tick has passed.


def test_the_middle_mean_leaves_a_quarter_out_at_each_end():
  assert collectives.middle_mean([100.0, 1.0, 3.0, 2.0, 0.0]) == 2.0
  assert collectives.middle_mean([4.0, 8.0]) == 6.0


def test_a_process_that_works_keeps_a_core_busy():
  cores, end_s = collectives.CoreUse(), time.perf_counter() + 0.2
  while time.perf_counter() < end_s:
    pass
  assert 0 < cores.busy_share() <= 1
