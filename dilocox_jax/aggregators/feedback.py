"""Error feedback: what an exchange lost is added to the next one.

A replica sends C(d + e) and keeps e <- decay (d + e - R), where d is its new
value, e the residual, C the codec, and R what was received: of this replica
("own"), or the mean that all received ("mean"). Both are in the literature.
"own" keeps every replica's own deviation exactly. Where a replica rounds the
mean of a slice and sends it on, R has what this lost as well. "mean" carries
the replicas' disagreement along.

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

from dilocox_jax.aggregators.carriers import by_host
from dilocox_jax.aggregators.collectives import chosen_collective
from dilocox_jax.aggregators.compressed import CodecState, CompressedMean
from dilocox_jax.aggregators.mean import mean_of_finite_replicas
from dilocox_jax.checks import require, within_limits
from dilocox_jax.codecs.base import Codec
from dilocox_jax.codecs.named import named_codec
from dilocox_jax.codecs.quantize import Float, Int
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.plan.choices import REFERENCES, RESIDUAL_DTYPES
from dilocox_jax.trees import (
  Aggregator,
  Array,
  Pausing,
  Tree,
  widened,
  without_pauses,
)

_EIGHT_BITS = Int(8)


class FeedbackState(NamedTuple):
  """State of a compressed exchange of one fragment, for one replica.

  Attributes:
    codec: State of the codec.
    residual: What was not sent yet, a tree like the fragment. At 8 bits every
      leaf is a pair of codes and scales. None without feedback.
  """

  codec: CodecState
  residual: Tree


def exchange(
  codec: Codec | str = "float32",
  *,
  feedback: float = 0.0,
  against: str = "own",
  residual_dtype: str = "float32",
  keep_unsent: bool = False,
  collective: str = "auto",
  seed: int = 0,
  axis_name: str = REPLICA_AXIS,
  follows_rank: bool = False,
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
    residual_dtype: Type in which it is kept: "float32", "bfloat16", or "int8"
      (with a bfloat16 scale for each 128 values: 1.016 bytes a value).
    keep_unsent: Whether what the codec lost stays in the replica's parameters
      instead, where the next pseudo-gradient finds it.
    collective: What carries the messages: "auto" (the fewest bytes),
      "all_reduce", "all_gather" or "reduce_scatter".
    seed: Seed of random masks, first low-rank factors and stochastic rounding.
    axis_name: Axis over which replicas are mapped.
    follows_rank: Whether the rank of later rounds follows the measured one, so
      that the host needs the factors' products however large they are.

  Raises:
    ValueError: One line that names what does not fit.
  """
  codec = _checked(codec)
  residual = Residual(feedback, against, residual_dtype)
  chosen_collective(codec, collective, 2)
  residual.check(keep_unsent)
  if (codec, collective, feedback) == (Float(), "auto", 0):
    return mean_of_finite_replicas(axis_name)._replace(keep_unsent=keep_unsent)
  shares_add_up = keep_unsent or (bool(feedback) and against == "own")
  settings = codec, collective, seed, axis_name, shares_add_up
  return _aggregator(
    CompressedMean(*settings), residual, keep_unsent, follows_rank
  )


def carried_exchange(
  codec: Codec | str,
  residual: "Residual",
  *,
  number: int,
  keep_unsent: bool = False,
  seed: int = 0,
) -> Aggregator:
  """Returns an `exchange` whose messages the host carries.

  Its generator pauses as `aggregators.carriers.by_host` does, so `average`
  cannot be called in a compiled program.

  Args:
    codec: What is sent, as for `exchange`.
    residual: What is kept of what the codec lost.
    number: Number of this replica, for its random numbers.
    keep_unsent: As for `exchange`.
    seed: As for `exchange`.
  """
  codec = _checked(codec)
  residual.check(keep_unsent)
  compressed = CompressedMean(
    codec, "all_gather", seed, REPLICA_AXIS, False, by_host, number
  )
  return _aggregator(compressed, residual, keep_unsent, False)


def _checked(codec: Codec | str) -> Codec:
  codec = named_codec(codec) if isinstance(codec, str) else codec
  require(
    isinstance(codec, Codec),
    f"codec={codec!r} must be a codec, or names such as 'top_k+int(bits=2)'",
  )
  return codec


def _aggregator(
  compressed: CompressedMean,
  residual: "Residual",
  keep_unsent: bool,
  follows_rank: bool,
) -> Aggregator:
  # Codec state is equal on all replicas, so it has no replica axis. Each
  # replica has its own residual.
  axes = FeedbackState(codec=None, residual=0)  # pyright: ignore
  return Aggregator(
    lambda params: FeedbackState(
      compressed.init(params), residual.init(params)
    ),
    without_pauses(functools.partial(_average, compressed, residual)),
    axes,
    lambda state: compressed.observe(state.codec, follows_rank),
    stretch_ends=compressed.stretch_ends,
    keep_unsent=keep_unsent,
  )


def _average(
  compressed: CompressedMean,
  residual: "Residual",
  values: Tree,
  state: FeedbackState,
  params: Tree = None,
) -> Pausing:
  """Averages what is wanted, and keeps what of it was not sent."""
  del params
  wanted = residual.added(values, state.residual)
  # The sum is checked, not the values: 3e38 + 3e38 is no fp32 number, and a
  # residual that has left fp32's range would never come back.
  is_finite = compressed.are_finite(wanted)
  mean, own, codec = yield from compressed.update(
    wanted, is_finite, state.codec
  )
  kept = residual.kept(wanted, own, mean, is_finite)
  mean = jax.tree.map(lambda m, v: m.astype(v.dtype), mean, values)
  # A replica that was left out reports what it wanted to send as it is, so
  # that its drift is not finite and the host learns of it.
  sent = jax.tree.map(
    lambda x, w, v: jnp.where(is_finite, x, w.astype(x.dtype)).astype(v.dtype),
    own,
    wanted,
    values,
  )
  return mean, sent, FeedbackState(codec, kept)


@dataclasses.dataclass(frozen=True)
class Residual:
  """How much of what was lost is kept, and how (`exchange`).

  Attributes:
    decay: Share that is kept; 0 keeps nothing and has no state.
    against: "own" or "mean".
    dtype: "float32", "bfloat16" or "int8".
  """

  decay: float
  against: str
  dtype: str

  def check(self, keep_unsent: bool) -> None:
    """Raises ValueError, of one line, for what does not fit."""
    within_limits("feedback", self.decay, at_least=0, at_most=1)
    within_limits("against", self.against, choices=REFERENCES)
    within_limits("residual_dtype", self.dtype, choices=RESIDUAL_DTYPES)
    require(
      not (self.decay and keep_unsent),
      "feedback and keep_unsent both make up for what a codec loses: set one",
    )

  def init(self, params: Tree) -> Tree:
    """Returns a residual of zeros, or None."""
    if not self.decay:
      return None
    return _stored(jax.tree.map(jnp.zeros_like, widened(params)), self.dtype)

  def added(self, values: Tree, stored: Tree) -> Tree:
    """Returns values plus the residual, in fp32 or a wider type.

    Args:
      values: Values of this replica.
      stored: Residual as `init` or `kept` returned it.
    """
    if not self.decay:
      return values
    # In bfloat16 a residual of 1 would not grow by 0.001.
    wanted = widened(values)
    old = _restored(stored, wanted, self.dtype)
    return jax.tree.map(jnp.add, wanted, old)

  def kept(self, wanted: Tree, own: Tree, mean: Tree, is_finite) -> Tree:
    """Returns the new residual; zeros if the replica was left out.

    Args:
      wanted: What the replica wanted to send (`added`).
      own: What the others received of it.
      mean: Mean that all replicas received.
      is_finite: Whether the replica was counted in the mean.
    """
    if not self.decay:
      return None

    def lost(want: Array, got: Array) -> Array:
      rest = self.decay * (want - got.astype(want.dtype))
      return jnp.where(is_finite, rest, jnp.zeros_like(rest))

    received = own if self.against == "own" else mean
    return _stored(jax.tree.map(lost, wanted, received), self.dtype)


def _stored(residual: Tree, dtype: str) -> Tree:
  """Returns the residual in the type in which it is kept."""
  if dtype == "float32":
    return residual
  if dtype == "bfloat16":
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), residual)
  key = jax.random.key(0)  # Rounding to the nearest level draws nothing.

  def coded(leaf: Array) -> tuple[Array, ...]:
    return tuple(_EIGHT_BITS.encode([leaf[None]], key)) if leaf.size else ()

  return jax.tree.map(coded, residual)


def _restored(stored: Tree, like: Tree, dtype: str) -> Tree:
  """Reverses `_stored`: returns the residual in the values' own type."""
  if dtype != "int8":
    return jax.tree.map(lambda old, new: old.astype(new.dtype), stored, like)

  def decoded(new: Array, old: tuple[Array, ...]) -> Array:
    if not old:
      return new
    [found] = _EIGHT_BITS.decode(old, [(1, *new.shape)])
    return found[0].astype(new.dtype)

  return jax.tree.map(decoded, like, stored)
