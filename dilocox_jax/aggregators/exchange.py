"""What replicas average: values as they are, or what a codec leaves of them.

All leaves of one message travel together, and a codec may need several in turn
(`codecs.base`). Two leaves, "bias" and "kernel", as low-rank factors:

    message  it carries                     the codec goes on with
    0        bias, left factor of kernel    their means: an orthonormal basis
    1        right factor of kernel         its mean: the result

Error feedback adds what an exchange lost to the next one. A replica sends
C(d + e) and keeps e <- decay (d + e - R), where d is its new value, e the
residual, C the codec, and R what was received: of this replica ("own"), or the
mean that all received ("mean"). Both are in the literature. "own" keeps every
replica's own deviation exactly. Where a replica rounds the mean of a slice and
sends it on, R has what this lost as well. "mean" carries the replicas'
disagreement along.

A codec that rounds to whole numbers, d = 0.4 in every exchange, decay 1:

    exchange    d + e    sent    e after
    1           0.4      0       0.4
    2           0.8      1      -0.2
    3           0.2      0       0.2
    4           0.6      1      -0.4
    5           0.0      0       0.0     2 sent of 5 * 0.4 = 2
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.aggregators import transport
from dilocox_jax.aggregators.collectives import chosen_collective, collectives
from dilocox_jax.checks import require, within_limits
from dilocox_jax.codecs.base import Codec
from dilocox_jax.codecs.joining import are_finite
from dilocox_jax.codecs.low_rank import Factors, LowRank, grams
from dilocox_jax.codecs.named import named_codec
from dilocox_jax.codecs.quantize import Float
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.plan.choices import REFERENCES
from dilocox_jax.plan.collective import stretch_ends
from dilocox_jax.plan.schedule.fragments import stacked_shape
from dilocox_jax.trees import (
  Aggregator,
  Array,
  Boolean,
  Index,
  Pausing,
  Tree,
  leaves_by_path,
  shapes_by_path,
  widened,
  without_pauses,
)


def exchange(
  codec: Codec | str = "float32",
  *,
  feedback: float = 0.0,
  against: str = "own",
  keep_unsent: bool = False,
  collective: str = "auto",
  seed: int = 0,
  axis_name: str = REPLICA_AXIS,
  is_carried: bool = False,
) -> Aggregator:
  """Averages encoded values over the replicas whose values are finite.

  Wire: bytes of the codec (`aggregators.collectives`) and one flag a message,
  which says whether its sender participates. A residual never leaves its
  replica.
  Source: Seide et al., 2014, for error feedback; Karimireddy et al., 2019,
  arXiv 1901.09847, for its convergence; DiLoCoX, arXiv 2506.21263, Algorithm
  2, against the mean; SparseLoCo, arXiv 2508.15706, with decay against the
  replica's own; 1-bit Adam, Tang et al., 2021, arXiv 2102.02888, for feedback
  on the mean that a reduce-scatter rounds ("server error" there).
  Differs: a replica that is not finite loses its residual, and nobody makes up
  for the mean that it rounds while it is left out. What rounding a mean lost
  has no array of its own: the owner of a slice sends its own values there to
  nobody, so it owes nothing else there.

  Args:
    codec: What is sent, e.g. "low_rank(rank=16)+int(bits=4)", or a codec.
    feedback: Share of what the codec lost that is added to the next exchange,
      0 (none) to 1 (all).
    against: What the residual is measured against, "own" or "mean".
    keep_unsent: Whether what the codec lost stays in the replica's parameters
      instead, where the next pseudo-gradient finds it.
    collective: What carries the messages: "auto" (the fewest bytes),
      "all_reduce", "all_gather" or "reduce_scatter".
    seed: Seed of random masks and first low-rank factors.
    axis_name: Axis over which replicas are mapped.
    is_carried: Whether the host carries the messages (`mailbox`).

  Raises:
    ValueError: One line that names what does not fit.
  """
  codec = named_codec(codec) if isinstance(codec, str) else codec
  require(
    isinstance(codec, Codec),
    f"codec={codec!r} must be a codec, or names such as 'top_k+int(bits=2)'",
  )
  chosen_collective(codec, collective, 2)
  within_limits("feedback", feedback, at_least=0, at_most=1)
  within_limits("against", against, choices=REFERENCES)
  require(
    not (feedback and keep_unsent),
    "feedback and keep_unsent both make up for what a codec loses: set one",
  )
  if (codec, collective, feedback, is_carried) == (Float(), "auto", 0, False):
    return mean_of_finite_replicas(axis_name)._replace(keep_unsent=keep_unsent)
  made = CompressedMean(
    *(codec, feedback, against, collective, seed, axis_name, is_carried),
    shares_add_up=keep_unsent or (feedback > 0 and against == "own"),
  )
  return Aggregator(
    made.init,
    without_pauses(made.average),
    # Each replica has its own residual, and all have the rest alike.
    ExchangeState(None, None, residual=0),  # pyright: ignore
    made.observe,
    stretch_ends=None if is_carried else made.stretch_ends,
    keep_unsent=keep_unsent,
  )


def mean_of_finite_replicas(axis_name: str = REPLICA_AXIS) -> Aggregator:
  """Averages over the replicas whose values are all finite, without a codec.

  A replica that has diverged is left out of the mean, so that it cannot spoil
  the others; its `sent` stays not finite, which shows in the drift. If no
  replica is finite, the mean is zero. Sums run in fp32, or in the values' own
  type if that is wider.

  Wire: 4 bytes a value, and 4 for the count of participants, in an all-reduce.

  Args:
    axis_name: Axis over which replicas are mapped.

  Returns:
    An `Aggregator` without state, for use under that axis.
  """

  def average(values: Tree, state: Tree, params: Tree = None) -> Pausing:
    del params
    finite, is_finite = yield _finite_part(widened(values))
    totals, count = yield transport.summed(finite, is_finite, axis_name)
    divided = functools.partial(transport.mean_of_participants, count=count)
    mean = optax.tree.cast_like(jax.tree.map(divided, totals), values)
    return mean, values, state

  return Aggregator(lambda params: optax.EmptyState(), without_pauses(average))


class ExchangeState(NamedTuple):
  """State of a compressed exchange of one fragment, for one replica.

  Attributes:
    count: Exchanges so far (int32 scalar); random keys follow from it.
    codec: Codec state of every leaf by path.
    residual: What was not sent yet, a tree like the fragment in fp32 or wider:
      in bfloat16 a residual of 1 would not grow by 0.001. None without
      feedback.
  """

  count: Index
  codec: dict[str, Tree]
  residual: Tree


@dataclasses.dataclass(frozen=True)
class CompressedMean:
  """The functions of an `exchange` with a codec; its fields are those there.

  Attributes:
    shares_add_up: Whether `own` also has what this replica lost when it rounded
      a mean that it sent on, as after a reduce-scatter. Error feedback then
      makes up for both roundings.
  """

  codec: Codec
  feedback: float
  against: str
  collective: str
  seed: int
  axis_name: str
  is_carried: bool
  shares_add_up: bool

  def init(self, params: Tree) -> ExchangeState:
    """Returns the first state of a fragment."""
    leaves, residual = _stacked(params), None
    shapes = [leaf.shape for leaf in leaves.values()]
    states = self.codec.init(shapes, jax.random.key(self.seed))
    if self.feedback:
      residual = jax.tree.map(jnp.zeros_like, widened(params))
    codec = dict(zip(leaves, states, strict=True))
    return ExchangeState(jnp.int32(0), codec, residual)

  def average(
    self, values: Tree, state: ExchangeState, params: Tree = None
  ) -> Pausing:
    """Averages what is wanted, and keeps what of it was not sent."""
    del params
    wanted = values
    if self.feedback:
      wanted = jax.tree.map(jnp.add, widened(values), state.residual)
    # The sum is checked, not the values: 3e38 + 3e38 is no fp32 number, and a
    # residual that has left fp32's range would never come back.
    sent, is_finite = _finite_part(wanted)
    mean, own, codec = yield from self._exchanged(sent, is_finite, state)

    def owed(want: Array, got: Array) -> Array:
      rest = self.feedback * (want - got.astype(want.dtype))
      return jnp.where(is_finite, rest, jnp.zeros_like(rest))

    residual = None
    if self.feedback:
      received = own if self.against == "own" else mean
      # Where all is finite `sent` is `wanted`; to keep both takes memory while
      # inner steps run.
      residual = jax.tree.map(owed, sent, received)
    mean = optax.tree.cast_like(mean, values)
    # A replica that was left out reports NaN, so that its drift is not finite
    # and the host learns of it.
    own = jax.tree.map(lambda leaf: jnp.where(is_finite, leaf, jnp.nan), own)
    own = optax.tree.cast_like(own, values)
    return mean, own, ExchangeState(state.count + 1, codec, residual)

  def _exchanged(
    self, values: Tree, participates: Boolean, state: ExchangeState
  ) -> Pausing:
    """Averages finite values, message by message.

    Args:
      values: Values of this replica; zeros if it does not participate.
      participates: Whether this replica is counted in the mean.
      state: State of the exchange before.

    Returns:
      A generator that returns the mean, what the others received of this
      replica's values, both float32 trees like the values, and the new state of
      the codec.
    """
    key = jax.random.fold_in(jax.random.key(self.seed), state.count)

    reduce = functools.partial(
      transport.reduce,
      *(self.codec.encoder, participates, self.collective, self.axis_name),
      *(self.shares_add_up, self.is_carried),
    )
    leaves = _stacked(values)
    states = [state.codec[path] for path in leaves]
    given = list(leaves.values()), states, key, reduce
    (mean, own), states = yield from self.codec.run(*given)
    mean, own, codec = (
      dict(zip(leaves, each, strict=True)) for each in (mean, own, states)
    )
    return _like(values, mean), _like(values, own), codec

  def observe(self, state: ExchangeState) -> dict[str, Array]:
    """Returns what the host records of a state (`codecs.low_rank.grams`)."""
    if not isinstance(self.codec, LowRank):
      return {}
    leaves = state.codec.items()
    factors = {path: own for path, own in leaves if isinstance(own, Factors)}
    return grams(factors, self.codec.rank)

  def stretch_ends(self, params: Tree) -> tuple[int, ...]:
    """Returns `Aggregator.stretch_ends` of a fragment."""
    num_replicas = jax.lax.axis_size(self.axis_name)
    shapes = shapes_by_path(params)
    operations = collectives(self.codec, shapes, num_replicas, self.collective)
    return stretch_ends(operations, num_replicas)


def _finite_part(values: Tree) -> tuple[Tree, Boolean]:
  """Returns the values, or zeros if one is not finite; and whether all are."""
  is_finite = are_finite(values)
  zeros = optax.tree.zeros_like(values)
  return optax.tree.where(is_finite, values, zeros), is_finite


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
