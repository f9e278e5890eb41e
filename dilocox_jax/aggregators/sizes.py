"""Computes the sizes of encoded messages in bytes, from the shapes of leaves.

Nothing is encoded: JAX derives the shapes of encoded arrays from those of the
leaves (`jax.eval_shape`).
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dilocox_jax.codecs.base import Codec, Encoder, Quantizer, Reduced
from dilocox_jax.codecs.batching import Shape
from dilocox_jax.coroutines import Coroutine, as_function
from dilocox_jax.plan.schedule.fragments import Shapes, stacked_shape
from dilocox_jax.trees import Array


def message_bytes(codec: Codec, shapes: Shapes) -> int:
  """Returns how many bytes a replica's messages for a tree have together.

  `shapes` are the shapes of the tree's leaves, by path.
  """
  messages = message_shapes(codec, stacked_shapes(shapes))
  return sum(encoded_bytes(codec.encoder, leaves) for leaves in messages)


def stacked_shapes(shapes: Shapes) -> tuple[Shape, ...]:
  """Returns the shapes of leaves as codecs see them, (num_layers, *shape).

  A leaf outside the stack of layers gets num_layers = 1. Empty leaves are left
  out.
  """
  return tuple(
    stacked_shape(path, shape)
    for path, shape in shapes.items()
    if math.prod(shape)
  )


@functools.cache
def message_shapes(
  codec: Codec, shapes: tuple[Shape, ...]
) -> tuple[tuple[Shape, ...], ...]:
  """Returns the shapes of the arrays in each message, before they are encoded.

  For example, `LowRank` sends two messages: left factors, then right factors.
  `shapes` are those of the leaves, (num_layers, *shape).
  """

  def run(leaves: list[Array], key: Array) -> list[list[Array]]:
    messages = []

    def reduce(message: list[Array]) -> Coroutine:
      messages.append(message)
      yield message
      # Only shapes matter here, so the message stands for its mean.
      return Reduced(message, message)

    state = codec.init(shapes, key)
    as_function(codec.run)(leaves, state, key, reduce)
    return messages

  key = jax.eval_shape(jax.random.key, 0)
  messages = jax.eval_shape(run, _values(shapes), key)
  return tuple(tuple(leaf.shape for leaf in leaves) for leaves in messages)


@functools.cache
def encoded_bytes(encoder: Encoder, shapes: tuple[Shape, ...]) -> int:
  """Returns how many bytes leaves have when they are encoded.

  `shapes` are the shapes of the leaves, (num_layers, *shape).
  """
  arrays = jax.eval_shape(encoder.encode, _values(shapes))
  return _num_bytes(arrays)


@functools.cache
def scattered_bytes(
  encoder: Encoder, shapes: tuple[Shape, ...], num_slices: int
) -> tuple[int, int]:
  """Returns the bytes of a replica's encoded slices, and of the encoded means.

  The leaves are cut into `num_slices` slices, one for each replica. There is a
  mean of each slice. `shapes` are the shapes of the leaves, (num_layers,
  *shape).
  """
  assert isinstance(encoder, Quantizer)
  layout = encoder.layout(shapes, num_slices)
  rows = jax.eval_shape(layout.rows, _values(shapes))
  values = jax.eval_shape(encoder.coded, rows)
  means = jax.eval_shape(encoder.of_means.coded, rows)
  return _num_bytes(values), _num_bytes(means)


def _num_bytes(arrays: Sequence[jax.ShapeDtypeStruct]) -> int:
  """Returns the size of several arrays together (bytes)."""
  return sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)


def _values(shapes: Sequence[Shape]) -> list[jax.ShapeDtypeStruct]:
  """Returns a float32 `jax.ShapeDtypeStruct` for each of some shapes."""
  return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
