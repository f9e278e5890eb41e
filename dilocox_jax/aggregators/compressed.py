"""The compressed mean of a tree: a codec, its messages and its state.

All leaves of one message travel together, and a codec may need several in turn
(`codecs.base`). Two leaves, "bias" and "kernel", as low-rank factors:

    message  it carries                     the codec goes on with
    0        bias, left factor of kernel    their means: an orthonormal basis
    1        right factor of kernel         its mean: the result

A replica whose values are not finite sends zeros and is not counted.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dilocox_jax.aggregators import transport
from dilocox_jax.aggregators.carriers import Carry
from dilocox_jax.aggregators.collectives import collectives
from dilocox_jax.codecs.base import (
  Codec,
  Projection,
  Quantiser,
  are_finite,
  encoder_of,
  messages,
)
from dilocox_jax.codecs.low_rank import Factors, LowRank, grams
from dilocox_jax.plan.collective import stretch_ends
from dilocox_jax.plan.schedule.fragments import stacked_shape
from dilocox_jax.trees import (
  Array,
  Boolean,
  Index,
  Pausing,
  Tree,
  leaves_by_path,
  shapes_by_path,
)


class CodecState(NamedTuple):
  """State that a codec carries from one exchange of a fragment to the next.

  Attributes:
    count: Exchanges so far (int32 scalar); random keys follow from it.
    leaves: Codec state of every leaf by path.
  """

  count: Index
  leaves: dict[str, Tree]


@dataclasses.dataclass(frozen=True)
class CompressedMean:
  """Averages a tree over the replica axis.

  Attributes:
    codec: Codec of the leaves.
    collective: Operation that carries them, one of
      `plan.collective.COLLECTIVES`.
    seed: Integer seed of random masks, first low-rank factors and stochastic
      rounding.
    axis_name: Axis over which replicas are mapped.
    shares_add_up: Whether `own` also has what this replica lost when it rounded
      a mean that it sent on, as after a reduce-scatter. Error feedback then
      makes up for both roundings.
    carry: What carries the messages instead of a collective.
    number: Number of this replica, which tells its random numbers from those
      of the others; None: its place on the axis.
  """

  codec: Codec
  collective: str
  seed: int
  axis_name: str
  shares_add_up: bool
  carry: Carry | None = None
  number: int | None = None

  def init(self, params: Tree) -> CodecState:
    """Returns the first state of a fragment."""
    leaves = _stacked(params)
    states: list[Tree] = [()] * len(leaves)
    if isinstance(self.codec, Projection):
      shapes = [leaf.shape for leaf in leaves.values()]
      states = self.codec.init(shapes, jax.random.key(self.seed))
    return CodecState(jnp.int32(0), dict(zip(leaves, states, strict=True)))

  def are_finite(self, values: Tree) -> Boolean:
    """Returns whether all values of a tree are finite."""
    if not isinstance(self.codec, Quantiser):
      return are_finite(values)
    # The rows that are sent anyway, so that no leaf is laid out twice.
    leaves = list(_stacked(values).values())
    layout = self.codec.layout([leaf.shape for leaf in leaves])
    return are_finite(layout.rows(leaves))

  def update(
    self, values: Tree, participates: Boolean, state: CodecState
  ) -> Pausing:
    """Averages a tree, with pauses as in `Aggregator.paused`.

    Args:
      values: Values of this replica.
      participates: Whether this replica is counted in the mean.
      state: State of the exchange before, or that of `init`.

    Returns:
      A generator that returns the mean, what the others received of this
      replica's values, both float32 trees like the values, and the new state.
    """
    # All replicas must draw the same mask, so codecs get the shared key. Each
    # must round by itself, so encoders get a key of the replica.
    key = jax.random.fold_in(jax.random.key(self.seed), state.count)
    leaves = _stacked(values)
    states = [state.leaves[path] for path in leaves]
    run = messages(self.codec, list(leaves.values()), states, key)
    sent, turn = next(run), 0
    while True:
      reduced = yield from self._reduced(sent, participates, key, turn)
      turn += 1
      try:
        sent = run.send(reduced)
      except StopIteration as stop:
        (mean, own), states = stop.value
        break
    mean = _like(values, dict(zip(leaves, mean, strict=True)))
    own = _like(values, dict(zip(leaves, own, strict=True)))
    kept = dict(zip(leaves, states, strict=True))
    return mean, own, CodecState(state.count + 1, kept)

  def _reduced(
    self, sent: list[Array], participates: Boolean, key: Array, turn: int
  ) -> Pausing:
    """Averages the leaves of one message."""
    key = jax.random.fold_in(key, turn + 1)
    number = self.number
    if number is None:
      number = jax.lax.axis_index(self.axis_name)
    key = jax.random.fold_in(key, number)
    return transport.reduce(
      encoder_of(self.codec),
      sent,
      participates,
      key,
      self.collective,
      self.axis_name,
      self.shares_add_up,
      self.carry,
    )

  def observe(self, state: CodecState, follows_rank: bool) -> dict[str, Array]:
    """Returns what the host records of a state (`codecs.low_rank.grams`).

    Args:
      state: State after an exchange.
      follows_rank: Whether at least one layer of every leaf is needed.
    """
    if not isinstance(self.codec, LowRank):
      return {}
    leaves = state.leaves.items()
    factors = {path: own for path, own in leaves if isinstance(own, Factors)}
    return grams(factors, self.codec.rank, follows_rank)

  def stretch_ends(self, params: Tree) -> tuple[int, ...]:
    """Returns `Aggregator.stretch_ends` of a fragment."""
    num_replicas = jax.lax.axis_size(self.axis_name)
    shapes = shapes_by_path(params)
    operations = collectives(self.codec, shapes, num_replicas, self.collective)
    return stretch_ends(operations, num_replicas)


def _stacked(tree: Tree) -> dict[str, Array]:
  """Returns leaves [num_layers, ...] by path, of those that have values."""
  return {
    path: leaf.reshape(stacked_shape(path, leaf.shape))
    for path, leaf in leaves_by_path(tree).items()
    if leaf.size
  }


def _like(tree: Tree, leaves: dict[str, Array]) -> Tree:
  """Puts leaves by path into the structure and shapes of a tree.

  Leaves without values were not sent: all replicas have the same.
  """
  shaped = [
    leaves.get(path, jnp.zeros(0, jnp.float32)).reshape(shape)
    for path, shape in shapes_by_path(tree).items()
  ]
  return jax.tree.unflatten(jax.tree.structure(tree), shaped)
