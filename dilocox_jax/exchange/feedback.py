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
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dilocox_jax.checks import check_limits, limited
from dilocox_jax.codecs.base import Encoder
from dilocox_jax.codecs.quantize import integer
from dilocox_jax.exchange.compressed import (
  CodecState,
  Compression,
  compressed,
  grams,
)
from dilocox_jax.exchange.mean import (
  finite_part,
  mean_of_finite_replicas,
  widened,
)
from dilocox_jax.plan.choices import REFERENCES, RESIDUAL_DTYPES
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import Dense, Int
from dilocox_jax.pytypes import (
  Aggregator,
  Array,
  Pausing,
  Tree,
  without_pauses,
)

_EIGHT_BITS = Int(8)


class FeedbackState(NamedTuple):
  """State of a compressed exchange of one fragment, for one replica.

  Attributes:
    codec: State of the codecs.
    residual: What was not sent yet, a tree like the fragment. At 8 bits every
      leaf is a pair of codes and scales. None without feedback.
  """

  codec: CodecState
  residual: Tree


@dataclasses.dataclass(frozen=True)
class Feedback:
  """How much of what was lost is kept, and how.

  Attributes:
    decay: Share of the residual that is kept, 0 (none) to 1 (all).
    against: What the residual is measured against, "own" or "mean".
    dtype: Type in which the residual is kept: "float32", "bfloat16", or "int8"
      (with a bfloat16 scale for each 128 values: 1.016 bytes a value).
  """

  decay: float = limited(1.0, at_least=0, at_most=1)
  against: str = limited("own", choices=REFERENCES)
  dtype: str = limited("float32", choices=RESIDUAL_DTYPES)

  def __post_init__(self):
    check_limits(self)


def compressed_mean(
  compression: Compression, feedback: Feedback | None = None
) -> Aggregator:
  """Averages encoded values over the replicas whose values are finite.

  Wire: bytes of the payload and a flag a message (`compressed`); a residual
  never leaves its replica.
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
    compression: Payload and collective.
    feedback: How residuals are kept; None forgets what was lost.
  """
  measures_own = feedback is not None and feedback.against == "own"
  exchange = compressed(
    compression, shares_add_up=measures_own or compression.keep_unsent
  )

  def init(params: Tree) -> FeedbackState:
    codec = exchange.init(params)
    if feedback is None:
      return FeedbackState(codec, None)
    zeros = jax.tree.map(jnp.zeros_like, widened(params))
    return FeedbackState(codec, _stored(zeros, feedback.dtype))

  def average(
    values: Tree, state: FeedbackState, params: Tree = None
  ) -> Pausing:
    del params
    wanted = values
    if feedback is not None:
      # In bfloat16 a residual of 1 would not grow by 0.001.
      wanted = widened(values)
      old_residual = _restored(state.residual, wanted, feedback.dtype)
      wanted = jax.tree.map(jnp.add, wanted, old_residual)
    # The sum is checked, not the values: 3e38 + 3e38 is no fp32 number, and a
    # residual that has left fp32's range would never come back.
    finite, is_finite = finite_part(wanted)
    mean, own, codec = yield from exchange.update(
      finite, is_finite, state.codec
    )
    residual = None
    if feedback is not None:
      received = own if feedback.against == "own" else mean
      decay = feedback.decay

      def lost(want: Array, got: Array) -> Array:
        rest = decay * (want - got.astype(want.dtype))
        return jnp.where(is_finite, rest, jnp.zeros_like(rest))

      residual = jax.tree.map(lost, finite, received)
      residual = _stored(residual, feedback.dtype)
    mean = jax.tree.map(lambda m, v: m.astype(v.dtype), mean, values)
    # A replica that was left out reports what it wanted to send as it is, so
    # that its drift is not finite and the host learns of it.
    sent = jax.tree.map(
      lambda x, w, v: jnp.where(is_finite, x, w.astype(x.dtype)).astype(
        v.dtype
      ),
      own,
      wanted,
      values,
    )
    return mean, sent, FeedbackState(codec, residual)

  # Codec state is equal on all replicas, so it has no replica axis. Each
  # replica has its own residual.
  axes = FeedbackState(codec=None, residual=0)  # pyright: ignore
  return Aggregator(
    init,
    without_pauses(average),
    axes,
    lambda state: grams(state.codec, compression.follows_rank),
    stretch_ends=exchange.stretch_ends,
  )


def mean_over_replicas(
  compression: Compression, feedback: Feedback | None
) -> Aggregator:
  """Averages over all replicas; plainly if nothing is compressed.

  Args:
    compression: Payload and collective.
    feedback: How residuals are kept; None forgets what was lost.
  """
  sends_all = compression.payload == Dense()
  if sends_all and compression.collective == "auto" and feedback is None:
    return mean_of_finite_replicas(compression.axis_name)
  return compressed_mean(compression, feedback)


def _stored(residual: Tree, dtype: str) -> Tree:
  """Returns the residual in the type in which it is kept."""
  if dtype == "float32":
    return residual
  if dtype == "bfloat16":
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), residual)
  key = jax.random.key(0)  # Rounding to the nearest level draws nothing.
  return jax.tree.map(
    lambda leaf: _byte_coder(leaf).encode(leaf[None], key) if leaf.size else (),
    residual,
  )


def _restored(stored: Tree, like: Tree, dtype: str) -> Tree:
  """Reverses `_stored`: returns the residual in the values' own type."""
  if dtype != "int8":
    return jax.tree.map(lambda old, new: old.astype(new.dtype), stored, like)

  def decoded(new: Array, old: tuple[Array, ...]) -> Array:
    return _byte_coder(new).decode(old)[0].astype(new.dtype) if old else new

  return jax.tree.map(decoded, like, stored)


def _byte_coder(leaf: Array) -> Encoder:
  return integer(_EIGHT_BITS, Leaf(1, leaf.shape))
