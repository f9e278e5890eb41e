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

from dilocox_jax.aggregator import Aggregator, Averaged
from dilocox_jax.aggregators.collective import (
  Collective,
  Sender,
  chosen_collective,
)
from dilocox_jax.aggregators.means import mean_of_participants, summed
from dilocox_jax.aggregators.traffic import exchange_operations
from dilocox_jax.checks import require, within_limits
from dilocox_jax.codecs.base import Codec
from dilocox_jax.codecs.batching import are_finite
from dilocox_jax.codecs.low_rank import Factors, LowRank, grams
from dilocox_jax.codecs.named import named_codec
from dilocox_jax.codecs.quantize import Float
from dilocox_jax.coroutines import Coroutine, as_function
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.plan.choices import REFERENCES
from dilocox_jax.plan.collectives import AUTO, MAILBOX
from dilocox_jax.plan.overlap import stretch_ends
from dilocox_jax.plan.schedule.fragments import stacked_shape
from dilocox_jax.trees import (
  Array,
  Boolean,
  Index,
  Tree,
  leaves_by_path,
  shapes_by_path,
  widened,
)


def exchange(
  codec: Codec | str = "float32",
  *,
  feedback: float = 0.0,
  against: str = "own",
  keep_unsent: bool = False,
  collective: str | Collective = AUTO,
  seed: int = 0,
  axis_name: str = REPLICA_AXIS,
) -> Aggregator:
  """Averages encoded values over the replicas whose values are finite.

  Wire: bytes of the codec (`aggregators.sizes`) and one flag a message, which
  says whether its sender participates. A residual never leaves its replica.
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
      "all_reduce", "all_gather", "reduce_scatter", "pairs", a name of
      `dilocox_jax.register_collective`, or a `dilocox_jax.Collective`.
    seed: Seed of random masks, random pairs and first low-rank factors.
    axis_name: Axis over which replicas are mapped.

  Raises:
    ValueError: One line that names what does not fit.
  """
  codec = named_codec(codec) if isinstance(codec, str) else codec
  require(
    isinstance(codec, Codec),
    f"codec={codec!r} must be a codec, or names such as 'top_k+int(bits=2)'",
  )
  require(
    collective != MAILBOX,
    f"collective={collective!r} needs a place where replicas meet: take "
    "dilocox_jax.mailbox",
  )
  within_limits("feedback", feedback, at_least=0, at_most=1)
  within_limits("against", against, choices=REFERENCES)
  require(
    not (feedback and keep_unsent),
    "feedback and keep_unsent both make up for what a codec loses: set one",
  )
  chosen_collective(codec, collective, 2)  # Refuses what does not fit.
  if codec == Float() and collective == AUTO and not feedback:
    return mean_of_finite_replicas(axis_name)
  compressed = CompressedMean(
    codec=codec,
    feedback=feedback,
    against=against,
    keep_unsent=keep_unsent,
    collective=collective,
    seed=seed,
    axis_name=axis_name,
  )
  return compressed.aggregator


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

  def average(values: Tree, state: Tree, params: Tree = None) -> Coroutine:
    del params
    finite, is_finite = yield _finite_part(widened(values))
    totals, count = yield summed(finite, is_finite, axis_name)
    divided = functools.partial(mean_of_participants, count=count)
    mean = optax.tree.cast_like(jax.tree.map(divided, totals), values)
    return Averaged(mean=mean, sent=values, state=state)

  return Aggregator(lambda params: optax.EmptyState(), as_function(average))


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
  """The functions of an `exchange` with a codec, and its arguments."""

  codec: Codec
  feedback: float
  against: str
  keep_unsent: bool
  collective: str | Collective
  seed: int
  axis_name: str

  @property
  def aggregator(self) -> Aggregator:
    """These functions as an `Aggregator`."""
    any_number = 2  # Of replicas; all collectives of "auto" share the mean.
    collective = chosen_collective(self.codec, self.collective, any_number)
    return Aggregator(
      init=self.init,
      average=as_function(self.average),
      # Each replica has its own residual, and all have the rest alike.
      axes=ExchangeState(None, None, residual=0),  # pyright: ignore
      observe=self.observe,
      stretch_ends=self.stretch_ends,
      is_shared=collective.is_shared,
    )

  def init(self, params: Tree) -> ExchangeState:
    """Returns the first state of a fragment."""
    leaves = _stacked(params)
    shapes = [leaf.shape for leaf in leaves.values()]
    states = self.codec.init(shapes, jax.random.key(self.seed))
    residual = None
    if self.feedback:
      residual = jax.tree.map(jnp.zeros_like, widened(params))
    return ExchangeState(
      count=jnp.int32(0),
      codec=dict(zip(leaves, states, strict=True)),
      residual=residual,
    )

  def average(
    self, values: Tree, state: ExchangeState, params: Tree = None
  ) -> Coroutine:
    """Averages values and what was held back of those before.

    Error feedback holds back what the codec loses of them. With `keep_unsent`
    it stays with the replica instead.

    Args:
      values: Values of this replica.
      state: State of the exchange before.
      params: Parameters that the values belong to, which are read if they are
        averaged too; None if the values belong to none.

    Returns:
      A generator that returns `Averaged`.
    """
    if self._sends_parameters and params is not None:
      moved = jax.tree.map(jnp.subtract, values, params)
      averaged = yield from self.average(moved, state)
      return averaged._replace(
        mean=jax.tree.map(jnp.add, averaged.mean, params),
        sent=jax.tree.map(jnp.add, averaged.sent, params),
      )
    corrected = values
    if self.feedback:
      corrected = jax.tree.map(jnp.add, widened(values), state.residual)
    # The sum is checked, not the values: 3e38 + 3e38 is no fp32 number, and a
    # residual that has left fp32's range would never come back.
    finite, is_finite = _finite_part(corrected)
    mean, own, codec = yield from self._exchanged(finite, is_finite, state)

    def lost(value: Array, received: Array) -> Array:
      rest = self.feedback * (value - received.astype(value.dtype))
      return jnp.where(is_finite, rest, jnp.zeros_like(rest))

    residual = None
    if self.feedback:
      received = own if self.against == "own" else mean
      # Where all is finite `finite` is `corrected`; to keep both takes memory
      # while inner steps run.
      residual = jax.tree.map(lost, finite, received)
    # A replica that was left out reports NaN, so that its drift is not finite
    # and the host learns of it.
    sent = jax.tree.map(lambda leaf: jnp.where(is_finite, leaf, jnp.nan), own)
    sent = optax.tree.cast_like(sent, values)
    retained = None
    if self.keep_unsent:
      retained = jax.tree.map(jnp.subtract, values, sent)
    return Averaged(
      mean=optax.tree.cast_like(mean, values),
      sent=sent,
      state=ExchangeState(state.count + 1, codec, residual),
      retained=retained,
    )

  def _exchanged(
    self, values: Tree, participates: Boolean, state: ExchangeState
  ) -> Coroutine:
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
    sender = Sender(
      participates=participates,
      key=key,
      axis_name=self.axis_name,
      shares_add_up=self.keep_unsent
      or (self.feedback > 0 and self.against == "own"),
    )
    collective = self._chosen()

    def reduce(leaves: list[Array]) -> Coroutine:
      return collective.reduce(self.codec.encoder, leaves, sender)

    leaves = _stacked(values)
    (mean, own), states = yield from self.codec.run(
      list(leaves.values()), [state.codec[path] for path in leaves], key, reduce
    )
    return (
      _like(values, dict(zip(leaves, mean, strict=True))),
      _like(values, dict(zip(leaves, own, strict=True))),
      dict(zip(leaves, states, strict=True)),
    )

  def _chosen(self) -> Collective:
    """Returns the collective, which "auto" chooses by the axis of replicas."""
    num_replicas = 0
    if self.collective == AUTO:
      num_replicas = jax.lax.axis_size(self.axis_name)
    return chosen_collective(self.codec, self.collective, num_replicas)

  @property
  def _sends_parameters(self) -> bool:
    """Whether outer parameters are averaged with the values.

    What is sent of a pseudo-gradient d = a - w is then d - a = -w, the inner
    parameters. The mean of these plus a is a minus the mean of all w: the mean
    pseudo-gradient, and the distance of a from the mean of all a. It costs no
    byte, but a codec would have to code whole parameters.
    """
    any_number = 2  # Of replicas; no collective of "auto" does so.
    collective = chosen_collective(self.codec, self.collective, any_number)
    return collective.averages_parameters and self.codec == Float()

  def observe(self, state: ExchangeState) -> dict[str, Array]:
    """Returns what the host records of a state (`codecs.low_rank.grams`)."""
    if not isinstance(self.codec, LowRank):
      return {}
    factors = {
      path: own for path, own in state.codec.items() if isinstance(own, Factors)
    }
    return grams(factors, self.codec.rank)

  def stretch_ends(self, params: Tree) -> tuple[int, ...]:
    """Returns `Aggregator.stretch_ends` of a fragment."""
    num_replicas = jax.lax.axis_size(self.axis_name)
    operations = exchange_operations(
      self.codec,
      shapes_by_path(params),
      num_replicas,
      collective=self.collective,
    )
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
