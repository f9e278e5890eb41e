"""The stages of a pipeline, and the loss of a pipelined model.

All stages run the same program, but only the first stage embeds tokens, and
only the last stage computes the loss. The loss here is for evaluations: no
arrays are saved for a backward. `inner.pipeline` computes the gradient.

The residual stream between two layers is called the stream, x. Letters in
shapes: m micro-batches of b sequences with L tokens each, S = L + 1 tokens
with the last target, T = b L tokens of a micro-batch, D width of the stream, K
the largest number of layers of a stage.
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

  A micro-batch has b sequences of L tokens, T = b L tokens in all. D is the
  width of x, the residual stream between two layers.

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

    They are {"segments": [b, L]}, or {} if the model has no segments.
    """
    if self.segments is None:
      return {}
    return {"segments": self.segments(tokens)}


class LayerTransfer(NamedTuple):
  """How a device gathers a whole layer, and gives its gradient back.

  Attributes:
    collect: Function from this device's part of a layer to the whole layer.
    reduce: Function from this device's gradient of the whole layer to the
      gradient of its part. If data shards divide a leaf, the gradient of the
      leaf is summed over the data shards. Other gradients stay as they are.
  """

  collect: Callable[[Tree], Tree]
  reduce: Callable[[Tree], Tree]

  def whole_layer(self, layer: Tree, dtype: jnp.dtype) -> Tree:
    """Gathers a whole layer from this device's part of it.

    Args:
      layer: This device's part of the layer.
      dtype: The leaves with two axes or more are cast to this type before they
        are gathered.
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
  """A pipeline stage: the values that do not change during an inner step.

  Attributes:
    model: The model, cut into embedding, layers and loss.
    counts: Number of layers of every stage, [stages].
    number: Index of this stage, from 0.
    layers: Parameters of this stage's layers, leaves [K, ...]: whole layers, or
      this device's part of each. K is the largest number of layers of a stage;
      a shorter stage does not read the last rows.
    transfer: How the device gathers a whole layer.
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

    It is a constant if all stages have equally many layers, else a traced
    value.
    """
    if np.ptp(self.counts) == 0:
      return self.counts[0]
    return jnp.asarray(self.counts)[self.number]

  def whole_layer(self, row: Index, dtype: jnp.dtype) -> Tree:
    """Returns layer `row` of the stage, gathered, with matrices in `dtype`."""
    return self.transfer.whole_layer(get(self.layers, row), dtype)

  def context(self, batch: Index) -> dict[str, Array]:
    """Returns the keyword arguments of `embed` and `block` for a micro-batch.

    `batch` is the number of the micro-batch. The result is {"segments": [b, L]}
    or, without segments, {} (`CutModel.context`).
    """
    return self.model.context(get(self.tokens, batch)[:, :-1])

  def targets(self, batch: Index) -> Array:
    """Returns the tokens to predict in micro-batch number `batch`, [T]."""
    return get(self.tokens, batch)[:, 1:].reshape(-1)

  def embed(self, rest: Tree, batch: Index) -> Array:
    """Returns the embedded tokens of micro-batch number `batch`, [T, D].

    `rest` has the parameters outside the layers. It is an argument, so that a
    caller can compute the gradient with respect to it.
    """
    tokens = get(self.tokens, batch)[:, :-1]
    return self.model.embed(rest, tokens, **self.context(batch))

  def input(self, batch: Index, arrived: Array) -> Array:
    """Returns the input of the stage's first layer, [T, D].

    On the first stage, the input is the embedded tokens of micro-batch number
    `batch`. On every other stage, it is `arrived`: what the stage before has
    sent.
    """

    def embed(batch: Index, _: Array) -> Array:
      return self.embed(self.rest, batch)

    return when(self.number == 0, "embed", embed, batch, arrived)

  def loop(self, body: Callable, start: Tree) -> Tree:
    """Calls a function for each layer of the stage, the first layer first.

    Args:
      body: Function (index of the layer in the stage, carry) -> carry.
      start: Carry for the first layer.

    Returns:
      The carry after the last layer.
    """
    return jax.lax.fori_loop(np.int32(0), self.count, body, start)

  def exchange(self, message: Tree, step: int = 1) -> Tree:
    """Sends a message to a neighboring stage, and returns the one that arrives.

    All stages send in one direction around a ring. With a single stage, the
    result is `message`.

    Args:
      message: Tree of arrays, with the same shapes on all stages.
      step: 1: send to the next stage; -1: send to the stage before.
    """
    num_stages = len(self.counts)
    if num_stages == 1:
      return message
    ring = [(s, (s + step) % num_stages) for s in range(num_stages)]
    return jax.lax.ppermute(message, STAGE_AXIS, ring)


def pipelined_loss(model: CutModel, layer_counts: np.ndarray) -> PipelinedLoss:
  """Builds the loss function of one stage, for `shard_map` over the stages.

  The loop over the micro-batches goes in ticks. In tick t, stage s runs the
  forward of micro-batch t - s, if there is a micro-batch of this number.

  Args:
    model: The model, cut into embedding, layers and loss.
    layer_counts: Number of layers of each stage, [stages].

  Returns:
    Function (blocks, rest, tokens, transfer) -> loss. On the last stage, the
    loss is the mean over the micro-batches. On all other stages it is 0, so the
    caller must sum it over the stages.

    - blocks: this stage's layers, leaves [K, ...].
    - rest: all other leaves.
    - tokens: int32 [m, b, L + 1].
    - transfer: how a device gathers a whole layer. It can be left out if the
      device holds whole layers.
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
    # Before the first tick, no stream has arrived, and the sum of losses is 0.
    first = (
      empty_buffer(x_TxD.shape, x_TxD.dtype),
      zeros(jax.ShapeDtypeStruct((), x_TxD.dtype)),
    )
    # The last stage begins as many ticks late as there are stages before it.
    ticks = jnp.arange(num_batches + len(layer_counts) - 1, dtype=np.int32)
    (_, total), _ = jax.lax.scan(tick, first, ticks)
    return total / num_batches

  return loss


def empty_buffer(shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
  """Returns a buffer of zeros, to be written before it is read."""
  return jnp.zeros(shape, dtype)


def when(
  condition: Array,
  name: str,
  action: Callable[[Any, Tree], Tree],
  at: Tree,
  state: Tree,
) -> Tree:
  """Runs an action on a state if a condition holds, else returns the state.

  Unlike with `jax.lax.cond`, XLA updates the state in place. With `cond` it
  would copy every buffer at each call.

  Args:
    condition: Whether to run the action, a boolean scalar.
    name: Name of the action in compiled operations and profiles.
    action: Function (at, state) -> state. It may read other arrays only at
      indices from its first argument.
    at: An index, or a tree of indices, for the action.
    state: State before the action.
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
  """Reads each buffer of a tree at indices of its first axes.

  Example: if a leaf of `saved` is [slots, K, T, D], get(saved, 1, 3) reads
  leaf[1, 3], with the shape [T, D].
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
  """Returns the buffers of `tree`, with the values of `new` written into them.

  `indices` are indices of the first axes of each buffer, as for `get`.
  """

  # A value that a layer saves may be a constant, which is not an `Array`.
  def write(buffer: Array, leaf: Any) -> Array:
    leaf = leaf.reshape((1,) * len(indices) + leaf.shape)
    return jax.lax.dynamic_update_slice(buffer, leaf, _starts(buffer, indices))

  return jax.tree.map(write, tree, new)


def _starts(buffer: Array, indices: tuple[Index, ...]) -> list[Array]:
  """Returns where a slice starts along every axis: at `indices`, then at 0."""
  num_other_axes = buffer.ndim - len(indices)
  starts = indices + (0,) * num_other_axes
  # All starts need one dtype. The index of a loop may be int64.
  return [jnp.asarray(start, np.int32) for start in starts]


def zeros(x: Array | jax.ShapeDtypeStruct) -> Array:
  """Returns zeros with the shape of x, an array of floats.

  Their dtype is fp32, or the dtype of x if that one is wider.
  """
  return jnp.zeros(x.shape, np.promote_types(np.float32, x.dtype))


def added(total: Array, value: Array) -> Array:
  """Returns the sum of a total and a value, in the dtype of the total."""
  return total + value.astype(total.dtype)
