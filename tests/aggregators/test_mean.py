"""The plain mean, and the trial of an aggregator that somebody hands in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.aggregators.feedback import exchange
from dilocox_jax.aggregators.mean import (
  check_leaves_out,
  mean_of_finite_replicas,
)
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.plan.choices import LAYOUTS
from dilocox_jax.trees import Aggregator


def averaged(values, layout="stacked"):
  """The mean that all replicas agree on; leaves of values are [M, ...]."""
  aggregator = mean_of_finite_replicas()

  def one(own):
    state = aggregator.init(own)
    mean, kept = aggregator.update(own, state)
    assert kept == state
    return mean

  replicas = Replicas(jax.tree.leaves(values)[0].shape[0], layout)
  return jax.jit(replicas.map(one, (0,), None))(values)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_the_exchange_is_the_mean_over_replicas(num_replicas, layout, x64):
  rng = np.random.default_rng(num_replicas)
  values = {
    "w": rng.normal(size=[num_replicas, 4, 2]),
    "b": (rng.normal(size=[num_replicas]), [np.zeros([num_replicas, 2])]),
  }
  expected = jax.tree.map(lambda leaf: leaf.mean(axis=0), values)
  close = np.testing.assert_allclose
  jax.tree.map(
    lambda a, b: close(a, b, rtol=1e-12), averaged(values, layout), expected
  )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_is_summed_in_single_precision(layout):
  # bf16 has eight bits: 256 + 1 is 256 there, and the mean would be 85.5.
  narrow = np.asarray([256, 1, 1], jnp.bfloat16)
  # fp16 ends at 65504: the sum would be infinite.
  tall = np.asarray([60000, 60000, 60000], np.float16)
  mean = averaged({"narrow": narrow, "tall": tall}, layout)
  assert mean["narrow"].dtype == jnp.bfloat16
  assert mean["tall"].dtype == jnp.float16
  assert float(mean["narrow"]) == 86
  assert float(mean["tall"]) == 60000


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_replica_with_one_bad_value_is_left_out_altogether(bad):
  values = {
    "w": np.asarray([[1.0, 2.0], [bad, 5.0], [4.0, 8.0]], np.float32),
    "b": np.asarray([1.0, 100.0, 2.0], np.float32),
  }
  mean = averaged(values)
  np.testing.assert_array_equal(mean["w"], [2.5, 5.0])
  np.testing.assert_array_equal(mean["b"], 1.5)
  nobody = averaged({"w": np.full((2, 3), bad, np.float32)})
  np.testing.assert_array_equal(nobody["w"], np.zeros(3))


def own_mean(clean=lambda leaf: leaf, kept=lambda leaf: 0 * leaf):
  """A mean as a caller may write it, with a residual that it adds."""

  def average(values, state, params):
    wanted = jax.tree.map(jnp.add, values, state)
    mean = jax.tree.map(lambda v: jax.lax.pmean(clean(v), "replica"), wanted)
    return mean, values, jax.tree.map(kept, wanted)

  return Aggregator(
    lambda params: jax.tree.map(jnp.zeros_like, params), average
  )


LIKE = {"w": jax.ShapeDtypeStruct((3, 4), jnp.float32)}


@pytest.mark.parametrize(
  "aggregator",
  [
    mean_of_finite_replicas(),
    exchange(Int(1), feedback=1.0),
    exchange(Int(4), collective="all_gather"),
  ],
)
def test_our_exchanges_leave_out_who_is_away(aggregator):
  check_leaves_out(aggregator, LIKE, 3)


@pytest.mark.parametrize(
  "aggregator",
  [
    own_mean(),
    own_mean(jnp.nan_to_num),  # Counts as zeros, a third of the mean.
    own_mean()._replace(is_shared=False),
    mean_of_finite_replicas()._replace(
      init=lambda params: jnp.zeros(()),
      average=lambda values, state, params: (
        jax.tree.map(lambda leaf: leaf * 0 + 1 + state, values),
        values,
        jax.lax.pmean(values["w"].mean(), "replica"),
      ),
    ),
  ],
)
def test_an_exchange_that_is_spoilt_by_who_is_away_is_refused(aggregator):
  with pytest.raises(ValueError, match="does not leave out a rep") as raised:
    check_leaves_out(aggregator, LIKE, 3)
  assert "\n" not in str(raised.value)
