import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.codecs.compose import encoder
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.exchange import transport
from dilocox_jax.plan.choices import LAYOUTS
from dilocox_jax.plan.wire.chain import Chain, Encoding
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import E3M0, Dense, Int
from dilocox_jax.plan.wire.reduction import TopK
from dilocox_jax.pytypes import without_pauses

LEAVES = {"vector": Leaf(1, (13,)), "matrices": Leaf(2, (5, 6))}
ENCODINGS = {
  "float32": Encoding((Dense(),)),
  "float16": Encoding((Dense("float16"),)),
  "bfloat16": Encoding((Dense("bfloat16"),)),
  "int4": Encoding((Int(block_size=16),)),
  "int2 by row": Encoding((Int(2, "row"),)),
  "e3m0": Encoding((E3M0(16),)),
  "top, int8": Encoding(Chain((TopK(0.3, 16), Int(8))).links),
}
DENSE = ("float32", "float16", "bfloat16")
IN_PLACE = tuple(name for name in ENCODINGS if name != "top, int8")
FLOAT32 = ("float32",)


@functools.cache
def program(names, choice, num_replicas, layout):
  """Reduces both leaves in each of some encodings, all in one phase."""

  def one(own, participates):
    number = jax.lax.axis_index("replica")
    key = jax.random.fold_in(jax.random.key(5), number)
    outgoing = {
      f"{name}, {path}": transport.LeafMessage(
        own[path], ENCODINGS[name], LEAVES[path], key
      )
      for name in names
      for path in LEAVES
    }
    reduce = without_pauses(transport.reduce)
    return reduce(outgoing, participates, choice)

  replicas = Replicas(num_replicas, layout)
  compiled = jax.jit(replicas.map(one, 0, 0))
  return lambda own, participates: compiled(
    replicas.place(own, 0), replicas.place(participates, 0)
  )


def reduced(names, values, choice, *, count=None, layout="stacked"):
  """(encoding, leaf, values, answer [M, ...]) of every parcel.

  The first `count` replicas take part.
  """
  num_replicas = len(values["vector"])
  count = num_replicas if count is None else count
  participates = jnp.arange(num_replicas) < count
  answers = program(names, choice, num_replicas, layout)(values, participates)
  for name in names:
    for path, leaf in LEAVES.items():
      yield ENCODINGS[name], leaf, values[path], answers[f"{name}, {path}"]


def values_of(num_replicas, seed=0):
  rng = np.random.default_rng(seed)
  return {
    path: rng.normal(size=(num_replicas, *leaf.stacked_shape)).astype(
      np.float32
    )
    for path, leaf in LEAVES.items()
  }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decoded(encoding, leaf, values):
  coder = encoder(encoding, leaf)
  return [coder.decode(coder.encode(own, jax.random.key(0))) for own in values]


def decoded(encoding, leaf, values):
  """What each replica's values are on the other side, float64."""
  own = [np.asarray(value, np.float32) for value in values]
  return np.asarray(_decoded(encoding, leaf, own), np.float64)


def close(one, other):
  np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_gathered_values_are_decoded_before_their_mean():
  values = values_of(3)
  names = tuple(ENCODINGS)
  for encoding, leaf, own, answer in reduced(
    names, values, "all_gather", layout="mesh"
  ):
    each = decoded(encoding, leaf, own)
    close(answer.own, each)
    for mean in answer.mean:
      close(mean, each.mean(axis=0))


def test_a_chunk_is_averaged_by_its_owner_and_rounded_once_more():
  values = values_of(3, seed=1)
  for encoding, leaf, own, answer in reduced(
    IN_PLACE, values, "reduce_scatter", layout="mesh"
  ):
    cut, size = encoding.links[0].slices(leaf, 3), own[0].size
    missing = cut.num_layers * cut.size - size
    pieces = np.pad(own.reshape(3, -1), ((0, 0), (0, missing)))
    pieces = pieces.reshape(3, *cut.stacked_shape)
    each = decoded(encoding, cut, pieces)
    [rounded] = decoded(encoding, cut, [each.mean(axis=0)])
    close(answer.own, each.reshape(3, -1)[:, :size].reshape(own.shape))
    for mean in answer.mean:
      close(mean, rounded.reshape(-1)[:size].reshape(own[0].shape))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_floats_are_added_in_the_type_they_are_sent_in(layout):
  values = values_of(3, seed=2)
  for encoding, leaf, own, answer in reduced(
    DENSE, values, "all_reduce", layout=layout
  ):
    each = decoded(encoding, leaf, own)
    np.testing.assert_array_equal(answer.own, each)
    # Two sums and a mean, each rounded to the significant bits of the type.
    step = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
    (part,) = encoding.links
    assert isinstance(part, Dense)
    bound = 2 * step[part.dtype] * np.abs(each).sum(axis=0)
    for mean in answer.mean:
      assert (np.abs(mean - each.mean(axis=0)) <= bound + 1e-6).all()


@pytest.mark.parametrize(
  "choice", ["all_reduce", "all_gather", "reduce_scatter"]
)
def test_replicas_without_a_part_do_not_thin_the_mean(choice):
  values = values_of(3, seed=3)
  for leaf in values.values():
    leaf[2] = 0.0
  for *_, own, answer in reduced(FLOAT32, values, choice, count=2):
    close(answer.mean[0], own[:2].astype(np.float64).mean(axis=0))


@pytest.mark.parametrize("num_replicas", [1, 2, 5])
def test_any_number_of_replicas_may_exchange_chunks(num_replicas):
  values = values_of(num_replicas, seed=5)
  for *_, own, answer in reduced(FLOAT32, values, "reduce_scatter"):
    for mean in answer.mean:
      close(mean, own.astype(np.float64).mean(axis=0))


@pytest.mark.parametrize(
  ("name", "choice"),
  [("int4", "all_reduce"), ("top, int8", "reduce_scatter")],
)
def test_an_encoding_is_refused_where_it_cannot_travel(name, choice):
  with pytest.raises(
    ValueError, match=f"^collective='{choice}' .*'all_gather'"
  ):
    list(reduced((name,), values_of(2), choice))
