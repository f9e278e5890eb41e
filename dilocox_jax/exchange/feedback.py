"""Error feedback: what an exchange lost is added to the next one.

sent = C(d + e), e <- decay (d + e - R), where R is what the others received
of this replica ("own"), or the mean that all received ("mean"). Both stand in
the literature: the first keeps every replica's own deviation exactly, the
second also keeps what a second rounding of the mean lost, but carries the
replicas' disagreement along.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dilocox_jax.codecs.base import Encoder
from dilocox_jax.codecs.quantize import integer
from dilocox_jax.exchange.compressed import (
  CodecState,
  Compression,
  compressed,
  finite_part,
  grams,
)
from dilocox_jax.plan.choices import REFERENCES, RESIDUAL_DTYPES
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import Int
from dilocox_jax.pytypes import Aggregator, Array, Tree

_EIGHT_BITS = Int(8)


class FeedbackState(NamedTuple):
  """What a compressed exchange remembers of a fragment, for one replica.

  Attributes:
    codec: The codecs' state.
    residual: What was not sent yet, like the fragment; at 8 bits, codes and
      scales of every leaf; None without feedback.
  """

  codec: CodecState
  residual: Tree


@dataclasses.dataclass(frozen=True)
class Feedback:
  """How much of what was lost is kept, and how.

  Attributes:
    decay: Share of the residual that is kept, 0 (none) to 1 (all).
    against: "own" or "mean".
    dtype: Memory of the residual: "float32", "bfloat16", or "int8" (with a
      bfloat16 scale each 128 values: 1.016 bytes a value).
  """

  decay: float = 1.0
  against: str = "own"
  dtype: str = "float32"

  def __post_init__(self):
    for name, choices in (
      ("against", REFERENCES),
      ("dtype", RESIDUAL_DTYPES),
    ):
      value = getattr(self, name)
      if value not in choices:
        named = ", ".join(choices)
        raise ValueError(f"{name}={value!r} must be one of {named}")
    if not 0 <= self.decay <= 1:
      raise ValueError(f"decay={self.decay} must lie between 0 and 1")


def compressed_mean(
  how: Compression, feedback: Feedback | None = None
) -> Aggregator:
  """Averages encoded values over those replicas whose values are finite.

  Source: Seide et al., 2014, for error feedback; Karimireddy et al., 2019,
  arXiv 1901.09847, for its convergence; DiLoCoX, arXiv 2506.21263, Algorithm
  2, against the mean; SparseLoCo, arXiv 2508.15706, with decay against one's
  own. Differs: a replica that is not finite loses its residual.

  Args:
    how: Payload and collective.
    feedback: None sends everything once and forgets what was lost.
  """
  exchange = compressed(how)

  def init(params: Tree) -> FeedbackState:
    state = exchange.init(params)
    if feedback is None:
      return FeedbackState(state, None)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return FeedbackState(state, _stored(zeros, feedback.dtype))

  def average(
    values: Tree, state: FeedbackState
  ) -> tuple[Tree, Tree, FeedbackState]:
    wanted = values
    if feedback is not None:
      owed = _restored(state.residual, values, feedback.dtype)
      wanted = jax.tree.map(jnp.add, values, owed)
    # Of the sum, not of the values: a residual that left fp32's range would
    # never come back.
    kept, is_finite = finite_part(wanted)
    mean, own, codec = exchange.update(kept, is_finite, state.codec)
    residual = None
    if feedback is not None:
      seen = own if feedback.against == "own" else mean

      decay = feedback.decay

      def lost(want: Array, got: Array) -> Array:
        left = decay * (want - got.astype(want.dtype))
        return jnp.where(is_finite, left, jnp.zeros_like(left))

      residual = _stored(jax.tree.map(lost, kept, seen), feedback.dtype)
    mean = jax.tree.map(lambda m, v: m.astype(v.dtype), mean, values)
    # A replica that was left out reports its values as they are, so that the
    # drift shows it; a residual out of range counts as much as a value.
    sent = jax.tree.map(
      lambda x, v: jnp.where(is_finite, x.astype(v.dtype), v), own, wanted
    )
    return mean, sent, FeedbackState(codec, residual)

  # Codecs must stay in step; what is owed is each replica's own.
  axes = FeedbackState(codec=None, residual=0)  # pyright: ignore
  return Aggregator(init, average, axes, lambda state: grams(state.codec))


def _stored(residual: Tree, dtype: str) -> Tree:
  """The residual as it is kept between exchanges."""
  if dtype == "float32":
    return residual
  if dtype == "bfloat16":
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), residual)
  key = jax.random.key(0)  # Rounding to nearest draws nothing.
  return jax.tree.map(
    lambda leaf: _byte_coder(leaf).encode(leaf[None], key), residual
  )


def _restored(kept: Tree, like: Tree, dtype: str) -> Tree:
  """The residual in the values' own type."""
  if dtype != "int8":
    return jax.tree.map(lambda old, new: old.astype(new.dtype), kept, like)
  return jax.tree.map(
    lambda new, old: _byte_coder(new).decode(old)[0].astype(new.dtype),
    like,
    kept,
  )


def _byte_coder(leaf: Array) -> Encoder:
  return integer(_EIGHT_BITS, Leaf(1, leaf.shape))
