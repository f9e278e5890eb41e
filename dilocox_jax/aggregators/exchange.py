"""Averages values over replicas, with or without a codec and error feedback.

Error feedback keeps what one exchange lost as a residual, and adds the residual
to the values of the next exchange. A replica with the new value d and the
residual e sends C(d + e), where C is the codec. Its new residual is

    e <- feedback * (d + e - R)

- With `against="own"`, R is C(d + e) as the other replicas decode it. So the
  residual is the replica's own loss. If the replica also rounds the mean of a
  slice (`aggregators.reduce_scatter`), the residual contains this loss, too.
- With `against="mean"`, R is the mean that the replica gets. So the residual
  also holds the difference between this replica and the mean.

Example with `against="own"`: a codec rounds to whole numbers, d = 0.4 in every
exchange, and feedback is 1:

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
from dilocox_jax.checks import of_type, require, within_limits
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
  """Returns an aggregator that encodes values and averages them.

  It leaves a replica whose values are not all finite out of the mean.

  Wire: the bytes of the codec (`aggregators.sizes`), and a few bytes that say
  whether the sender's values are finite.
  Source: Seide et al., 2014, for error feedback; Karimireddy et al., 2019,
  arXiv 1901.09847, for its convergence; DiLoCoX, arXiv 2506.21263, Algorithm 2,
  against the mean; SparseLoCo, arXiv 2508.15706, with decay against the
  replica's own; 1-bit Adam, Tang et al., 2021, arXiv 2102.02888, for feedback
  on the mean that a reduce-scatter rounds ("server error" there).
  Differs: 1-bit Adam keeps the loss from rounding a slice of the mean in a
  separate array. Here this loss goes into the residual of the replica that
  rounds the slice. A replica whose values are not finite loses its residual,
  and this loss with it.

  Args:
    codec: A codec, or its name, e.g. "low_rank(rank=16)+int(bits=4)".
    feedback: Fraction of the loss (see `against`) that error feedback adds to
      the values of the next exchange, 0 (none) to 1 (all).
    against: Says what the loss is: the values that a replica encodes minus R.
      "own": R is these values as the other replicas decode them. "mean": R is
      the mean that the replica gets.
    keep_unsent: Whether the codec's loss stays in the replica's parameters, so
      that the next pseudo-gradient contains it. It needs `feedback` = 0, and a
      method that allows it (`Method.can_keep_unsent`).
    collective: How messages become a mean: "auto" (the fewest bytes),
      "all_reduce", "all_gather", "reduce_scatter", "pairs", a name of
      `dilocox_jax.register_collective`, or a `dilocox_jax.Collective`.
    seed: Seed of random masks, random pairs and the first low-rank factors.
    axis_name: Name of the axis over which replicas are mapped.

  Raises:
    ValueError: One line that names the argument, if an argument is wrong, or if
      two do not fit each other.
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
  # With 64-bit types, a scalar of numpy would widen the residual.
  feedback = float(feedback)
  seed = of_type("seed", seed, int)
  within_limits("against", against, choices=REFERENCES)
  require(
    not (feedback and keep_unsent),
    "feedback and keep_unsent both make up for what a codec loses: set one",
  )
  # This raises an error if the codec and the collective do not fit each other.
  chosen_collective(codec, collective, 2)
  is_plain_mean = codec == Float() and collective == AUTO and not feedback
  if is_plain_mean:
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
  """Returns an aggregator that averages by an all-reduce, without a codec.

  It averages over the replicas whose values are all finite; if there are none,
  the mean is zero. Sums are computed in fp32, or in the dtype of the values if
  that is wider. The aggregator has no state.

  Wire: 4 bytes for each value and 4 for the number of participants (8 and 8 if
  values are fp64), in one all-reduce.

  Args:
    axis_name: Name of the axis over which replicas are mapped.
  """

  def average(values: Tree, state: Tree, params: Tree = None) -> Coroutine:
    del params
    # The first `yield` comes before the message leaves, the second one before
    # the received arrays are used. So the caller can run inner steps while the
    # message travels. It gives the yielded arrays back (`coroutines`).
    finite, is_finite = yield _finite_part(widened(values))
    totals, count = yield summed(finite, is_finite, axis_name)
    divided = functools.partial(mean_of_participants, count=count)
    mean = optax.tree.cast_like(jax.tree.map(divided, totals), values)
    return Averaged(mean=mean, sent=values, state=state)

  return Aggregator(lambda params: optax.EmptyState(), as_function(average))


class ExchangeState(NamedTuple):
  """State of a compressed exchange of one fragment, for one replica.

  A fragment is a part of the parameters.

  Attributes:
    count: Number of exchanges so far (int32 scalar). The random key of an
      exchange depends on it.
    codec: State of the codec for every leaf that is not empty, by path.
    residual: Values that error feedback holds back for the next exchange, a
      tree like the fragment in fp32 or wider; None without feedback.
  """

  count: Index
  codec: dict[str, Tree]
  residual: Tree


@dataclasses.dataclass(frozen=True)
class CompressedMean:
  """Implements the aggregator of `exchange`, except for the plain fp32 mean.

  The fields are the checked arguments of `exchange`; `codec` is never a name.
  """

  codec: Codec
  feedback: float
  against: str
  keep_unsent: bool
  collective: str | Collective
  seed: int
  axis_name: str

  @property
  def aggregator(self) -> Aggregator:
    """The methods of this object as an `Aggregator`."""
    # The number of replicas is not known yet. Any number gives the right
    # `is_shared`: every collective that "auto" may choose gives all replicas
    # the same mean.
    collective = chosen_collective(self.codec, self.collective, num_replicas=2)
    return Aggregator(
      init=self.init,
      average=as_function(self.average),
      # Each replica has its own residual, and all share the rest.
      axes=ExchangeState(None, None, residual=0),  # pyright: ignore
      observe=self.observe,
      stretch_ends=self.stretch_ends,
      is_shared=collective.is_shared,
    )

  def init(self, params: Tree) -> ExchangeState:
    """Returns the state before the first exchange of some parameters."""
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
    """Averages the corrected values (values plus residual) over replicas.

    With error feedback, the new residual is `feedback` times the loss. The loss
    is the corrected values minus what the others decode. With `against="mean"`
    it is the corrected values minus the mean. With `keep_unsent`,
    `Averaged.retained` is the values minus `Averaged.sent`.

    If a corrected value is not finite, the replica does not count in the mean.
    Its new residual is zero, and its `Averaged.sent` is NaN.

    Args:
      values: Values of this replica, a tree like the argument of `init`.
      state: State that the previous exchange returned, or the initial state.
      params: Outer parameters from which the values were measured. Without a
        codec, a collective with `averages_parameters` averages them, too. None:
        there are none.

    Returns:
      A coroutine that returns `Averaged`.
    """
    if self._sends_parameters and params is not None:
      # Send the pseudo-gradient minus the outer parameters, and add the outer
      # parameters of this replica to the mean (`_sends_parameters`).
      shifted = jax.tree.map(jnp.subtract, values, params)
      averaged = yield from self.average(shifted, state)
      return averaged._replace(
        mean=jax.tree.map(jnp.add, averaged.mean, params),
        sent=jax.tree.map(jnp.add, averaged.sent, params),
      )
    corrected = values
    if self.feedback:
      corrected = jax.tree.map(jnp.add, widened(values), state.residual)
    # Check the sum, because finite values and a finite residual may add up to
    # infinity: 3e38 + 3e38 is too large for fp32.
    finite, is_finite = _finite_part(corrected)
    mean, own, codec = yield from self._exchange_messages(
      finite, is_finite, state
    )

    def new_residual(value: Array, received: Array) -> Array:
      loss = self.feedback * (value - received.astype(value.dtype))
      return jnp.where(is_finite, loss, jnp.zeros_like(loss))

    residual = None
    if self.feedback:
      received = own if self.against == "own" else mean
      # If all is finite, `finite` equals `corrected`; otherwise the residual is
      # 0. Reading `corrected` here would keep both in memory while inner steps
      # run.
      residual = jax.tree.map(new_residual, finite, received)
    # `sent` of a replica that was left out is NaN, so that its recorded drift
    # is not finite, which the host notices.
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

  def _exchange_messages(
    self, values: Tree, participates: Boolean, state: ExchangeState
  ) -> Coroutine:
    """Averages finite values, message by message.

    Returns a coroutine that returns a tuple: the mean, this replica's values as
    the others decode them (both float32 trees like the values), and the new
    state of the codec by path.
    """
    key = jax.random.fold_in(jax.random.key(self.seed), state.count)
    makes_up_for_own_loss = self.keep_unsent or (
      self.feedback > 0 and self.against == "own"
    )
    # With some collectives a replica also rounds a slice of the mean, which
    # loses something, too. A replica that makes up for its own loss must also
    # make up for that loss (`shares_add_up`).
    sender = Sender(
      participates=participates,
      key=key,
      axis_name=self.axis_name,
      shares_add_up=makes_up_for_own_loss,
    )
    collective = self._chosen_collective()

    # Averages the leaves of one message. The codec calls it for each message.
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

  def _chosen_collective(self) -> Collective:
    """Returns the collective that averages the messages.

    With "auto", call this method where the replica axis is mapped.
    """
    num_replicas = 0  # Not read if the collective is named.
    if self.collective == AUTO:
      num_replicas = jax.lax.axis_size(self.axis_name)
    return chosen_collective(self.codec, self.collective, num_replicas)

  @property
  def _sends_parameters(self) -> bool:
    """Whether outer parameters are averaged together with the values.

    Let a be a replica's outer parameters and w its trained parameters, so the
    pseudo-gradient is d = a - w. The replica then sends -w, and adds a to the
    mean of the messages. The result is the mean pseudo-gradient, plus the
    distance of a from the mean of all a:

        a - mean(w) = mean(d) + (a - mean(a))

    This takes no extra bytes. With a codec it is not done.
    """
    # A codec would have to encode whole parameters.
    # "auto" never chooses a collective that averages parameters, so the number
    # of replicas does not matter here.
    collective = chosen_collective(self.codec, self.collective, num_replicas=2)
    return collective.averages_parameters and self.codec == Float()

  def observe(self, state: ExchangeState) -> dict[str, Array]:
    """Returns Gram matrices of the last averaged update, to be recorded.

    The result is that of `codecs.low_rank.grams`, by path of the leaf; {} if
    the codec is no `LowRank`.
    """
    if not isinstance(self.codec, LowRank):
      return {}
    factors = {
      path: leaf_state
      for path, leaf_state in state.codec.items()
      if isinstance(leaf_state, Factors)
    }
    return grams(factors, self.codec.rank)

  def stretch_ends(self, params: Tree) -> tuple[int, ...]:
    """Divides the inner steps during an exchange among its turns, by bytes.

    A turn has the messages that can travel at the same time. A message that
    needs the result of an earlier one belongs to a later turn. Call this method
    where the replica axis is mapped.

    Args:
      params: Parameters of which the exchange averages pseudo-gradients.

    Returns:
      Where the steps of each turn end, in 1024ths of all steps. For example,
      turns of 3 MB and 1 MB give (768, 1024).
    """
    num_replicas = jax.lax.axis_size(self.axis_name)
    operations = exchange_operations(
      self.codec,
      shapes_by_path(params),
      num_replicas,
      collective=self.collective,
    )
    return stretch_ends(operations, num_replicas)


def _finite_part(values: Tree) -> tuple[Tree, Boolean]:
  """Returns (values, True), or (zeros, False) if a value is not finite."""
  is_finite = are_finite(values)
  zeros = optax.tree.zeros_like(values)
  return optax.tree.where(is_finite, values, zeros), is_finite


def _stacked(tree: Tree) -> dict[str, Array]:
  """Returns the non-empty leaves by path, each as [num_layers, *shape].

  A leaf outside the stack of layers becomes [1, ...].
  """
  return {
    path: leaf.reshape(stacked_shape(path, leaf.shape))
    for path, leaf in leaves_by_path(tree).items()
    if leaf.size
  }


def _like(tree: Tree, leaves: dict[str, Array]) -> Tree:
  """Puts leaves back into the structure of a tree; reverses `_stacked`."""
  shaped = [
    leaves.get(path, jnp.zeros(0, jnp.float32)).reshape(shape)
    for path, shape in shapes_by_path(tree).items()
  ]
  return jax.tree.unflatten(jax.tree.structure(tree), shaped)
