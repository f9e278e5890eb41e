"""Runs the action of one stage in one tick of a pipeline.

The timetable says when an action runs and which slots it uses; `pipeline`
moves values between stages. Each action here takes the stage's state to its
next state and touches only the slots that the timetable names. So the
timetable alone decides the memory of a step. Layers run in a loop, one
`SplitLayer` after the other. All stages run the same program, so the embedding
and the loss, which only the model's first and last chunk have, stand under a
condition.

Letters in names: T tokens, D model, K layers of a chunk.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dilocox_jax.inner.activation_codec import ActivationCodec, Message
from dilocox_jax.inner.pipeline_layer import Block, Leaves, Pairs, SplitLayer
from dilocox_jax.trees import Index, Scalar, Tree


class CutModel(NamedTuple):
  """A model, cut where a pipeline may cut it.

  Attributes:
    embed: (leaves outside the blocks, tokens [b, L]) -> x [T, D], T = b L.
    block: (one layer's leaves, x [T, D], L, multiply) -> x [T, D]; products
      with kernels go through multiply(path, x, kernel).
    loss: (leaves outside the blocks, x [T, D], targets [T]) -> mean loss.
    segments: (tokens [b, L]) -> segments [b, L] (`models.segments`), which
      `embed` and `block` then take by this name. None: they take none.
  """

  embed: Callable[..., Array]
  block: Block
  loss: Callable[[Tree, Array, Array], Array]
  segments: Callable[[Array], Array] | None = None

  def context(self, tokens: Array) -> dict[str, Array]:
    """Returns what `embed` and `block` take by name, for tokens [b, L]."""
    return {} if self.segments is None else {"segments": self.segments(tokens)}


class TickNumbers(NamedTuple):
  """The numbers that one stage reads from one row of the timetable.

  `plan.pipeline.timetable.Timetable` explains each of them. This is what the
  first of two stages reads in 1F1B with four micro-batches (F2 is the forward
  of micro-batch 2, B2 its backward, "." means none):

      tick        0   1   2   3   4   5   6   7   8   9
      action      F0  F1  .   B0  F2  B1  F3  B2  .   B3
      saved_slot  0   1   .   0   0   1   1   0   .   1

  Two slots are enough for four micro-batches. B0 reads slot 0 in tick 3, so F2
  may write there in tick 4. A "." is stored as the number of slots, here 2.
  """

  action: Index
  micro_batch: Index
  chunk: Index
  saved_slot: Index
  activation_put: Index
  activation_slot: Index
  gradient_put: Index
  gradient_slot: Index
  turn_slot: Index
  pair_slot: Index


class StageState(NamedTuple):
  """The arrays that a stage holds between two ticks.

  Attributes:
    activations: Inbox [slots + 1, T, D] of activations. A stage receives an
      array in every tick; one that nobody reads is put into the last slot.
    gradients: Inbox [slots + 1, T, D] of gradients, used in the same way.
    activations_sent: Activations that arrived from the stage before.
    gradients_sent: Gradients that arrived from the stage after.
    saved: Arrays from forwards for backwards; leaves [slots, K, ...].
    pairs: Arrays from input gradients for weight gradients; leaves
      [slots, K, ...].
    loss: Sum of the losses of the micro-batches so far.
    block_gradients: Sums of the blocks' gradients by path; leaves
      [chunks, K, ...].
    rest_gradients: Sums of the gradients of all other leaves.
  """

  activations: Array
  gradients: Array
  activations_sent: Message
  gradients_sent: Message
  saved: list[Array]
  pairs: Pairs
  loss: Scalar
  block_gradients: Leaves
  rest_gradients: Tree


@dataclasses.dataclass(frozen=True, eq=False)
class StageInputs:
  """The values of a stage that are the same in every tick.

  Attributes:
    model: The model.
    counts: Layers of every chunk of every stage: int32 [stages, chunks].
    number: Index of this stage.
    leaves: Parameters of this stage's layers, [chunks, K, ...]. `Stage` has
      them by path.
    rest: Parameters outside the blocks.
    tokens: int32 [m, b, L + 1].
  """

  model: CutModel
  counts: np.ndarray
  number: Index
  leaves: Tree
  rest: Tree
  tokens: Array

  def read(self, at: TickNumbers) -> Array:
    """Returns the tokens [b, L] that the model reads."""
    return get(self.tokens, at.micro_batch)[:, :-1]

  def context(self, at: TickNumbers) -> dict[str, Array]:
    """Returns `CutModel.context` of the micro-batch.

    Every stage has all tokens, so no segments have to travel.
    """
    return self.model.context(self.read(at))

  def targets(self, at: TickNumbers) -> Array:
    """Returns the tokens [T] that the model should predict."""
    return get(self.tokens, at.micro_batch)[:, 1:].reshape(-1)

  def input(self, at: TickNumbers, activations: Array) -> Array:
    """Returns the stream [T, D] that a chunk reads.

    Args:
      at: Numbers of the tick.
      activations: Inbox of activations.
    """

    def embed(at: TickNumbers, _: Array) -> Array:
      return self.model.embed(self.rest, self.read(at), **self.context(at))

    x_TxD = get(activations, at.activation_slot)
    return when(self.is_first(at), "embed", embed, at, x_TxD)

  def is_first(self, at: TickNumbers) -> Array:
    """Whether the tick's chunk is the model's first one."""
    return (self.number == 0) & (at.chunk == 0)

  def is_last(self, at: TickNumbers) -> Array:
    """Whether the tick's chunk is the model's last one."""
    stages, chunks = self.counts.shape
    return (self.number == stages - 1) & (at.chunk == chunks - 1)

  def count(self, at: TickNumbers) -> np.int32 | Index:
    """Returns the layers of a chunk; a constant if all chunks are alike."""
    most = self.counts.max()
    if np.all(self.counts == most):
      return most
    return get(jnp.asarray(self.counts), self.number, at.chunk)

  def loop(self, at: TickNumbers, body: Callable, start: Tree) -> Tree:
    """Runs (row, carry) -> carry for every layer of a chunk."""
    return jax.lax.fori_loop(np.int32(0), self.count(at), body, start)

  def layer_leaves(self, at: TickNumbers, row: Index) -> Tree:
    """Returns the parameters of one layer of a chunk."""
    return get(self.leaves, at.chunk, row)


@dataclasses.dataclass(frozen=True, eq=False)
class Stage(StageInputs):
  """A stage's actions in training.

  Attributes:
    layer: The model's block with its gradient split in steps.
    codec: Encoding of values on their way to another stage.
  """

  layer: SplitLayer
  codec: ActivationCodec

  def forward(self, at: TickNumbers, state: StageState) -> StageState:
    """Runs a chunk's layers and sends their output.

    Args:
      at: Numbers of the tick.
      state: State of the stage.
    """
    context = self.context(at)

    def body(row: Index, carry: tuple[Array, list[Array]]):
      x_TxD, saved = carry
      leaves = self.layer_leaves(at, row)
      x_TxD, new = self.layer.forward(leaves, x_TxD, context)
      return x_TxD, put(saved, new, at.saved_slot, row)

    x_TxD = self.input(at, state.activations)
    x_TxD, saved = self.loop(at, body, (x_TxD, state.saved))
    # The model's last output is not sent anywhere. It turns round: it waits
    # among the gradients until the backward computes the loss from it. On
    # every other chunk `turn_slot` is the last slot, which nobody reads.
    return state._replace(
      saved=saved,
      gradients=put(state.gradients, x_TxD, at.turn_slot),
      activations_sent=self.codec.encode(x_TxD),
    )

  def backward(self, at: TickNumbers, state: StageState) -> StageState:
    """Computes input and weight gradients, layer by layer."""
    return self._backward(at, state, is_split=False)

  def input_gradient(self, at: TickNumbers, state: StageState) -> StageState:
    """Computes input gradients, for which the stage before waits."""
    return self._backward(at, state, is_split=True)

  def weight_gradient(self, at: TickNumbers, state: StageState) -> StageState:
    """Computes the weight gradients that `input_gradient` left out."""

    def body(row: Index, totals: Leaves) -> Leaves:
      pairs = get(state.pairs, at.pair_slot, row)
      return _add(totals, self.layer.weight_gradients(pairs), at.chunk, row)

    totals = self.loop(at, body, state.block_gradients)
    return state._replace(block_gradients=totals)

  def _backward(
    self, at: TickNumbers, state: StageState, is_split: bool
  ) -> StageState:
    state, gradient = self._last_gradient(at, state)
    last = self.count(at) - 1

    def body(step: Index, carry: tuple[Array, Pairs, Leaves]):
      gradient, pairs, totals = carry
      row = last - step
      saved = get(state.saved, at.saved_slot, row)
      gradient, leaf_gradients, new = self.layer.input_gradient(
        self.layer_leaves(at, row), saved, gradient
      )
      if is_split:
        pairs = put(pairs, new, at.pair_slot, row)
      else:
        leaf_gradients |= self.layer.weight_gradients(new)
      return gradient, pairs, _add(totals, leaf_gradients, at.chunk, row)

    gradient, pairs, totals = self.loop(
      at, body, (gradient, state.pairs, state.block_gradients)
    )
    return state._replace(
      gradients_sent=self.codec.encode(gradient),
      pairs=pairs,
      block_gradients=totals,
      rest_gradients=self._add_embedding(at, gradient, state.rest_gradients),
    )

  def _last_gradient(
    self, at: TickNumbers, state: StageState
  ) -> tuple[StageState, Array]:
    """Returns the gradient of the chunk's output.

    It comes from the inbox. The model's last chunk finds its own output there
    instead, and computes the loss and the gradients of the head from it.
    """

    def head(at: TickNumbers, carry: tuple[Array, Scalar, Tree]):
      x_TxD, loss_total, totals = carry
      loss, (rest, gradient) = jax.value_and_grad(self.model.loss, (0, 1))(
        self.rest, x_TxD, self.targets(at)
      )
      totals = jax.tree.map(_sum, totals, rest)
      return gradient, _sum(loss_total, loss), totals

    arrived = get(state.gradients, at.gradient_slot)
    start = arrived, state.loss, state.rest_gradients
    gradient, loss, totals = when(self.is_last(at), "head", head, at, start)
    return state._replace(loss=loss, rest_gradients=totals), gradient

  def _add_embedding(
    self, at: TickNumbers, gradient: Array, totals: Tree
  ) -> Tree:
    """Adds the gradient of the embedding, on the model's first chunk."""

    def embed(at: TickNumbers, totals: Tree) -> Tree:
      tokens, context = self.read(at), self.context(at)
      _, pullback = jax.vjp(
        lambda rest: self.model.embed(rest, tokens, **context), self.rest
      )
      return jax.tree.map(_sum, totals, *pullback(gradient))

    return when(self.is_first(at), "embed", embed, at, totals)


def when(
  condition: Array,
  name: str,
  action: Callable[[TickNumbers, Tree], Tree],
  at: TickNumbers,
  state: Tree,
) -> Tree:
  """Returns the state after an action, or unchanged if a condition is false.

  This is `jax.lax.cond`, written as a loop of one round or none, because XLA
  changes the values that a loop carries in place. With one conditional over
  all actions it copied every buffer in each tick, also in idle ones. That
  doubled memory and traffic.

  Args:
    condition: Whether to run the action.
    name: Name of the action in compiled operations and profiles.
    action: (tick numbers, state) -> state. Any other array must be read at an
      index from the tick numbers that the action is given.
    at: Numbers of the tick.
    state: State before the action.
  """

  def body(number: Index, state: Tree) -> Tree:
    # XLA moves operations that do not depend on the round out of a loop. Then
    # they would run although the loop has no round. `is_on` is always true
    # here, but XLA does not know that. So all tick numbers depend on the round,
    # and with them every slice that the action reads.
    is_on = number < rounds
    here = jax.tree.map(lambda index: jnp.where(is_on, index, -1), at)
    return action(here, state)

  with jax.named_scope(name):
    rounds = condition.astype(np.int32)
    return jax.lax.fori_loop(np.int32(0), rounds, body, state)


def get(tree: Tree, *indices: Index) -> Tree:
  """Reads leaves [N1, ..., *shape] at indices of their first axes.

  Example: get(saved, 1, 3) of a leaf [slots, K, T, D] is leaf[1, 3], with the
  shape [T, D]. It is layer 3 of the chunk whose arrays lie in slot 1.
  """

  def read(buffer: Array) -> Array:
    axes, shape = buffer.shape[: len(indices)], buffer.shape[len(indices) :]
    sizes = (*[1] * len(indices), *shape)
    leaf = jax.lax.dynamic_slice(buffer, _starts(buffer, indices), sizes)
    if max(axes) == 1:
      # With a single slot XLA knows that the index must be 0, so the slice
      # does not depend on the tick and would leave the loop of `when`. The
      # first index is -1 only in a round that never runs.
      is_on = jnp.asarray(indices[0]) >= 0
      leaf = jnp.where(is_on, leaf, jnp.zeros_like(leaf))
    return leaf.reshape(shape)

  return jax.tree.map(read, tree)


def put(tree: Tree, new: Tree, *indices: Index) -> Tree:
  """Writes leaves [*shape] at indices of the first axes; reverses `get`.

  Args:
    tree: Buffers, leaves [N1, ..., *shape].
    new: What is written, leaves [*shape].
    *indices: Numbers in the first axes, as in `get`.
  """

  # What a layer saves may be a constant, which JAX does not take for an Array.
  def write(buffer: Array, leaf: Any) -> Array:
    leaf = leaf.reshape(*[1] * len(indices), *leaf.shape)
    return jax.lax.dynamic_update_slice(buffer, leaf, _starts(buffer, indices))

  return jax.tree.map(write, tree, new)


def _starts(buffer: Array, indices: tuple[Index, ...]) -> list:
  # All starts must have one type, but a loop counts in int64 where JAX has
  # that enabled.
  starts = (*indices, *[0] * (buffer.ndim - len(indices)))
  return [jnp.asarray(start, np.int32) for start in starts]


def _sum(total: Array, value: Array) -> Array:
  return total + value.astype(total.dtype)


def _add(totals: Leaves, gradients: Leaves, *indices: Index) -> Leaves:
  """Adds gradients of some of the leaves at indices of the first axes."""
  new = {
    path: put(totals[path], _sum(get(totals[path], *indices), value), *indices)
    for path, value in gradients.items()
  }
  return {**totals, **new}
