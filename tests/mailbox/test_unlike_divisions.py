"""Replicas on one device and on several devices meet in a store."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import dilocox_jax as dx
from dilocox_jax.mailbox_protocol.store import Store
from dilocox_jax.plan.schedule import methods
from tests.mailbox import apart
from tests.tiers import slow

H = 2
ROUNDS = 3
# Codecs group a, b and d by their size, and a and d by their shape.
SHAPES = {"a": (8, 8), "b": (4, 16), "c": (2, 4), "d": (8, 8)}
CODECS = {
  "float32": 0.0,
  "int(bits=1)": 1.0,
  "int(bits=4)": 1.0,
  "low_rank(rank=2)+int(bits=4)": 1.0,
}


def first_params():
  rng = np.random.default_rng(0)
  return {
    name: jnp.float32(rng.normal(size=shape)) for name, shape in SHAPES.items()
  }


def partition(path, shape):
  del shape
  specs = {"a": ("data", "tensor"), "b": (None, "tensor"), "d": ("tensor",)}
  return PartitionSpec(*specs[path]) if path in specs else None


def points(number, done):
  """Points that the parameters of a replica move to, [1, H, *shape]."""
  rng = np.random.default_rng([number, done])
  return {
    name: rng.normal(size=[1, H, *shape]).astype(np.float32)
    for name, shape in SHAPES.items()
  }


def trained(store, number, *, is_divided, codec, shares="off"):
  """Trains a replica. Returns its outer parameters, and who took part."""
  params = first_params()
  division = dx.divide_model(
    params, num_data_shards=2, num_tensor_shards=2, partition=partition
  )
  rounds = dx.make_rounds(
    methods.diloco(H),
    apart.step,
    optax.sgd(0.7, momentum=0.6, nesterov=True),
    num_replicas=1,
    layout="mesh" if is_divided else "stacked",
    division=division if is_divided else None,
    exchange=dx.mailbox(
      store,
      name=f"r{number}",
      secret=apart.SECRET,
      codec=codec,
      feedback=CODECS.get(codec, 0.0),
      rules=apart.rules(2, shares=shares, grace_s=20.0),
    ),
  )
  state = rounds.init(params, apart.INNER.init(params))
  for done in range(ROUNDS):
    state, *_ = rounds.run(state, points(number, done))
  state, _ = rounds.flush(state)
  settled = rounds.runtime.client.settled  # pyright: ignore
  outer = jax.tree.map(np.asarray, rounds.outer_params(state))
  return outer, [sorted(each["members"]) for each in settled]


def pair(codec, are_divided, **more):
  """Trains two replicas, of which some are divided among four devices."""
  store = Store("memory:///")

  def train(number):
    return trained(
      store, number, is_divided=are_divided[number], codec=codec, **more
    )

  return apart.in_threads(train, 2, store)


@functools.cache
def on_one_device_each(codec, shares="off"):
  return pair(codec, (False, False), shares=shares)


@pytest.mark.parametrize(
  "codec",
  [
    "int(bits=4)",
    *slow(*(codec for codec in CODECS if codec != "int(bits=4)")),
  ],
)
def test_they_average_as_two_on_one_device_each(codec):
  (expected, _), _ = on_one_device_each(codec)
  for outer, members in pair(codec, (False, True)):
    assert members == [["r0", "r1"]] * ROUNDS
    for name in SHAPES:
      np.testing.assert_allclose(outer[name], expected[name], atol=1e-5)


@pytest.mark.slow
def test_the_mean_in_shares_is_the_same():
  (expected, _), _ = on_one_device_each("int(bits=4)", shares="on")
  for outer, members in pair("int(bits=4)", (False, True), shares="on"):
    assert members == [["r0", "r1"]] * ROUNDS
    for name in SHAPES:
      np.testing.assert_allclose(outer[name], expected[name], atol=1e-5)


def test_a_codec_that_selects_values_is_refused_before_anything_is_sent():
  codec = "top_k(fraction=0.25)+int(bits=4)"
  store = Store("memory:///")
  with pytest.raises(ValueError) as error:
    apart.in_threads(
      lambda number: trained(
        store, number, is_divided=number == 1, codec=codec
      ),
      2,
      store,
    )
  line = str(error.value)
  assert "config.groups_of_leaves is 'one leaf each' here and None in" in line
  assert "\n" not in line


@pytest.mark.slow
def test_divided_replicas_meet_with_a_codec_that_selects_values():
  codec = "top_k(fraction=0.25)+int(bits=4)"
  for outer, members in pair(codec, (True, True)):
    assert members == [["r0", "r1"]] * ROUNDS
    assert all(np.isfinite(leaf).all() for leaf in outer.values())
