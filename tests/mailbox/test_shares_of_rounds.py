"""Rounds whose replicas make their mean in shares."""

import numpy as np
import pytest

from dilocox_jax.mailbox_protocol.store import Store
from tests.mailbox import apart
from tests.tiers import slow

REPLICAS = 3


def in_shares(name, shares="on"):
  store = Store("memory:///")
  rules = apart.rules(REPLICAS, shares=shares)
  results = apart.in_threads(
    lambda n: apart.alone(store, name, n, rules=rules), REPLICAS, store
  )
  paths = store.sizes("share")
  return [losses for losses, _ in results], [p for _, p in results], paths


@pytest.mark.parametrize("name", ["diloco", *slow("delayed")])
def test_a_mean_of_floats_in_shares_is_the_mean(name):
  losses, params, paths = in_shares(name)
  assert paths
  _, expected = apart.together(name, REPLICAS)
  for each in params:
    np.testing.assert_allclose(each["head"], expected["head"], rtol=1e-5)


@pytest.mark.parametrize(
  "name", ["overlap_loco", *slow("dilocox", "streaming_diloco")]
)
def test_all_replicas_apply_the_same_shares(name):
  losses, params, paths = in_shares(name)
  has_residuals = name != "streaming_diloco"  # It makes up for no loss.
  assert any(path.endswith(".rest") for path in paths) == has_residuals
  for each in params[1:]:
    assert each["head"].tobytes() == params[0]["head"].tobytes()
  whole_losses, _, no_paths = in_shares(name, shares="off")
  assert not no_paths
  last = np.mean([each[:, -8:] for each in losses])
  whole = np.mean([each[:, -8:] for each in whole_losses])
  assert last < 1.1 * whole
