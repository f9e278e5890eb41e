import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.aggregators import transport
from dilocox_jax.codecs.quantize import E3M0, Float, Int
from dilocox_jax.codecs.sparse import TopK
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.plan.choices import LAYOUTS
from dilocox_jax.trees import without_pauses
from tests.codecs.alone import alone

SHAPES = (1, 13), (2, 5, 6), (2, 5, 6)
ENCODERS = {
  "float32": Float(),
  "float16": Float("float16"),
  "bfloat16": Float("bfloat16"),
  "int4": Int(block_size=16),
  "int2 by row": Int(2, "row"),
  "int1": Int(1, block_size=16),
  "e3m0": E3M0(16),
  "top, int8": TopK(0.3, 16, then=Int(8)),
}
FLOATS = ("float32", "float16", "bfloat16")
IN_PLACE = tuple(name for name in ENCODERS if name != "top, int8")


@functools.cache
def program(name, choice, num_replicas, layout):
  """Reduces all leaves in one message."""

  def one(own, participates):
    number = jax.lax.axis_index("replica")
    key = jax.random.fold_in(jax.random.key(5), number)
    reduce = without_pauses(transport.reduce)
    return reduce(ENCODERS[name], own, participates, key, choice)

  replicas = Replicas(num_replicas, layout)
  compiled = jax.jit(replicas.map(one, 0, 0))
  return lambda own, participates: compiled(
    replicas.place(own, 0), replicas.place(participates, 0)
  )


def reduced(name, values, choice, *, count=None, layout="stacked"):
  """(values, mean, own) of every leaf; the first `count` take part."""
  num_replicas = len(values[0])
  count = num_replicas if count is None else count
  participates = jnp.arange(num_replicas) < count
  answer = program(name, choice, num_replicas, layout)(values, participates)
  return zip(values, answer.mean, answer.own, strict=True)


def values_of(num_replicas, seed=0):
  rng = np.random.default_rng(seed)
  return [
    rng.normal(size=(num_replicas, *shape)).astype(np.float32)
    for shape in SHAPES
  ]


@functools.partial(jax.jit, static_argnums=0)
def _decoded(encoder, values):
  return [alone(encoder, [own])[0][0] for own in values]


def decoded(encoder, values):
  """What each replica's values are on the other side, float64."""
  own = [np.asarray(value, np.float32) for value in values]
  return np.asarray(_decoded(encoder, own), np.float64)


def close(one, other):
  np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ENCODERS)
def test_gathered_values_are_decoded_before_their_mean(name):
  for values, mean, own in reduced(
    name, values_of(3), "all_gather", layout="mesh"
  ):
    each = decoded(ENCODERS[name], values)
    close(own, each)
    for received in mean:
      close(received, each.mean(axis=0))


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_slice_is_averaged_by_its_owner_and_rounded_once_more(name):
  for values, mean, own in reduced(
    name, values_of(3, seed=1), "reduce_scatter", layout="mesh"
  ):
    # Rows are what is coded by itself, in a slice as in the whole leaf.
    each = decoded(ENCODERS[name], values)
    [rounded] = decoded(ENCODERS[name].of_means, [each.mean(axis=0)])
    close(own, each)
    for received in mean:
      close(received, rounded)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_added_in_the_type_they_are_sent_in(name, layout):
  # Two sums and a mean, each rounded to the significant bits of the type.
  step = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}[name]
  for values, mean, own in reduced(
    name, values_of(3, seed=2), "all_reduce", layout=layout
  ):
    each = decoded(ENCODERS[name], values)
    np.testing.assert_array_equal(own, each)
    bound = 2 * step * np.abs(each).sum(axis=0)
    for received in mean:
      error = np.abs(received - each.mean(axis=0))
      assert (error <= bound + 1e-6).all()


@pytest.mark.parametrize(
  "choice", ["all_reduce", "all_gather", "reduce_scatter"]
)
def test_replicas_without_a_part_do_not_thin_the_mean(choice):
  values = values_of(3, seed=3)
  for leaf in values:
    leaf[2] = np.nan
  for own, mean, sent in reduced("float32", values, choice, count=2):
    close(mean[0], own[:2].astype(np.float64).mean(axis=0))
    assert not np.any(sent[2])


@pytest.mark.parametrize("num_replicas", [1, 2, 5])
def test_any_number_of_replicas_may_exchange_slices(num_replicas):
  values = values_of(num_replicas, seed=5)
  for own, mean, _ in reduced("float32", values, "reduce_scatter"):
    for received in mean:
      close(received, own.astype(np.float64).mean(axis=0))


@pytest.mark.parametrize(
  ("name", "choice"), [("int4", "all_reduce"), ("top, int8", "reduce_scatter")]
)
def test_an_encoder_is_refused_where_it_cannot_travel(name, choice):
  with pytest.raises(
    ValueError, match=f"^collective='{choice}' .*'all_gather'"
  ):
    list(reduced(name, values_of(2), choice))
