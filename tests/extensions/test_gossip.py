"""An exchange whose result differs by replica, and which reads parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.config import to_plan
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.outer.data_parallel import StepPrograms
from tests.contracts import test_bytes
from tests.extensions import gossip, runs

GOSSIP = gossip.aggregator()
LAYOUTS = ("stacked", "mesh")

pytestmark = pytest.mark.usefixtures("gossip_registered")


def config(num_replicas=4, layout="stacked", **changes):
  return runs.config(
    mesh={"num_replicas": num_replicas, "layout": layout},
    sync={"method": "diloco", "sync_interval": 3},
    exchange={"kind": "gossip", **changes},
  )


@pytest.mark.parametrize("num_replicas", [2, 4, 8])
def test_each_replica_meets_each_other_once(num_replicas):
  rounds = gossip.pairings(num_replicas)
  met = sorted(pair for pairs in rounds for pair in pairs)
  everyone = range(num_replicas)
  assert met == [(a, b) for a in everyone for b in everyone if a != b]
  assert all(len(pairs) == num_replicas for pairs in rounds)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pair_averages_and_draws_its_parameters_together(layout):
  # In the first round replica 0 meets 3, and 1 meets 2.
  over = Replicas(4, layout).map(GOSSIP.average, (0, None, 0), (0, 0, None))
  values = {"w": jnp.asarray([[1.0], [2.0], [4.0], [5.0]])}
  params = {"w": jnp.asarray([[10.0], [20.0], [20.0], [14.0]])}
  mean, sent, count = jax.jit(over)(values, jnp.int32(0), params)
  # 3 + 0.5 * (10 - 12) = 2, and 3 + 0.5 * (14 - 12) = 4.
  assert mean["w"].tolist() == [[2.0], [3.0], [3.0], [4.0]]
  assert sent["w"].tolist() == values["w"].tolist()
  assert count == 1


def test_a_replica_that_is_not_finite_does_not_reach_its_partner():
  over = Replicas(2).map(GOSSIP.average, (0, None, 0), (0, 0, None))
  values = {"w": jnp.asarray([[jnp.nan], [2.0]])}
  mean, sent, _ = over(values, jnp.int32(0), {"w": jnp.ones((2, 1))})
  assert mean["w"].tolist() == [[0.0], [0.0]]
  assert np.isnan(sent["w"][0, 0])


def test_an_exchange_moves_the_planned_bytes():
  plan = to_plan.traffic(config(num_replicas=2))
  shapes = plan.fragments.shapes(0, plan.shapes)
  tree = {
    path: jax.ShapeDtypeStruct((2, *shape), jnp.float32)
    for path, shape in shapes.items()
  }
  over = Replicas(2, "mesh").map(GOSSIP.average, (0, None, 0), (0, 0, None))
  count = jax.ShapeDtypeStruct((), jnp.int32)
  text = jax.jit(over).lower(tree, count, tree).compile().as_text()
  sizes = test_bytes.permuted(text)
  (operation,) = plan.exchange(0)
  assert sizes == [operation.operand_bytes]
  assert plan.exchange_bytes(0) == operation.operand_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_trains_and_its_replicas_stay_near_each_other(layout):
  programs, state = runs.assert_it_trains(config(layout=layout))
  outer = jax.tree.leaves(state.fragments[0].params)
  assert all(leaf.shape[0] == 4 for leaf in outer)
  spread = [float(jnp.max(jnp.std(leaf, axis=0))) for leaf in outer]
  assert 0 < max(spread) < 0.1
  flushed, drifts = programs.rounds.flush(state)
  assert not drifts
  mean = programs.rounds.outer_params(flushed)
  for leaf, of_all in zip(jax.tree.leaves(mean), outer, strict=True):
    np.testing.assert_allclose(leaf, jnp.mean(of_all, axis=0), atol=1e-6)


def test_a_run_is_simulated_with_the_bytes_of_one_partner():
  few, many = (runs.simulated(config(count)) for count in (2, 8))
  np.testing.assert_allclose(few.sent_bytes, many.sent_bytes)
  assert few.exposed_s.max() > 0


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"kind": "gosip"}, "exchange.kind='gosip' must be one of mean, gossip"),
    ({"collective": "all_gather"}, "gossip has no collective"),
    ({"codec": "int"}, "gossip sends float32: set exchange.codec=float32"),
  ],
)
def test_what_it_cannot_do_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    to_plan.traffic(config(**changes)).exchange(0)


def test_steps_on_one_mean_gradient_are_refused():
  with pytest.raises(ValueError, match="need one mean for all replicas"):
    StepPrograms(lambda: None, optax.sgd(1.0), GOSSIP, Replicas(2))
