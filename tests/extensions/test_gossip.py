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


def config(num_replicas=4, layout="stacked", **changes):
  return runs.config(
    mesh={"num_replicas": num_replicas, "layout": layout},
    sync={"method": "diloco", "sync_interval": 3},
    exchange={"kind": "gossip", **changes},
  )


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
  values = {"w": values["w"].at[3].set(jnp.nan)}
  mean, *_ = jax.jit(over)(values, jnp.int32(0), params)
  assert mean["w"].tolist() == [[0.0], [3.0], [3.0], [0.0]]


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
  (operation,) = plan.exchange(0)
  assert test_bytes.permuted(text) == [operation.operand_bytes]
  few, many = (runs.simulated(config(number)) for number in (2, 8))
  np.testing.assert_allclose(few.sent_bytes, many.sent_bytes)
  assert few.exposed_s.max() > 0


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


@pytest.mark.parametrize(
  "call, message",
  [
    (lambda: config(kind="gosip"), "'gosip' must be one of mean, gossip"),
    (lambda: config(collective="all_gather"), "gossip has no collective"),
    (lambda: config(codec="int"), "set exchange.codec=float32"),
    (
      lambda: StepPrograms(lambda: None, optax.sgd(1.0), GOSSIP, Replicas(2)),
      "need one mean for all replicas",
    ),
  ],
)
def test_what_it_cannot_do_is_refused(call, message):
  with pytest.raises(ValueError, match=message):
    to_plan.traffic(call()).exchange(0)
