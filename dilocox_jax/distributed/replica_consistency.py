"""Do all replicas still hold the same bits of what they share?

Outer parameters and outer state are not sent: every replica computes them, and
they agree as long as all devices compute alike. Should one not, the replicas
part without a sound and every later number is wrong. So their copies are
compared before each checkpoint, by a check sum made where they lie.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from dilocox_jax.distributed import host_memory
from dilocox_jax.distributed.host_arrays import arrays_to_host
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.pytypes import Tree


def copies_are_equal(state: Tree) -> bool:
  """Whether replicas on devices of their own share what they should.

  Args:
    state: Arrays; those of a mesh whose sharding does not name the replicas
      are compared.
  """
  leaves, specs, mesh = [], [], None
  for leaf in jax.tree.leaves(state):
    where = leaf.sharding
    if _is_shared(where):
      leaves.append(leaf)
      specs.append(where.spec)
      mesh = where.mesh  # A state has one.
  if mesh is None:
    return True
  sums = arrays_to_host(_summing(mesh, tuple(specs))(leaves))
  return bool((sums == sums[0]).all())


def _is_shared(where: Sharding) -> bool:
  """Whether replicas on devices of their own have a copy each."""
  if not isinstance(where, NamedSharding):
    return False
  spec = [part if isinstance(part, tuple) else (part,) for part in where.spec]
  is_replicated = REPLICA_AXIS in where.mesh.axis_names
  return is_replicated and not any(REPLICA_AXIS in part for part in spec)


@functools.cache
def _summing(mesh: Any, specs: tuple[PartitionSpec, ...]) -> Callable:
  """Leaves to sums [M] over the bits of each replica's copies."""
  inside = tuple(name for name in mesh.axis_names if name != REPLICA_AXIS)

  def of_one(own: list[Any]) -> jax.Array:
    total = sum((_sum_of_bits(leaf) for leaf in own), jnp.uint32(0))
    return jax.lax.psum(total, inside)[None]

  over = jax.shard_map(
    of_one,
    mesh=mesh,
    in_specs=(list(specs),),
    out_specs=PartitionSpec(REPLICA_AXIS),
    check_vma=False,
  )
  return jax.jit(
    lambda own: over([host_memory.on_device(leaf) for leaf in own])
  )


def _sum_of_bits(leaf: jax.Array) -> jax.Array:
  if leaf.dtype == jnp.bool_:
    leaf = leaf.astype(jnp.uint8)
  unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
  bits = jax.lax.bitcast_convert_type(leaf, unsigned)
  return bits.astype(jnp.uint32).sum(dtype=jnp.uint32)
