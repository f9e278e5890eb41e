"""The compressed exchange: codecs, transport, and their state.

One leaf's codec knows nothing of the other leaves. Here all codecs run in step
with each other, so that what they send at one time is one message. A replica
whose values are not finite sends zeros and is not counted.

How the codecs run in step: a codec is a generator (`codecs.base`). It yields
dense values, which the exchange encodes, averages over replicas and sends back
into it, and in the end it returns the averaged leaf. Two leaves, "bias" in int4
(one message) and "kernel" as low-rank factors (two messages):

    step  bias yields    kernel yields       one message carries
    0     its values     left factor         both, encoded
    1     (has ended)    right factor        the right factor alone
    2                    (has ended)

Generators run while the program is traced. The compiled program holds only the
operations in this order.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.codecs.base import Codec, CodecSteps, split_keys
from dilocox_jax.codecs.compose import codec
from dilocox_jax.codecs.low_rank import Factors
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.exchange import transport
from dilocox_jax.plan.wire.collectives import collectives, stretch_ends
from dilocox_jax.plan.wire.leaf import leaf_of
from dilocox_jax.plan.wire.payload import Payload
from dilocox_jax.pytypes import Array, Boolean, Index, Pausing, Tree
from dilocox_jax.trees import leaves_by_path, shapes_by_path


class CodecState(NamedTuple):
  """State that codecs carry from one exchange of a fragment to the next.

  Attributes:
    count: Exchanges so far (int32 scalar); random keys follow from it.
    leaves: Codec state of every leaf by path.
  """

  count: Index
  leaves: dict[str, Tree]


class Exchange(NamedTuple):
  """Averages a tree over the replica axis.

  Attributes:
    init: Function from one fragment's parameters to the state.
    update: Function (values, whether this replica participates, state) ->
      (mean, own, state). `own` is what the others received of this replica's
      values; both are float32 trees like the values. It is a generator that
      pauses as `Aggregator.paused` does.
    stretch_ends: As in `Aggregator`.
  """

  init: Callable[[Tree], CodecState]
  update: Callable[[Tree, Boolean, CodecState], Pausing]
  stretch_ends: Callable[[Tree], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Compression:
  """How values travel.

  Attributes:
    payload: Codec of every leaf.
    collective: Operation that carries them, one of
      `plan.wire.collectives.COLLECTIVES`.
    seed: Integer seed of random masks, first low-rank factors and stochastic
      rounding.
    max_rank: Columns that low-rank states have room for; 0 means the
      payload's rank.
    axis_name: Axis over which replicas are mapped.
    follows_rank: Whether the rank of later rounds follows the measured one, so
      that the host needs Gram matrices however large they are (`grams`).
    keep_unsent: Whether replicas keep in their parameters what is missing from
      their own parts of the mean, as `OuterStep` lets them.
  """

  payload: Payload
  collective: str = "auto"
  seed: int = 0
  max_rank: int = 0
  axis_name: str = REPLICA_AXIS
  follows_rank: bool = False
  keep_unsent: bool = False


def compressed(
  compression: Compression, shares_add_up: bool = False
) -> Exchange:
  """Builds an exchange for use under the axis "replica".

  Wire: bytes of the payload (`plan.wire.traffic`) and one flag a message,
  which says whether its sender participates. A leaf of zero size costs nothing.

  Args:
    compression: Payload and collective.
    shares_add_up: Whether `own` also has what this replica lost when it rounded
      a mean that it sent on, as after a reduce-scatter. Error feedback then
      makes up for both roundings.
  """
  payload, max_rank = compression.payload, compression.max_rank
  axis_name = compression.axis_name

  def codecs_of(tree: Tree) -> dict[str, Codec]:
    return {
      path: codec(payload, leaf_of(path, leaf.shape), max_rank)
      for path, leaf in leaves_by_path(tree).items()
      if leaf.size
    }

  def init(params: Tree) -> CodecState:
    codecs = codecs_of(params)
    keys = split_keys(jax.random.key(compression.seed), codecs)
    leaves = {path: codecs[path].init(keys[path]) for path in codecs}
    return CodecState(jnp.int32(0), leaves)

  def update(values: Tree, participates: Boolean, state: CodecState) -> Pausing:
    codecs = codecs_of(values)
    # All replicas must draw the same mask, so codecs get the shared key. Each
    # must round by itself, so encoders get a key of the replica.
    shared_key = jax.random.key(compression.seed)
    shared_key = jax.random.fold_in(shared_key, state.count)
    replica = jax.lax.axis_index(axis_name)

    def reduce(yielded: dict[str, Array], step: int) -> Pausing:
      step_key = jax.random.fold_in(shared_key, step + 1)
      keys = split_keys(step_key, yielded)
      outgoing = {
        path: transport.LeafMessage(
          dense,
          *codecs[path].messages[step],
          jax.random.fold_in(keys[path], replica),
        )
        for path, dense in yielded.items()
      }
      return transport.reduce(
        outgoing,
        participates,
        compression.collective,
        axis_name,
        shares_add_up,
      )

    leaves = leaves_by_path(values)
    keys = split_keys(shared_key, codecs)
    runs = {}
    for path in codecs:
      leaf = leaves[path]
      sent = jnp.where(participates, leaf, jnp.zeros_like(leaf))
      stacked = sent.reshape(leaf_of(path, leaf.shape).stacked_shape)
      runs[path] = codecs[path].run(stacked, state.leaves[path], keys[path])
    ends = yield from _run_in_step(runs, reduce)
    mean = _like(values, {path: ends[path][0].mean for path in ends})
    own = _like(values, {path: ends[path][0].own for path in ends})
    new_leaves = {path: ends[path][1] for path in codecs}
    return mean, own, CodecState(state.count + 1, new_leaves)

  def ends_of(params: Tree) -> tuple[int, ...]:
    num_replicas = jax.lax.axis_size(axis_name)
    operations = collectives(
      payload, shapes_by_path(params), num_replicas, compression.collective
    )
    return stretch_ends(operations, num_replicas)

  return Exchange(init, update, ends_of)


def _run_in_step(
  runs: dict[str, CodecSteps],
  reduce: Callable[[dict[str, Array], int], Pausing],
) -> Pausing:
  """Runs the codecs of all leaves, each step of all of them together.

  Args:
    runs: Codec generator of every leaf by path, not started yet.
    reduce: Generator (values by path, step number) -> their means by path.

  Returns:
    For every leaf what its generator returns: the reduced values and the new
    codec state.
  """
  yielded = {path: next(run) for path, run in runs.items()}
  ends, step = {}, 0
  while yielded:
    results = yield from reduce(yielded, step)
    yielded = {}
    for path, result in results.items():
      # A codec answers with its next values, or ends with its return value.
      try:
        yielded[path] = runs[path].send(result)
      except StopIteration as stop:
        ends[path] = stop.value
    step += 1
  return ends


# Factor products that the host is given after an exchange, at most. All those
# of a model of 1.3 billion parameters at rank 64 are 2 MB. Of 107 billion at
# rank 2048 they are 6.6 GB, and their eigenvalues take minutes.
MAX_OBSERVED_BYTES = 64 * 2**20


def grams(state: CodecState, follows_rank: bool = False) -> dict[str, Array]:
  """Returns factor products of the last mean by path, for the host.

  Of large ones it returns those of a few layers, evenly spread and scaled so
  that their sum over layers stays what it was, or none at all.

  Args:
    state: State of any payload. Only low-rank leaves have factors.
    follows_rank: Whether at least one layer of every leaf is needed.

  Returns:
    Arrays [layers, rank, rank]; see `codecs.low_rank.Factors`.
  """
  found = {
    path: leaf.gram
    for path, leaf in state.leaves.items()
    if isinstance(leaf, Factors)
  }
  one_layer = sum(gram.nbytes // len(gram) for gram in found.values())
  most = MAX_OBSERVED_BYTES // one_layer if found else 0
  most = max(most, int(follows_rank))
  return {p: _some_layers(gram, most) for p, gram in found.items() if most}


def _some_layers(gram: Array, most: int) -> Array:
  num_layers = len(gram)
  if num_layers <= most:
    return gram
  numbers = np.arange(most) * num_layers // most
  return gram[numbers] * (num_layers / most)


def _like(tree: Tree, leaves: dict[str, Array]) -> Tree:
  """Puts leaves by path into the structure and shapes of a tree.

  Leaves without values were not sent: all replicas have the same.
  """
  shaped = [
    leaves.get(path, jnp.zeros(0, jnp.float32)).reshape(shape)
    for path, shape in shapes_by_path(tree).items()
  ]
  return jax.tree.unflatten(jax.tree.structure(tree), shaped)
