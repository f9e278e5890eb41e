"""Small trees of three replicas, and their exchange compiled once a process.

Everything goes in and comes out with a replica axis, the shared state too, so
that tests can compare what the replicas have.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.aggregators.exchange import exchange
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.trees import leaves_by_path

SHAPES = {"embed": (23,), "blocks": {"w": (2, 12, 10)}}
NUM_REPLICAS = 3


def draw(seed=0, num_replicas=NUM_REPLICAS):
  """Values of all replicas, leaves [M, ...], alike in part."""
  rng = np.random.default_rng(seed)

  def leaf(shape):
    common = rng.normal(size=shape)
    own = rng.normal(size=(num_replicas, *shape))
    return jnp.asarray(common + own, jnp.float32)

  return jax.tree.map(leaf, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def every_replicas(state, num_replicas=NUM_REPLICAS):
  """A state as each replica has it, leaves [M, ...]."""
  return jax.tree.map(
    lambda leaf: jnp.broadcast_to(leaf, (num_replicas, *leaf.shape)), state
  )


@functools.cache
def program(codec, layout="stacked", num_replicas=NUM_REPLICAS, **settings):
  """(values, state) -> (mean, sent, state) by an exchange, and its first state.

  Args:
    codec: Codec of the exchange, or its text.
    layout: Whether replicas have devices of their own.
    num_replicas: M.
    settings: Other arguments of `exchange`.
  """
  aggregator = exchange(codec, **settings)
  replicas = Replicas(num_replicas, layout)
  state = every_replicas(aggregator.init(replica(draw())), num_replicas)
  update = jax.jit(replicas.map(aggregator.average, (0, 0), 0))

  def run(values, state):
    averaged = update(replicas.place(values, 0), replicas.place(state, 0))
    return averaged.mean, averaged.sent, averaged.state

  return run, state


def named(tree):
  """Leaves by path, as numpy arrays; floats in float64."""
  found = {}
  for path, leaf in leaves_by_path(jax.tree.map(jnp.asarray, tree)).items():
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    found[path] = np.asarray(leaf, np.float64 if is_float else None)
  return found


def mean_of(values):
  """The mean over replicas, float64."""
  return jax.tree.map(
    lambda leaf: np.asarray(leaf, np.float64).mean(axis=0), values
  )


def replica(tree, number=0):
  """What one replica has of leaves [M, ...]."""
  return jax.tree.map(lambda leaf: leaf[number], tree)


def close(one, other, tolerance):
  """Compares trees leaf by leaf, relative to the largest value or 1."""

  def compare(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    np.testing.assert_allclose(
      a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max())
    )

  jax.tree.map(compare, one, other)


def assert_all_have_the_same(tree):
  """Leaves [M, ...] hold the same bytes for all replicas."""
  for leaf in map(np.asarray, jax.tree.leaves(tree)):
    assert len({own.tobytes() for own in leaf}) == 1
