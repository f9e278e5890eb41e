"""What a stage of a pipeline does in one tick, apart from when and with whom.

Each action takes the stage's state to its next state and touches the slots
that the timetable names, so that the memory of a step is decided there and
nowhere else. Layers run in a loop, each put together from what
`pipeline_layer` took apart; the first and the last part of the model have the
embedding and the loss to do besides, under a condition, as all stages run the
same program.

Letters in names: T tokens, D model, K layers of a chunk.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dilocox_jax.inner.boundary import Boundary, Message
from dilocox_jax.inner.pipeline_layer import Block, Layer, Leaves, Pairs
from dilocox_jax.pytypes import Index, Scalar, Tree


class CutModel(NamedTuple):
  """A model, cut where a pipeline may cut it.

  Attributes:
    embed: (leaves that are no block's, tokens [b, L]) -> x [T, D], T = b L.
    block: (one layer's leaves, x [T, D], L, multiply) -> x [T, D]; products
      with kernels go through multiply(path, x, kernel).
    loss: (leaves that are no block's, x [T, D], targets [T]) -> mean loss.
  """

  embed: Callable[[Tree, Array], Array]
  block: Block
  loss: Callable[[Tree, Array, Array], Array]


class Tick(NamedTuple):
  """One stage's entries of a row of the timetable, which explains them."""

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


class State(NamedTuple):
  """What a stage holds between two ticks.

  Attributes:
    activations: Inbox [slots + 1, T, D]; what nobody reads goes to the last.
    gradients: The same for gradients.
    activations_sent: What is on its way from the stage before.
    gradients_sent: The same from the stage after.
    kept: From forwards for backwards; leaves [slots, K, ...].
    pairs: From input gradients for weight gradients; leaves [slots, K, ...].
    loss: Sum over micro-batches.
    block_gradients: The same by path; leaves [chunks, K, ...].
    rest_gradients: The same of all other leaves.
  """

  activations: Array
  gradients: Array
  activations_sent: Message
  gradients_sent: Message
  kept: list[Array]
  pairs: Pairs
  loss: Scalar
  block_gradients: Leaves
  rest_gradients: Tree


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
  """A stage's actions, and what does not change from tick to tick.

  Attributes:
    model: What it computes.
    layer: Its block, taken apart.
    boundary: How values travel between stages.
    counts: Layers of every chunk of every stage: int32 [stages, chunks].
    number: Which stage this is.
    leaves: Its layers' parameters by path, [chunks, K, ...].
    rest: The leaves that are no block's.
    tokens: int32 [m, b, L + 1].
  """

  model: CutModel
  layer: Layer
  boundary: Boundary
  counts: np.ndarray
  number: Index
  leaves: Leaves
  rest: Tree
  tokens: Array

  def forward(self, at: Tick, state: State) -> State:
    """Runs a chunk's layers and sends what comes out."""

    def embed(at: Tick, _: Array) -> Array:
      tokens = get(self.tokens, at.micro_batch)
      return self.model.embed(self.rest, tokens[:, :-1])

    def body(place: Index, carry: tuple[Array, list[Array]]):
      x_TxD, kept = carry
      x_TxD, new = self.layer.forward(self._leaves(at, place), x_TxD)
      return x_TxD, put(kept, new, at.saved_slot, place)

    arrived = get(state.activations, at.activation_slot)
    x_TxD = when(self._is_first(at), "embed", embed, at, arrived)
    x_TxD, kept = self._loop(at, body, (x_TxD, state.kept))
    return state._replace(
      kept=kept,
      gradients=put(state.gradients, x_TxD, at.turn_slot),
      activations_sent=self.boundary.encode(x_TxD),
    )

  def backward(self, at: Tick, state: State) -> State:
    """Both halves of the gradient, layer by layer."""
    return self._backward(at, state, is_split=False)

  def input_gradient(self, at: Tick, state: State) -> State:
    """The half that the stage before waits for."""
    return self._backward(at, state, is_split=True)

  def weight_gradient(self, at: Tick, state: State) -> State:
    """The other half."""

    def body(place: Index, totals: Leaves) -> Leaves:
      pairs = get(state.pairs, at.pair_slot, place)
      return _add(totals, self.layer.weight_gradients(pairs), at.chunk, place)

    totals = self._loop(at, body, state.block_gradients)
    return state._replace(block_gradients=totals)

  def _backward(self, at: Tick, state: State, is_split: bool) -> State:
    state, gradient = self._turned(at, state)
    last = self._count(at) - 1

    def body(step: Index, carry: tuple[Array, Pairs, Leaves]):
      gradient, pairs, totals = carry
      place = last - step
      kept = get(state.kept, at.saved_slot, place)
      gradient, found, new = self.layer.input_gradient(
        self._leaves(at, place), kept, gradient
      )
      if is_split:
        pairs = put(pairs, new, at.pair_slot, place)
      else:
        found |= self.layer.weight_gradients(new)
      return gradient, pairs, _add(totals, found, at.chunk, place)

    gradient, pairs, totals = self._loop(
      at, body, (gradient, state.pairs, state.block_gradients)
    )
    return state._replace(
      gradients_sent=self.boundary.encode(gradient),
      pairs=pairs,
      block_gradients=totals,
      rest_gradients=self._embedded(at, gradient, state.rest_gradients),
    )

  def _turned(self, at: Tick, state: State) -> tuple[State, Array]:
    """The gradient to start from; of the last part, with loss and head's."""

    def head(at: Tick, carry: tuple[Array, Scalar, Tree]):
      x_TxD, loss_total, totals = carry
      targets = get(self.tokens, at.micro_batch)[:, 1:].reshape(-1)
      loss, (rest, gradient) = jax.value_and_grad(self.model.loss, (0, 1))(
        self.rest, x_TxD, targets
      )
      totals = jax.tree.map(_sum, totals, rest)
      return gradient, _sum(loss_total, loss), totals

    arrived = get(state.gradients, at.gradient_slot)
    start = arrived, state.loss, state.rest_gradients
    gradient, loss, totals = when(self._is_last(at), "head", head, at, start)
    return state._replace(loss=loss, rest_gradients=totals), gradient

  def _embedded(self, at: Tick, gradient: Array, totals: Tree) -> Tree:
    """Adds the gradient of the embedding, where the first part has it."""

    def embed(at: Tick, totals: Tree) -> Tree:
      tokens = get(self.tokens, at.micro_batch)[:, :-1]
      _, pullback = jax.vjp(lambda r: self.model.embed(r, tokens), self.rest)
      return jax.tree.map(_sum, totals, *pullback(gradient))

    return when(self._is_first(at), "embed", embed, at, totals)

  def _is_first(self, at: Tick) -> Array:
    return (self.number == 0) & (at.chunk == 0)

  def _is_last(self, at: Tick) -> Array:
    stages, chunks = self.counts.shape
    return (self.number == stages - 1) & (at.chunk == chunks - 1)

  def _count(self, at: Tick) -> np.int32 | Index:
    """Layers of a chunk; known beforehand where all chunks are alike."""
    most = self.counts.max()
    if np.all(self.counts == most):
      return most
    return get(jnp.asarray(self.counts), self.number, at.chunk)

  def _loop(self, at: Tick, body: Callable, start: Tree) -> Tree:
    return jax.lax.fori_loop(np.int32(0), self._count(at), body, start)

  def _leaves(self, at: Tick, place: Index) -> Leaves:
    return get(self.leaves, at.chunk, place)


def when(
  condition: Array,
  name: str,
  action: Callable[[Tick, Tree], Tree],
  at: Tick,
  state: Tree,
) -> Tree:
  """The state after an action, or as it was.

  A loop of one round or none, because what a loop carries is changed in place.
  One conditional over all actions was seen to copy every buffer in each tick,
  idle ones too, which doubled both memory and traffic.

  Args:
    condition: Whether to run the action.
    name: What compiled operations and profiles call it.
    action: (tick, state) -> state. It must find what it reads of other
      values than its state by the tick's indices.
    at: The tick.
    state: The state.
  """

  def body(number: Index, state: Tree) -> Tree:
    # What does not depend on the round would be moved out of the loop, and so
    # run where the loop has none. Now all that follows from the tick depends.
    is_on = number < rounds
    here = jax.tree.map(lambda index: jnp.where(is_on, index, -1), at)
    return action(here, state)

  with jax.named_scope(name):
    rounds = condition.astype(np.int32)
    return jax.lax.fori_loop(np.int32(0), rounds, body, state)


def get(tree: Tree, *place: Index) -> Tree:
  """Leaves [N1, ..., *shape] at a place along their first axes: [*shape]."""

  def one(buffer: Array) -> Array:
    axes, shape = buffer.shape[: len(place)], buffer.shape[len(place) :]
    sizes = (*[1] * len(place), *shape)
    found = jax.lax.dynamic_slice(buffer, _starts(buffer, place), sizes)
    if max(axes) == 1:
      # What lies in the only place there is depends on no tick: see `when`.
      is_on = jnp.asarray(place[0]) >= 0
      found = jnp.where(is_on, found, jnp.zeros_like(found))
    return found.reshape(shape)

  return jax.tree.map(one, tree)


def put(tree: Tree, new: Tree, *place: Index) -> Tree:
  """The tree with leaves [*shape] put at a place along its first axes."""

  def one(buffer: Array, value: Array) -> Array:
    value = value.reshape(*[1] * len(place), *value.shape)
    return jax.lax.dynamic_update_slice(buffer, value, _starts(buffer, place))

  return jax.tree.map(one, tree, new)


def _starts(buffer: Array, place: tuple[Index, ...]) -> list:
  # A loop counts in int64 where that is enabled; starts must be of one type.
  starts = (*place, *[0] * (buffer.ndim - len(place)))
  return [jnp.asarray(start, np.int32) for start in starts]


def _sum(total: Array, value: Array) -> Array:
  return total + value.astype(total.dtype)


def _add(totals: Leaves, found: Leaves, *place: Index) -> Leaves:
  """Adds to some of the leaves, at a place along their first axes."""
  new = {
    path: put(totals[path], _sum(get(totals[path], *place), value), *place)
    for path, value in found.items()
  }
  return {**totals, **new}
