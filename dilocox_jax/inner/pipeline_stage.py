"""The stages of a pipeline, and the loss of a pipelined model.

All stages run the same program. Only the first stage embeds tokens, and only
the last stage computes the loss, so the program has a condition around each of
the two. This module computes only the loss, for evaluations: it runs forwards,
and saves no arrays for a backward. `inner.pipeline` computes the gradient.

The residual stream between two layers is called the stream, x. Letters in
shapes: m micro-batches of b sequences with L tokens each, T = b L tokens of a
micro-batch, D width of the stream, K layers of a stage.
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

# Function (blocks, rest, tokens) -> this stage's contribution to the loss, as
# `pipelined_loss` returns it. A fourth argument, `transfer`, says how a device
# gets a whole layer if it holds only a part of it.
PipelinedLoss = Callable[..., Scalar]


class CutModel(NamedTuple):
  """A model as functions for its parts: embedding, layer (block), and loss.

  Attributes:
    embed: Function (leaves outside the layers, tokens [b, L]) -> x [T, D].
    block: Function (one layer's leaves, x [T, D], L) -> x [T, D]. Leaves with
      two axes or more must have the dtype of x.
    loss: Function (leaves outside the layers, x [T, D], targets [T]) -> mean
      loss.
    segments: Function (tokens [b, L]) -> segments [b, L]: numbers that separate
      the documents of a sequence for attention (`models.attention`). `embed`
      and `block` then get them as the keyword argument `segments`. None: there
      are no segments.
  """

  embed: Callable[..., Array]
  block: Block
  loss: Callable[[Tree, Array, Array], Array]
  segments: Callable[[Array], Array] | None = None

  def context(self, tokens: Array) -> dict[str, Array]:
    """Returns the keyword arguments for `embed` and `block`.

    Args:
      tokens: Tokens of a micro-batch, int32 [b, L].

    Returns:
      The segments by the name "segments"; {} if there are none.
    """
    if self.segments is None:
      return {}
    return {"segments": self.segments(tokens)}


class LayerTransfer(NamedTuple):
  """How a device collects a whole layer, and gives its gradient back.

  Attributes:
    collect: Function from this device's part of a layer to the whole layer.
    reduce: Function from this device's gradient of the whole layer to the
      gradient of its part. Leaves that data shards divide are summed over the
      data shards.
  """

  collect: Callable[[Tree], Tree]
  reduce: Callable[[Tree], Tree]

  def whole_layer(self, layer: Tree, dtype: jnp.dtype) -> Tree:
    """Collects a whole layer, with matrices in the dtype of the computation.

    Matrices are cast before they are collected, so that the devices send fewer
    bytes.

    Args:
      layer: This device's part of the layer.
      dtype: Dtype that the layer's matrices get.
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
  """A pipeline stage: the values that do not change during a step.

  Attributes:
    model: The model, cut into embedding, layers and loss.
    counts: Number of layers of every stage, [stages].
    number: Index of this stage, from 0.
    layers: Parameters of this stage's layers, leaves [K, ...]: whole layers, or
      this device's part of each.
    transfer: How the device collects a whole layer.
    rest: Parameters outside the layers.
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

    It is a constant of the program if all stages have equally many layers;
    otherwise it is a traced value.
    """
    if np.ptp(self.counts) == 0:
      return self.counts[0]
    return jnp.asarray(self.counts)[self.number]

  def whole_layer(self, row: Index, dtype: jnp.dtype) -> Tree:
    """Returns a layer of this stage, collected from the devices that divide it.

    Args:
      row: Index of the layer in the stage, from 0.
      dtype: Dtype that the layer's matrices get.
    """
    return self.transfer.whole_layer(get(self.layers, row), dtype)

  def context(self, batch: Index) -> dict[str, Array]:
    """Returns the keyword arguments for the model's functions (segments).

    Every stage has all tokens, so stages need not send each other segments.

    Args:
      batch: Index of the micro-batch.
    """
    return self.model.context(get(self.tokens, batch)[:, :-1])

  def targets(self, batch: Index) -> Array:
    """Returns the tokens that the model should predict, int32 [T].

    Args:
      batch: Index of the micro-batch.
    """
    return get(self.tokens, batch)[:, 1:].reshape(-1)

  def embed(self, rest: Tree, batch: Index) -> Array:
    """Returns the embedded tokens of a micro-batch, [T, D].

    Args:
      rest: Parameters outside the layers. They are an argument, so that the
        backward can differentiate with respect to them.
      batch: Index of the micro-batch.
    """
    tokens = get(self.tokens, batch)[:, :-1]
    return self.model.embed(rest, tokens, **self.context(batch))

  def input(self, batch: Index, arrived: Array) -> Array:
    """Returns the input of the stage's first layer, [T, D].

    On the first stage it is the embedded tokens; on every other stage it is
    `arrived`.

    Args:
      batch: Index of the micro-batch.
      arrived: The residual stream that the stage before has sent, [T, D].
    """

    def embed(batch: Index, _: Array) -> Array:
      return self.embed(self.rest, batch)

    return when(self.number == 0, "embed", embed, batch, arrived)

  def loop(self, body: Callable, start: Tree) -> Tree:
    """Runs a loop over the stage's layers.

    Args:
      body: Function (row, carry) -> carry, where `row` is the index of a layer
        in the stage.
      start: The carry before the first layer.

    Returns:
      The carry after the last layer.
    """
    return jax.lax.fori_loop(np.int32(0), self.count, body, start)

  def exchange(self, message: Tree, step: int = 1) -> Tree:
    """Sends a message to the next stage, or to the stage before.

    All stages send in the same direction at the same time, around a ring. The
    message between the last and the first stage is not read.

    Args:
      message: Tree of arrays, with the same shapes on all stages.
      step: 1: send to the next stage; -1: send to the stage before.

    Returns:
      The message that has arrived at this stage.
    """
    num_stages = len(self.counts)
    if num_stages == 1:
      return message
    ring = [(s, (s + step) % num_stages) for s in range(num_stages)]
    return jax.lax.ppermute(message, STAGE_AXIS, ring)


def pipelined_loss(model: CutModel, layer_counts: np.ndarray) -> PipelinedLoss:
  """Builds the loss function of one stage, for `shard_map` over the stages.

  The loop has steps, called ticks. In tick t, stage s runs the forward of
  micro-batch t - s.

  Args:
    model: The model, cut into embedding, layers and loss.
    layer_counts: Number of layers of each stage, [stages].

  Returns:
    Function (blocks, rest, tokens, transfer) -> mean loss over the micro-
    batches, a scalar. `blocks` are this stage's layers, leaves [K, ...]; `rest`
    are all other leaves; `tokens` are int32 [m, b, L + 1]; `transfer` says how
    a device collects a whole layer. The loss is 0 on all stages but the last,
    so the caller must sum it over the stages.
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
  """Returns a buffer of zeros. It must be written before it is read.

  Args:
    shape: Shape of the buffer.
    dtype: Dtype of the buffer.
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

  The result is the same as with `jax.lax.cond`. But this function uses a loop
  with one iteration or none, because XLA updates the values that a loop carries
  in place. With a conditional, XLA copied every buffer in each tick, also in
  ticks without an action, which doubled memory and traffic.

  Args:
    condition: Whether to run the action, a boolean scalar.
    name: Name of the action in compiled operations and profiles.
    action: Function (numbers, state) -> state. It may read other arrays only at
      indices that come from its argument `numbers`.
    at: The argument `numbers` of the action: an index, or a tree of indices.
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
  """Reads buffers at indices of their first axes.

  Example: a leaf of `saved` is [slots, K, T, D] for K layers of the stage, T
  tokens and width D. get(saved, 1, 3) reads leaf[1, 3] with the shape [T, D]:
  what layer 3 has saved of the micro-batch in slot 1.

  Args:
    tree: Buffers, leaves [N1, N2, ..., *shape].
    *indices: An index for each of the axes N1, N2, ...

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
  """Writes values into buffers at indices of their first axes.

  `get` with the same indices reads the values.

  Args:
    tree: Buffers, leaves [N1, N2, ..., *shape].
    new: The values to write, leaves [*shape].
    *indices: An index for each of the axes N1, N2, ...

  Returns:
    The new buffers.
  """

  # A value that a layer saves may be a constant, which is not an `Array`.
  def write(buffer: Array, leaf: Any) -> Array:
    leaf = leaf.reshape((1,) * len(indices) + leaf.shape)
    return jax.lax.dynamic_update_slice(buffer, leaf, _starts(buffer, indices))

  return jax.tree.map(write, tree, new)


def _starts(buffer: Array, indices: tuple[Index, ...]) -> list[Array]:
  """Returns where a slice of a buffer starts along every axis, as int32.

  All starts must have the same dtype. Without a cast, the index of a loop would
  be int64 if JAX has 64-bit types enabled.

  Args:
    buffer: The buffer.
    indices: Indices of the first axes. The slice starts at 0 along all others.
  """
  num_other_axes = buffer.ndim - len(indices)
  starts = indices + (0,) * num_other_axes
  return [jnp.asarray(start, np.int32) for start in starts]


def zeros(x: Array | jax.ShapeDtypeStruct) -> Array:
  """Returns zeros with the shape of x, as the start of a sum.

  They are in fp32, or in the dtype of x if it is wider.

  Args:
    x: An array, or its shape and dtype.
  """
  return jnp.zeros(x.shape, np.promote_types(np.float32, x.dtype))


def added(total: Array, value: Array) -> Array:
  """Returns the sum of a total and a value, in the dtype of the total."""
  return total + value.astype(total.dtype)
