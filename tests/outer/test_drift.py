import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.outer.drift import (
  axes_of,
  disagreement,
  measure_drift,
  squared_norm,
)
from dilocox_jax.outer.rules import ExchangeResult
from dilocox_jax.plan.choices import LAYOUTS

EXACT = 1e-12  # float64; differences of sums of a dozen squares


def measured(own, layout="stacked"):
  """The drift behind pseudo-gradients, leaves [M, ...]."""
  mean = jax.tree.map(lambda x: x.mean(axis=0), own)
  num_replicas = jax.tree.leaves(own)[0].shape[0]

  def one(mean, own):
    return measure_drift(ExchangeResult(mean, own, own))

  over = Replicas(num_replicas, layout).map(one, (None, 0), axes_of(True))
  *sums, _ = jax.jit(over)(mean, own)
  return disagreement(*sums)


def cosine(own, layout="stacked"):
  found = measured(own, layout).cosine
  assert found is not None
  return found


def draw(num_replicas):
  rng = np.random.default_rng(num_replicas)
  sizes = np.arange(1.0, num_replicas + 1)  # Replicas of different lengths.
  return {
    "w": sizes[:, None, None] * rng.normal(size=[num_replicas, 3, 2]),
    "b": sizes * rng.normal(size=[num_replicas]),
  }


def rows(own):
  """Pseudo-gradients as vectors, [M, n]."""
  count = len(own["b"])
  return np.concatenate([own["w"].reshape(count, -1), own["b"][:, None]], 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_two_replicas_the_cosine_is_the_one_between_them(layout, x64):
  own = draw(2)
  a, b = rows(own)
  expected = a @ b / np.sqrt((a @ a) * (b @ b))
  np.testing.assert_allclose(cosine(own, layout), expected, EXACT)


@pytest.mark.parametrize("num_replicas", [3, 5])
def test_of_more_replicas_long_pairs_weigh_more(num_replicas, x64):
  own = draw(num_replicas)
  vectors = rows(own)
  dots = weights = 0.0
  for i in range(num_replicas):
    for j in range(num_replicas):
      if i != j:
        dots += vectors[i] @ vectors[j]
        weights += np.linalg.norm(vectors[i]) * np.linalg.norm(vectors[j])
  np.testing.assert_allclose(cosine(own), dots / weights, 1e-11)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_disagreement_is_the_root_mean_square_distance_from_the_mean(
  layout, x64
):
  own = draw(3)
  vectors = rows(own)
  mean = vectors.mean(axis=0)
  apart = [np.sum(np.square(v - mean)) for v in vectors]
  seen = measured(own, layout)
  np.testing.assert_allclose(seen.disagreement, np.sqrt(sum(apart) / 3), EXACT)
  np.testing.assert_allclose(
    seen.pseudo_gradient_norm, np.linalg.norm(mean), EXACT
  )


def test_replicas_that_agree_have_no_disagreement():
  own = {"w": np.full([3, 2], 0.5, np.float32)}
  np.testing.assert_allclose(cosine(own), 1.0, rtol=1e-6)
  assert measured(own).disagreement == 0


def test_replicas_that_oppose_each_other_have_cosine_minus_one():
  own = {"w": np.asarray([[2.0, 0.0], [-2.0, 0.0]], np.float32)}
  seen = measured(own)
  np.testing.assert_allclose(cosine(own), -1.0, rtol=1e-6)
  np.testing.assert_allclose(seen.disagreement, 2.0, rtol=1e-6)
  assert float(seen.pseudo_gradient_norm) == 0


def test_one_replica_has_no_cosine_and_no_disagreement():
  seen = measured({"w": np.asarray([[3.0, 4.0]], np.float32)})
  assert seen.cosine is None
  assert float(seen.disagreement) == 0
  assert float(seen.pseudo_gradient_norm) == 5


def test_replicas_with_means_of_their_own_have_no_common_cosine():
  own = {"w": np.asarray([[3.0, 0.0], [0.0, 1.0]], np.float32)}
  mean = {"w": np.asarray([[4.0, 0.0], [0.0, 2.0]], np.float32)}

  def one(mean, own):
    return measure_drift(ExchangeResult(mean, own, own))

  drift = Replicas(2).map(one, (0, 0), axes_of(False))(mean, own)
  *sums, _ = drift
  seen = disagreement(*sums)
  assert seen.cosine is None
  assert seen.disagreement == pytest.approx(1.0)
  assert seen.pseudo_gradient_norm == pytest.approx(np.sqrt((16 + 4) / 2))
  assert drift.mean_squared.tolist() == [16, 4]


def test_a_squared_norm_adds_up_all_leaves_of_any_precision():
  tree = {"a": jnp.asarray([[1.0, 2.0]]), "b": jnp.bfloat16(-3.0)}
  assert float(squared_norm(tree)) == 14
  large = {"a": jnp.full(4, 256, jnp.float16)}  # fp16 ends at 65504.
  assert float(squared_norm(large)) == 4 * 65536
