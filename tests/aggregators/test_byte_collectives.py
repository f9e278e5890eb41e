import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dilocox_jax.aggregators import byte_collectives
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.plan.model.division import Division

NUM_REPLICAS = 2
DIVISIONS = {
  "whole": Division(),
  "by_data": Division(4, 1),
  "by_stage": Division(1, 4),
  "by_both": Division(2, 2),
  "by_tensor": Division(num_data_shards=2, num_tensor_shards=2),
}


def wire_arrays(num_replicas, lead=()):
  """Arrays that come out even, nearly even and not at all, of three types."""
  rng = np.random.default_rng(0)
  shapes = {
    "codes": ((4, 6, 8), np.uint8),
    "scales": ((4, 6, 1), np.float16),
    "wide": ((1, 8, 5), np.float32),
    "odd": ((3, 5, 7), np.uint8),
    "norm": ((3, 1, 1), jnp.bfloat16),
  }
  return [
    rng.integers(0, 200, (num_replicas, *lead, *shape)).astype(dtype)
    for shape, dtype in shapes.values()
  ]


def moved(function, division, arrays):
  replicas = Replicas(NUM_REPLICAS, "mesh", division)
  program = jax.jit(replicas.map(lambda x: function(x), (0,), 0))
  placed = replicas.place(arrays, 0)
  text = program.lower(placed).compile().as_text() or ""
  return program(placed), text


def sent_bytes(text, operation):
  """Bytes that one device hands to the collectives of one kind."""
  found = re.findall(rf"= u8\[([\d,]+)\][^=]*? {operation}\(", text)
  return [np.prod([int(size) for size in dims.split(",")]) for dims in found]


@pytest.mark.parametrize("name", DIVISIONS)
def test_all_receive_what_was_sent_in_one_message_however_divided(name):
  division = DIVISIONS[name]
  arrays = wire_arrays(NUM_REPLICAS)
  received, text = moved(byte_collectives.all_gathered, division, arrays)
  for own, got in zip(arrays, received, strict=True):
    assert got.dtype == own.dtype
    for replica in range(NUM_REPLICAS):
      np.testing.assert_array_equal(got[replica], own)
  # Devices send together what one would.
  own_bytes = sum(array[0].nbytes for array in arrays)
  messages = [
    size // NUM_REPLICAS * division.num_devices
    for size in sent_bytes(text, "all-gather")
  ]
  is_all = [own_bytes <= n < own_bytes + division.num_devices for n in messages]
  assert sum(is_all) == 1
  arrays = wire_arrays(NUM_REPLICAS, lead=(NUM_REPLICAS,))
  received, _ = moved(byte_collectives.all_to_all, division, arrays)
  for own, got in zip(arrays, received, strict=True):
    np.testing.assert_array_equal(got, np.swapaxes(own, 0, 1))


def test_what_devices_hold_is_sent_without_being_collected_first():
  division = DIVISIONS["by_both"]
  replicas = Replicas(NUM_REPLICAS, "mesh", division)
  codes = np.arange(NUM_REPLICAS * 4 * 6 * 8, dtype=np.uint8)
  spec = PartitionSpec("replica", "stage", "data")
  own = jax.device_put(
    codes.reshape(NUM_REPLICAS, 4, 6, 8), NamedSharding(replicas.mesh, spec)
  )
  program = jax.jit(replicas.map(byte_collectives.all_gathered, (0,), 0))
  text = program.lower([own]).compile().as_text() or ""
  moves = re.findall(
    r"= \S+ (all-\S+|collective-\S+|reduce-scatter\S*)\(", text
  )
  assert moves == ["all-gather"]
  assert "u8[2,48]" in text.split(" all-gather(")[0].splitlines()[-1]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("same_for_all", [True, False])
def test_permutes_bring_what_gathering_and_swapping_bring(
  same_for_all, num_replicas
):
  shape = (num_replicas, 7) if same_for_all else (num_replicas, num_replicas, 7)
  raw = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)

  def both(raw):
    rows = byte_collectives._permuted(same_for_all, "replica", raw)
    permuted = jnp.stack(rows)
    if same_for_all:
      return permuted, jax.lax.all_gather(raw, "replica")
    return permuted, jax.lax.all_to_all(raw, "replica", 0, 0)

  replicas = Replicas(num_replicas, "mesh")
  got, expected = jax.jit(replicas.map(both, (0,), 0))(replicas.place(raw, 0))
  np.testing.assert_array_equal(got, expected)
