"""The compressed exchange: codecs, transport, and what is remembered.

One leaf's codec knows nothing of the others; here all of them are taken
through their phases in step, so that a phase is one message. A replica whose
values are not finite sends zeros and is not counted.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dilocox_jax.codecs.base import Codec, Reduced, split_keys
from dilocox_jax.codecs.compose import codec
from dilocox_jax.codecs.low_rank import Factors
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.exchange import transport
from dilocox_jax.plan.wire.leaf import leaf_of
from dilocox_jax.plan.wire.payload import Payload
from dilocox_jax.pytypes import Array, Boolean, Index, Tree
from dilocox_jax.trees import all_finite, leaves_by_path


class CodecState(NamedTuple):
  """What codecs carry from one exchange of a fragment to the next.

  Attributes:
    count: Exchanges so far (int32 scalar); random keys follow from it.
    leaves: Every leaf's codec state by path.
  """

  count: Index
  leaves: dict[str, Tree]


class Exchange(NamedTuple):
  """Averages a tree over the replica axis and says what one's own part was.

  Attributes:
    init: From one fragment's parameters to the state.
    update: (values, whether this replica takes part, state) -> (mean, own,
      state), both float32 trees like the values.
  """

  init: Callable[[Tree], CodecState]
  update: Callable[[Tree, Boolean, CodecState], tuple[Tree, Tree, CodecState]]


@dataclasses.dataclass(frozen=True)
class Compression:
  """How values travel.

  Attributes:
    payload: What is sent.
    collective: By which operation (`plan.collectives.COLLECTIVES`).
    seed: Of random masks, starts and roundings.
    max_rank: Rank that low-rank states have room for; 0: the payload's own.
  """

  payload: Payload
  collective: str = "auto"
  seed: int = 0
  max_rank: int = 0


def compressed(how: Compression) -> Exchange:
  """Builds an exchange for use under the axis "replica".

  Args:
    how: Payload and collective.
  """

  def codecs(tree: Tree) -> dict[str, Codec]:
    return {
      path: codec(how.payload.at(path), leaf_of(path, leaf.shape), how.max_rank)
      for path, leaf in leaves_by_path(tree).items()
    }

  def init(params: Tree) -> CodecState:
    built = codecs(params)
    keys = split_keys(jax.random.key(how.seed), built)
    leaves = {path: built[path].init(keys[path]) for path in built}
    return CodecState(jnp.int32(0), leaves)

  def update(
    values: Tree, participates: Boolean, state: CodecState
  ) -> tuple[Tree, Tree, CodecState]:
    num_replicas = jax.lax.psum(1, REPLICA_AXIS)
    shared = jax.random.fold_in(jax.random.key(how.seed), state.count)
    # Masks must agree, roundings must not.
    own_number = jax.lax.axis_index(REPLICA_AXIS)

    def reduce(asked: dict[str, Array], built: dict[str, Codec], phase: int):
      keys = split_keys(jax.random.fold_in(shared, phase + 1), asked)
      outgoing = {
        path: transport.LeafMessage(
          values,
          *built[path].messages[phase],
          jax.random.fold_in(keys[path], own_number),
        )
        for path, values in asked.items()
      }
      return transport.reduce(
        outgoing, participates, num_replicas, how.collective
      )

    leaves = leaves_by_path(values)
    kept = {
      path: jnp.where(participates, leaf, jnp.zeros_like(leaf))
      for path, leaf in leaves.items()
    }
    ends = _run(codecs(values), kept, state.leaves, shared, reduce)
    mean = {path: reduced.mean for path, (reduced, _) in ends.items()}
    own = {path: reduced.own for path, (reduced, _) in ends.items()}
    states = {path: ends[path][1] for path in leaves}
    return (
      _like(values, mean),
      _like(values, own),
      CodecState(state.count + 1, states),
    )

  return Exchange(init, update)


def _run(
  built: dict[str, Codec], values: dict[str, Array], states, key, reduce
) -> dict[str, tuple[Reduced, Tree]]:
  """Takes every leaf's codec through its phases, all in step."""
  keys = split_keys(key, built)
  runs = {}
  for path, leaf in values.items():
    view = leaf.reshape(leaf_of(path, leaf.shape).stacked_shape)
    runs[path] = built[path].run(view, states[path], keys[path])
  asked = {path: next(run) for path, run in runs.items()}
  ends, phase = {}, 0
  while asked:
    answers = reduce(asked, built, phase)
    asked = {}
    for path, answer in answers.items():
      try:
        asked[path] = runs[path].send(answer)
      except StopIteration as stop:
        ends[path] = stop.value
    phase += 1
  return ends


def grams(state: CodecState) -> dict[str, Array]:
  """Factor products of the last mean, [num_layers, rank, rank], by path.

  Args:
    state: Of any payload; only low-rank leaves have factors.
  """
  return {
    path: leaf.gram
    for path, leaf in state.leaves.items()
    if isinstance(leaf, Factors)
  }


def _like(tree: Tree, leaves: dict[str, Array]) -> Tree:
  """Leaves by path in the structure and shapes of a tree."""
  shaped = [
    leaves[path].reshape(leaf.shape)
    for path, leaf in leaves_by_path(tree).items()
  ]
  return jax.tree.unflatten(jax.tree.structure(tree), shaped)


def finite_part(values: Tree) -> tuple[Tree, Boolean]:
  """The values, or zeros if any of them is not finite; and whether all are."""
  is_finite = all_finite(values)
  return jax.tree.map(
    lambda leaf: jnp.where(is_finite, leaf, jnp.zeros_like(leaf)), values
  ), is_finite
