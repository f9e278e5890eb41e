"""What a codec is, for one leaf and one replica.

An `Encoder` turns values into wire arrays and back. A `Codec` may need
several exchanges in turn, the second depending on what came back from the
first. It is written as a generator: it yields dense values, and receives
their mean over replicas as the wire can tell it, and the replica's own part
of that mean. Who encodes them and which collective carries them is the
exchange's business. Generators run while a program is traced; nothing of them
is left in it.
"""

from collections.abc import Callable, Generator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dilocox_jax.plan.wire.chain import Encoding
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.pytypes import Array, Tree


class Encoder(NamedTuple):
  """Values to wire arrays and back.

  Attributes:
    encode: (values [num_layers, *shape], random key) -> arrays, as many and in
      the order of `Encoding.wires`.
    decode: Those arrays -> float32 values [num_layers, *shape].
  """

  encode: Callable[[Array, Array], tuple[Array, ...]]
  decode: Callable[[tuple[Array, ...]], Array]


class Reduced(NamedTuple):
  """What an exchange answers.

  Attributes:
    mean: The mean over replicas of what was decoded.
    own: What was decoded of this replica's own.
  """

  mean: Array
  own: Array


CodecSteps = Generator[Array, Reduced, tuple[Reduced, Tree]]


class Codec(NamedTuple):
  """A leaf's whole compression.

  Attributes:
    init: Random key -> state, the same on all replicas.
    run: (values, state, random key) -> a generator that ends with the reduced
      values and the new state. The key is the same on all replicas.
    messages: For every yield in turn, how it is encoded and as what leaf.
  """

  init: Callable[[Array], Tree]
  run: Callable[[Array, Tree, Array], CodecSteps]
  messages: tuple[tuple[Encoding, Leaf], ...]


def grouped(values: Array, groups: int, width: int) -> Array:
  """Values [num_layers, *shape] as float32 [num_layers, groups, width].

  The end of the last group is filled with zeros.
  """
  flat = values.reshape(values.shape[0], -1).astype(jnp.float32)
  missing = groups * width - flat.shape[1]
  if missing:
    flat = jnp.pad(flat, ((0, 0), (0, missing)))
  return flat.reshape(flat.shape[0], groups, width)


def ungrouped(values: Array, leaf: Leaf) -> Array:
  """The inverse of `grouped`."""
  flat = values.reshape(values.shape[0], -1)[:, : leaf.size]
  return flat.reshape(values.shape[0], *leaf.shape)


def split_keys(key: Array, names) -> dict[str, Array]:
  """A random key for every name; a name's key does not depend on the others.

  Args:
    key: Where they come from.
    names: Leaf paths.
  """
  return {name: jax.random.fold_in(key, _number(name)) for name in names}


def _number(name: str) -> int:
  """A number in [0, 2^31) that is a name's in every process."""
  number = 0
  for byte in name.encode():
    number = (number * 31 + byte) % (2**31)
  return number
