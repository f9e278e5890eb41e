"""What a codec is, for one leaf and one replica.

An `Encoder` turns values into wire arrays and back. A `Codec` may need several
messages in turn, where the second depends on the mean of the first. It is
written as a generator: it yields dense values, and receives their mean over
replicas, as far as the wire carries it, and the replica's own part of it. The
exchange encodes the values and chooses the collective; the codec does neither.

A codec that sends the mean of the values first, and then what is left of them:

    def run(values, state, key):
      mean, own_mean = yield jnp.mean(values, keepdims=True)
      rest, own_rest = yield values - own_mean
      return Reduced(mean + rest, own_mean + own_rest), state

The exchange runs it so (`exchange.compressed` does this for all leaves):

    steps = run(values, state, key)
    first = next(steps)              # the values of the first message
    second = steps.send(reduce(first))
    steps.send(reduce(second))       # raises StopIteration with the result

Generators run while a program is traced; nothing of them is left in it.
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
    encode: Function (values [num_layers, *shape], random key) -> wire arrays,
      as many and in the order of `Encoding.wires`.
    decode: Function (wire arrays) -> float32 values [num_layers, *shape].
  """

  encode: Callable[[Array, Array], tuple[Array, ...]]
  decode: Callable[[tuple[Array, ...]], Array]


class Reduced(NamedTuple):
  """Result of one message, decoded.

  Attributes:
    mean: Mean over replicas of the decoded values.
    own: Decoded values of this replica.
  """

  mean: Array
  own: Array


CodecSteps = Generator[Array, Reduced, tuple[Reduced, Tree]]


class Codec(NamedTuple):
  """The whole compression of a leaf.

  Attributes:
    init: Function (random key) -> state, which is equal on all replicas.
    run: Function (values, state, random key) -> generator that returns the
      reduced values and the new state. The key is equal on all replicas.
    messages: For every yield in turn, its encoding and the shape of what is
      encoded.
  """

  init: Callable[[Array], Tree]
  run: Callable[[Array, Tree, Array], CodecSteps]
  messages: tuple[tuple[Encoding, Leaf], ...]


def grouped(values: Array, groups: int, width: int) -> Array:
  """Cuts values [num_layers, *shape] into [num_layers, groups, width].

  The result is float32. Zeros fill the last group: 10 values in 2 groups of 6
  end with two zeros.
  """
  flat = values.reshape(values.shape[0], -1).astype(jnp.float32)
  missing = groups * width - flat.shape[1]
  if missing:
    flat = jnp.pad(flat, ((0, 0), (0, missing)))
  return flat.reshape(flat.shape[0], groups, width)


def ungrouped(values: Array, leaf: Leaf) -> Array:
  """Reverses `grouped`: drops the zeros and restores the leaf's shape."""
  flat = values.reshape(values.shape[0], -1)[:, : leaf.size]
  return flat.reshape(values.shape[0], *leaf.shape)


def split_keys(key: Array, names) -> dict[str, Array]:
  """Returns a random key for every name.

  The key of a name does not depend on which other names there are.

  Args:
    key: Random key from which they are derived.
    names: Leaf paths.
  """
  return {name: jax.random.fold_in(key, _number(name)) for name in names}


def _number(name: str) -> int:
  """Hashes a name into [0, 2^31).

  Python's own hash differs between processes, which must draw alike.
  """
  number = 0
  for byte in name.encode():
    number = (number * 31 + byte) % (2**31)
  return number
