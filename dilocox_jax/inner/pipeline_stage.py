"""The stages of a pipeline, and the loss of a pipelined model.

All stages run the same program. Only the first stage embeds tokens, and only
the last stage computes the loss, so both computations are under a condition. An
evaluation needs no gradient. So it only runs forwards, and stages save no
arrays.

The residual stream between two layers is called the stream, x. Letters in
shapes: m micro-batches of b sequences with L tokens, T = b L tokens of a
micro-batch, D model, K layers of a stage.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dilocox_jax.inner.pipeline_layer import Block
from dilocox_jax.plan.model.division import STAGE_AXIS
from dilocox_jax.trees import Index, Scalar, Tree

# (blocks, rest, tokens) -> this stage's contribution to the loss, as
# `pipelined_loss` returns it. A fourth argument, `transfer`, says how a device
# gets a layer that it holds in part.
PipelinedLoss = Callable[..., Scalar]


class CutModel(NamedTuple):
  """A model as functions for the parts that a pipeline separates.

  Attributes:
    embed: (leaves outside the blocks, tokens [b, L]) -> x [T, D].
    block: (one layer's leaves, x [T, D], L) -> x [T, D]. Leaves with two axes
      or more have the dtype of x.
    loss: (leaves outside the blocks, x [T, D], targets [T]) -> mean loss.
    segments: (tokens [b, L]) -> segments [b, L], which separate the documents
      of a sequence (`models.attention`). `embed` and `block` take them as the
      keyword argument `segments`. None: `embed` and `block` take no segments.
  """

  embed: Callable[..., Array]
  block: Block
  loss: Callable[[Tree, Array, Array], Array]
  segments: Callable[[Array], Array] | None = None

  def context(self, tokens: Array) -> dict[str, Array]:
    """Returns the keyword arguments of `embed` and `block`.

    Args:
      tokens: int32 [b, L].
    """
    if self.segments is None:
      return {}
    return {"segments": self.segments(tokens)}


class LayerTransfer(NamedTuple):
  """How a device gets one of its stage's layers, and gives away its gradient.

  Attributes:
    collect: (this device's part of a layer) -> the whole layer.
    reduce: (gradient of the whole layer) -> gradient of this device's part. A
      leaf that data shards divide is summed over the data shards.
  """

  collect: Callable[[Tree], Tree]
  reduce: Callable[[Tree], Tree]

  def whole_layer(self, layer: Tree, dtype: jnp.dtype) -> Tree:
    """Returns a whole layer.

    Matrices are cast before they are collected. So the devices send fewer
    bytes.

    Args:
      layer: This device's part of the layer.
      dtype: Dtype of the layer's matrices.
    """
    return self.collect(
      jax.tree.map(
        lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, layer
      )
    )


# Every device of a stage holds the stage's layers whole.
WHOLE_LAYERS = LayerTransfer(
  collect=lambda layer: layer, reduce=lambda gradient: gradient
)


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
  """The values of a stage that are the same in every tick.

  Attributes:
    model: The model.
    counts: Number of layers of every stage, [stages].
    number: Index of this stage, from 0.
    layers: Parameters of this stage's layers, leaves [K, ...]: whole, or this
      device's parts of them.
    transfer: How the device gets a whole layer.
    rest: Parameters outside the blocks.
    tokens: All tokens of the micro-batches, int32 [m, b, L + 1].
  """

  model: CutModel
  counts: np.ndarray
  number: Index
  layers: Tree
  transfer: LayerTransfer
  rest: Tree
  tokens: Array

  @property
  def is_last(self) -> Array:
    """Whether this stage is the last one."""
    return self.number == len(self.counts) - 1

  @property
  def count(self) -> np.int32 | Index:
    """Number of layers of this stage.

    If all stages have equally many layers, the number is a constant of the
    program, and not a traced value.
    """
    if np.ptp(self.counts) == 0:
      return self.counts[0]
    return jnp.asarray(self.counts)[self.number]

  def whole_layer(self, row: Index, dtype: jnp.dtype) -> Tree:
    """Returns a layer of this stage.

    Args:
      row: Number of the layer in the stage.
      dtype: Dtype of the layer's matrices.
    """
    return self.transfer.whole_layer(get(self.layers, row), dtype)

  def context(self, batch: Index) -> dict[str, Array]:
    """Returns `CutModel.context` of a micro-batch.

    Every stage has all tokens, so stages need not send each other segments.

    Args:
      batch: Index of the micro-batch.
    """
    return self.model.context(get(self.tokens, batch)[:, :-1])

  def targets(self, batch: Index) -> Array:
    """Returns the tokens [T] that the model should predict.

    Args:
      batch: Index of the micro-batch.
    """
    return get(self.tokens, batch)[:, 1:].reshape(-1)

  def embed(self, rest: Tree, batch: Index) -> Array:
    """Returns the embedded tokens of a micro-batch, [T, D].

    Args:
      rest: Parameters outside the blocks. They are an argument, because the
        backward differentiates with respect to them.
      batch: Index of the micro-batch.
    """
    tokens = get(self.tokens, batch)[:, :-1]
    return self.model.embed(rest, tokens, **self.context(batch))

  def input(self, batch: Index, arrived: Array) -> Array:
    """Returns the stream [T, D] that the stage's first layer reads.

    On the first stage these are the embedded tokens, and on every other stage
    `arrived`.

    Args:
      batch: Index of the micro-batch.
      arrived: The stream that the stage before has sent, [T, D].
    """

    def embed(batch: Index, _: Array) -> Array:
      return self.embed(self.rest, batch)

    return when(self.number == 0, "embed", embed, batch, arrived)

  def loop(self, body: Callable, start: Tree) -> Tree:
    """Runs a loop over the stage's layers.

    Args:
      body: (row, carry) -> carry, for the layer in a row of `layers`.
      start: The first carry.

    Returns:
      The last carry.
    """
    return jax.lax.fori_loop(np.int32(0), self.count, body, start)

  def exchange(self, message: Tree, step: int = 1) -> Tree:
    """Sends a message to the stage beside this one.

    All stages send in the same direction at the same time. The stages form a
    ring for that, but the message between the last and the first stage is not
    read.

    Args:
      message: Arrays, of the same shapes on all stages.
      step: 1: to the next stage; -1: to the stage before.

    Returns:
      The message that has arrived at this stage.
    """
    num_stages = len(self.counts)
    if num_stages == 1:
      return message
    ring = [(s, (s + step) % num_stages) for s in range(num_stages)]
    return jax.lax.ppermute(message, STAGE_AXIS, ring)


def pipelined_loss(model: CutModel, layer_counts: np.ndarray) -> PipelinedLoss:
  """Builds one stage's loss, for use in `shard_map` over the stages.

  In tick t, stage s runs the forward of micro-batch t - s.

  Args:
    model: The model.
    layer_counts: Number of layers of each stage, [stages].

  Returns:
    (blocks, rest, tokens, transfer) -> mean loss over the micro-batches, a
    scalar, with arguments as in `pipelined_gradient`. The loss is 0 except on
    the last stage, so the caller must sum it over the stages.
  """

  def loss(
    blocks: Tree,
    rest: Tree,
    tokens: Int[Array, "m b S"],
    transfer: LayerTransfer = WHOLE_LAYERS,
  ) -> Scalar:
    number = jax.lax.axis_index(STAGE_AXIS)
    stage = Stage(
      model=model,
      counts=layer_counts,
      number=number,
      layers=blocks,
      transfer=transfer,
      rest=rest,
      tokens=tokens,
    )
    num_batches = tokens.shape[0]
    length = tokens.shape[2] - 1

    def forward(
      batch: Index, carry: tuple[Array, Scalar]
    ) -> tuple[Array, Scalar]:
      context = stage.context(batch)

      def layer(row: Index, x_TxD: Array) -> Array:
        leaves = stage.whole_layer(row, x_TxD.dtype)
        return model.block(leaves, x_TxD, length, **context)

      def head(batch: Index, total: Scalar) -> Scalar:
        return added(total, model.loss(rest, x_TxD, stage.targets(batch)))

      arrived, total = carry
      x_TxD = stage.loop(layer, stage.input(batch, arrived))
      return x_TxD, when(stage.is_last, "head", head, batch, total)

    def tick(
      carry: tuple[Array, Scalar], tick_number: Index
    ) -> tuple[tuple[Array, Scalar], None]:
      batch = tick_number - number
      has_batch = (batch >= 0) & (batch < num_batches)
      x_TxD, total = when(has_batch, "forward", forward, batch, carry)
      return (stage.exchange(x_TxD), total), None

    x_TxD = jax.eval_shape(model.embed, rest, tokens[0, :, :-1])
    first = (
      empty_buffer(x_TxD.shape, x_TxD.dtype),
      zeros(jax.ShapeDtypeStruct((), x_TxD.dtype)),
    )
    ticks = jnp.arange(num_batches + len(layer_counts) - 1, dtype=np.int32)
    (_, total), _ = jax.lax.scan(tick, first, ticks)
    return total / num_batches

  return loss


def empty_buffer(shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
  """Returns a buffer to be written. No result depends on its first values.

  Args:
    shape: Shape of the buffer.
    dtype: Type of its values.
  """
  return jnp.zeros(shape, dtype)


def when(
  condition: Array,
  name: str,
  action: Callable[[Any, Tree], Tree],
  at: Tree,
  state: Tree,
) -> Tree:
  """Runs an action on a state if a condition holds.

  The result is that of `jax.lax.cond`. But this function is a loop with one
  iteration or none, because XLA updates the values that a loop carries in
  place. With a conditional over all actions, XLA copied every buffer in each
  tick, also in idle ticks. That doubled memory and traffic.

  Args:
    condition: Whether to run the action, a boolean scalar.
    name: Name of the action in compiled operations and profiles.
    action: (numbers, state) -> state. The action may read other arrays only at
      indices that come from its argument `numbers`.
    at: Numbers of the tick: an index, or a tree of indices.
    state: State before the action.

  Returns:
    The state after the action, or the unchanged state.
  """

  def body(iteration: Index, state: Tree) -> Tree:
    # XLA moves operations that do not depend on the iteration out of a loop.
    # They would then run although the loop has no iteration. `is_running` is
    # always true here, but XLA does not know that. So all numbers depend on the
    # iteration, and so does every slice that the action reads.
    is_running = iteration < num_iterations
    numbers = jax.tree.map(lambda index: jnp.where(is_running, index, -1), at)
    return action(numbers, state)

  with jax.named_scope(name):
    num_iterations = condition.astype(np.int32)
    return jax.lax.fori_loop(np.int32(0), num_iterations, body, state)


def get(tree: Tree, *indices: Index) -> Tree:
  """Reads leaves [N1, ..., *shape] at indices of their first axes.

  Example: get(saved, 1, 3) of a leaf [slots, K, T, D] is leaf[1, 3], with the
  shape [T, D]. It is layer 3 of the micro-batch whose arrays are in slot 1.

  Args:
    tree: Buffers, leaves [N1, ..., *shape].
    *indices: Indices of the first axes.

  Returns:
    Leaves [*shape].
  """

  def read(buffer: Array) -> Array:
    num_indices = len(indices)
    indexed_axes = buffer.shape[:num_indices]
    shape = buffer.shape[num_indices:]
    sizes = (1,) * num_indices + shape
    leaf = jax.lax.dynamic_slice(buffer, _starts(buffer, indices), sizes)
    if max(indexed_axes) == 1:
      # With a single slot XLA knows that the index must be 0. So the slice
      # would not depend on the tick, and XLA would move it out of the loop of
      # `when`. Therefore the values depend on the index. In `when` it is -1
      # only in an iteration that never runs.
      is_running = jnp.asarray(indices[0]) >= 0
      leaf = jnp.where(is_running, leaf, jnp.zeros_like(leaf))
    return leaf.reshape(shape)

  return jax.tree.map(read, tree)


def put(tree: Tree, new: Tree, *indices: Index) -> Tree:
  """Writes leaves [*shape] at indices of the first axes, as `get` reads them.

  Args:
    tree: Buffers, leaves [N1, ..., *shape].
    new: The values to write, leaves [*shape].
    *indices: Indices of the first axes.

  Returns:
    The new buffers.
  """

  # A value that a layer saves may be a constant, which is not an `Array`.
  def write(buffer: Array, leaf: Any) -> Array:
    leaf = leaf.reshape((1,) * len(indices) + leaf.shape)
    return jax.lax.dynamic_update_slice(buffer, leaf, _starts(buffer, indices))

  return jax.tree.map(write, tree, new)


def _starts(buffer: Array, indices: tuple[Index, ...]) -> list[Array]:
  """Returns the start of a slice along every axis of a buffer.

  All starts must have one type, but the index of a loop is int64 if JAX has
  64-bit types enabled. So all of them are cast to int32.

  Args:
    buffer: The buffer.
    indices: Indices of the first axes. The slice starts at 0 along all others.
  """
  num_other_axes = buffer.ndim - len(indices)
  starts = indices + (0,) * num_other_axes
  return [jnp.asarray(start, np.int32) for start in starts]


def zeros(x: Array | jax.ShapeDtypeStruct) -> Array:
  """Returns zeros with the shape of x, as the start of a sum.

  Args:
    x: An array, or its shape and dtype. The zeros are in fp32, or in the dtype
      of x if it is wider.
  """
  return jnp.zeros(x.shape, np.promote_types(np.float32, x.dtype))


def added(total: Array, value: Array) -> Array:
  """Returns the sum of a total and a value, in the dtype of the total."""
  return total + value.astype(total.dtype)
