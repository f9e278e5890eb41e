"""Small trees of three replicas, and their exchange compiled once a process.

Everything goes in and comes out with a replica axis, the shared state too, so
that tests can compare what the replicas have.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.aggregators.feedback import exchange
from dilocox_jax.codecs.low_rank import LocalLowRank, LowRank
from dilocox_jax.codecs.quantize import E3M0, Float, Int
from dilocox_jax.codecs.sparse import RandomMask, TopK
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.trees import leaves_by_path

SHAPES = {"embed": (23,), "blocks": {"w": (2, 12, 10)}}
PATHS = {"embed": (23,), "blocks/w": (2, 12, 10)}
NUM_REPLICAS = 3

# Codecs that round to the nearest: what they do is a function of the values.
CODECS = {
  "float32": Float(),
  "bfloat16": Float("bfloat16"),
  "float16": Float("float16"),
  "int4": Int(block_size=32),
  "int8 by row": Int(8, "row"),
  "e3m0": E3M0(32),
  "rank 2": LowRank(2),
  "rank 2, int4": LowRank(2, then=Int()),
  "local rank 2, int8": LocalLowRank(2, then=Int(8)),
  "top, int2": TopK(0.2, 64, then=Int(2, "tensor")),
  "mask, top, int4": RandomMask(0.5, then=TopK(0.5, 64, "bitmap", Int())),
}
# (codec, collective): every way in which each may travel.
WAYS = [
  ("float32", "all_reduce"),
  ("float32", "all_gather"),
  ("float32", "reduce_scatter"),
  ("bfloat16", "reduce_scatter"),
  ("float16", "all_reduce"),
  ("float16", "all_gather"),
  ("int4", "all_gather"),
  ("int4", "reduce_scatter"),
  ("int8 by row", "reduce_scatter"),
  ("e3m0", "all_gather"),
  ("e3m0", "reduce_scatter"),
  ("rank 2", "all_reduce"),
  ("rank 2, int4", "all_gather"),
  ("rank 2, int4", "reduce_scatter"),
  ("local rank 2, int8", "all_gather"),
  ("top, int2", "all_gather"),
  ("mask, top, int4", "all_gather"),
]


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


class Feedback(NamedTuple):
  """Settings of error feedback, as arguments of an exchange."""

  feedback: float = 1.0
  against: str = "own"
  residual_dtype: str = "float32"


NO_FEEDBACK = Feedback(0.0)


def aggregator_of(codec, feedback=NO_FEEDBACK, **settings):
  """The aggregator of a codec and the settings of error feedback."""
  return exchange(codec, **feedback._asdict(), **settings)


@functools.cache
def program(codec, collective, feedback=NO_FEEDBACK, layout="stacked", seed=0):
  """The jitted exchange of three replicas, and the first state of all."""
  aggregator = aggregator_of(codec, feedback, collective=collective, seed=seed)
  replicas = Replicas(NUM_REPLICAS, layout)
  state = every_replicas(aggregator.init(replica(draw())))
  update = jax.jit(replicas.map(aggregator.update, (0, 0), (0, 0)))

  def run(values, state):
    return update(replicas.place(values, 0), replicas.place(state, 0))

  run._cache_size = update._cache_size  # pyright: ignore
  return run, state


def exchanged(values, codec, collective="auto", feedback=NO_FEEDBACK, **how):
  """One exchange from the first state: (means, states), leaves [M, ...]."""
  run, state = program(codec, collective, feedback, **how)
  return run(values, state)


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
  for leaf in jax.tree.leaves(tree):
    leaf = np.asarray(leaf)
    for own in leaf[1:]:
      assert own.tobytes() == leaf[0].tobytes()
