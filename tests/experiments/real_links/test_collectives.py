import math

import pytest

from experiments.real_links import collectives


@pytest.mark.parametrize("kind", list(collectives._MOVES))
def test_each_kind_is_timed_also_by_a_single_process(kind):
  ((seconds, sent),) = collectives.measure([(kind, 4096)])
  assert 0 < seconds < 60 and math.isnan(sent)  # It has no link to count.
