"""Rounds whose replicas are apart and meet in a store."""

import numpy as np
import pytest

from dilocox_jax.meeting.store import Store
from tests.meeting import apart
from tests.outer.problem import assert_close, assert_equal


@pytest.mark.parametrize("name", apart.METHODS)
def test_apart_is_as_together(name):
  num_replicas = 3
  losses, outer = apart.together(name, num_replicas)
  store = Store("memory:///")
  rules = apart.rules(num_replicas)

  def replica(number):
    return apart.alone(store, name, number, num_replicas, rules=rules)

  found = apart.in_threads(replica, num_replicas)
  for number, (own_losses, own_outer) in enumerate(found):
    assert_equal(own_outer, found[0][1])
    assert_close(own_outer, outer, 1e-6)
    assert_close(own_losses[0], losses[number], 1e-6)
  assert np.ptp(losses, axis=0).max() > 0.1
