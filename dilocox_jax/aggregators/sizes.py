"""Bytes of what a codec sends, from shapes alone.

They are the sizes of the arrays that the codec's own `encode` returns, which
JAX derives from shapes without computing a value (`jax.eval_shape`). Trainer,
report and simulator use these numbers and count nothing themselves.
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
  """Returns the size of one replica's encoded tree (bytes).

  Args:
    codec: Codec of the exchange.
    shapes: Leaf shapes by path.
  """
  messages = message_shapes(codec, stacked_shapes(shapes))
  return sum(encoded_bytes(codec.encoder, leaves) for leaves in messages)


def stacked_shapes(shapes: Shapes) -> tuple[Shape, ...]:
  """Returns the shapes that codecs see, of the leaves that have values.

  Args:
    shapes: Leaf shapes by path.
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
  """Returns the shapes of the leaves in each message of a codec.

  low_rank has two messages, the left factors and the right ones. All other
  codecs have one.

  Args:
    codec: The codec.
    shapes: Shapes of the leaves, with the layer axis.
  """

  def run(leaves: list[Array], key: Array) -> list[list[Array]]:
    messages = []

    def reduce(message: list[Array]) -> Coroutine:
      messages.append(message)
      yield message
      return Reduced(message, message)

    state = codec.init(shapes, key)
    as_function(codec.run)(leaves, state, key, reduce)
    return messages

  key = jax.eval_shape(jax.random.key, 0)
  messages = jax.eval_shape(run, _values(shapes), key)
  return tuple(tuple(leaf.shape for leaf in leaves) for leaves in messages)


@functools.cache
def encoded_bytes(encoder: Encoder, shapes: tuple[Shape, ...]) -> int:
  """Returns the size of the arrays in which some leaves are sent (bytes).

  Args:
    encoder: The encoder.
    shapes: Shapes of the leaves, with the layer axis.
  """
  arrays = jax.eval_shape(encoder.encode, _values(shapes))
  return _num_bytes(arrays)


@functools.cache
def scattered_bytes(
  encoder: Encoder, shapes: tuple[Shape, ...], num_slices: int
) -> tuple[int, int]:
  """Returns the bytes of all slices of some leaves, and of all their means.

  Args:
    encoder: The encoder of the values, a `Quantizer`.
    shapes: Shapes of the leaves, with the layer axis.
    num_slices: Number of slices, one for each replica.
  """
  assert isinstance(encoder, Quantizer)
  layout = encoder.layout(shapes, num_slices)
  rows = jax.eval_shape(layout.rows, _values(shapes))
  values = jax.eval_shape(encoder.coded, rows)
  means = jax.eval_shape(encoder.of_means.coded, rows)
  return _num_bytes(values), _num_bytes(means)


def _num_bytes(arrays: Sequence[jax.ShapeDtypeStruct]) -> int:
  return sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)


def _values(shapes: Sequence[Shape]) -> list[jax.ShapeDtypeStruct]:
  return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
