"""Checks that all replicas hold the same bits of what they share.

Outer parameters and outer state are not sent. Every replica computes them, and
they are equal as long as all devices compute alike. If one does not, replicas
drift apart unnoticed and every later number is wrong. So the copies are
compared before each checkpoint, by check sums that the devices compute.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from dilocox_jax.distributed import host_memory
from dilocox_jax.distributed.coordinator_store import arrays_to_host
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.trees import Tree


def copies_are_equal(state: Tree) -> bool:
  """Whether replicas on devices of their own share what they should.

  Args:
    state: Arrays. Those on a mesh whose sharding does not divide them among
      replicas are compared; the others need not be equal.
  """
  leaves = [x for x in jax.tree.leaves(state) if _is_shared(x.sharding)]
  if not leaves:
    return True
  mesh = leaves[0].sharding.mesh  # All leaves of a state have the same mesh.
  specs = tuple(leaf.sharding.spec for leaf in leaves)
  leaves = host_memory.moved(leaves, host_memory.DEVICE)
  sums = arrays_to_host(_summing(mesh, specs)(leaves))
  return bool((sums == sums[0]).all())


def _is_shared(sharding: Sharding) -> bool:
  """Whether every replica has a copy on devices of its own."""
  if not isinstance(sharding, NamedSharding):
    return False
  has_replicas = REPLICA_AXIS in sharding.mesh.axis_names
  return has_replicas and REPLICA_AXIS not in jax.tree.leaves([*sharding.spec])


@functools.cache
def _summing(mesh: Any, specs: tuple[PartitionSpec, ...]) -> Callable:
  """Builds leaves -> sums [M] over the bits of each replica's copies."""
  inside = tuple(name for name in mesh.axis_names if name != REPLICA_AXIS)

  def replica_sum(leaves: list[Any]) -> jax.Array:
    total = sum((_sum_of_bits(leaf) for leaf in leaves), jnp.uint32(0))
    return jax.lax.psum(total, inside)[None]

  mapped = jax.shard_map(
    replica_sum,
    mesh=mesh,
    in_specs=(list(specs),),
    out_specs=PartitionSpec(REPLICA_AXIS),
    check_vma=False,
  )
  return jax.jit(mapped)


def _sum_of_bits(leaf: jax.Array) -> jax.Array:
  if leaf.dtype == jnp.bool_:
    leaf = leaf.astype(jnp.uint8)
  unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
  bits = jax.lax.bitcast_convert_type(leaf, unsigned)
  return bits.astype(jnp.uint32).sum(dtype=jnp.uint32)
