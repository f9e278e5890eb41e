"""Encoded values across the replica axis.

All leaves of one phase travel together, as one message (`messages`), and with
them whether their sender takes part: a message of its own would cost a slow
link as much latency again. Which collective carries what is the plan's choice
(`plan.collectives`), by which bytes are also counted.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dilocox_jax.codecs.base import Encoder, Reduced
from dilocox_jax.codecs.compose import encoder
from dilocox_jax.exchange import messages
from dilocox_jax.exchange.mean import mean_of_participants, summed
from dilocox_jax.plan.wire.chain import Encoding
from dilocox_jax.plan.wire.collectives import chosen_collective, owner_slices
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.pytypes import Array, Boolean, Scalar


class LeafMessage(NamedTuple):
  """One leaf's part of a phase.

  Attributes:
    values: [num_layers, *shape], this replica's.
    encoding: How they are sent.
    leaf: What they are.
    key: Random key of this replica, for stochastic rounding.
  """

  values: Array
  encoding: Encoding
  leaf: Leaf
  key: Array


def reduce(
  outgoing: Mapping[str, LeafMessage],
  participates: Boolean,
  num_replicas: int,
  choice: str,
) -> dict[str, Reduced]:
  """Averages outgoing over those replicas that take part.

  Args:
    outgoing: By any name.
    participates: Whether this replica does; if not, its values are zero.
    num_replicas: M.
    choice: One of `plan.collectives.COLLECTIVES`.
  """
  ways = {"all_reduce": _add, "all_gather": _gather, "reduce_scatter": _scatter}
  found = {}
  for kind, way in ways.items():
    names = [
      name
      for name, parcel in outgoing.items()
      if chosen_collective(parcel.encoding, choice, num_replicas) == kind
    ]
    if names:
      chosen_ones = [outgoing[name] for name in names]
      answers = way(chosen_ones, participates, num_replicas)
      found.update(zip(names, answers, strict=True))
  return found


def _add(
  outgoing: Sequence[LeafMessage], participates: Boolean, num_replicas: int
) -> list[Reduced]:
  """The network adds; in fp32, or in fewer bits if the user asks for it."""
  del num_replicas
  coders, sent = _encoded(outgoing)
  totals, count = summed(sent, participates)
  return [
    Reduced(mean_of_participants(coder.decode(total), count), coder.decode(own))
    for coder, own, total in zip(coders, sent, totals, strict=True)
  ]


def _gather(
  outgoing: Sequence[LeafMessage], participates: Boolean, num_replicas: int
) -> list[Reduced]:
  """Everybody receives everything, decodes it and adds it up."""
  coders, sent = _encoded(outgoing)
  flag = participates.astype(jnp.uint8)
  *arrived, flags = messages.all_gathered([*sent, (flag[None],)])
  count = _count(flags)
  answers = []
  for coder, own, all_of_it in zip(coders, sent, arrived, strict=True):
    # One at a time, so that no more than one replica's values are decoded.
    total = coder.decode(tuple(array[0] for array in all_of_it))
    for replica in range(1, num_replicas):
      total += coder.decode(tuple(array[replica] for array in all_of_it))
    answers.append(
      Reduced(mean_of_participants(total, count), coder.decode(own))
    )
  return answers


def _scatter(
  outgoing: Sequence[LeafMessage], participates: Boolean, num_replicas: int
) -> list[Reduced]:
  """Each replica adds up one chunk and sends its mean to all.

  The mean is rounded once more on its way; the replica's own part is what it
  was before that.
  """
  cuts = [owner_slices(p.encoding, p.leaf, num_replicas) for p in outgoing]
  coders = [
    encoder(p.encoding, cut) for p, cut in zip(outgoing, cuts, strict=True)
  ]
  sent = [
    coder.encode(_cut(parcel.values, cut), parcel.key)
    for coder, parcel, cut in zip(coders, outgoing, cuts, strict=True)
  ]
  flag = jnp.full((num_replicas, 1), participates, jnp.uint8)
  *swapped, flags = messages.all_to_all([*sent, (flag,)])
  count = _count(flags)
  means, owners = [], []
  for parcel, coder, cut, arrived in zip(
    outgoing, coders, cuts, swapped, strict=True
  ):
    mean = mean_of_participants(
      jnp.sum(coder.decode(arrived), axis=0, keepdims=True), count
    )
    owners.append(encoder(parcel.encoding, Leaf(1, cut.shape)))
    key = jax.random.fold_in(parcel.key, num_replicas)
    means.append(owners[-1].encode(mean, key))
  answers = []
  for parcel, coder, own, whole in zip(
    outgoing, coders, sent, messages.all_gathered(means), strict=True
  ):
    mean = coder.decode(tuple(array[:, 0] for array in whole))
    answers.append(
      Reduced(
        _joined(mean, parcel.values.shape),
        _joined(coder.decode(own), parcel.values.shape),
      )
    )
  return answers


def _encoded(
  outgoing: Sequence[LeafMessage],
) -> tuple[list[Encoder], list[tuple[Array, ...]]]:
  """Each parcel's encoder, and what it makes of the values."""
  coders = [encoder(parcel.encoding, parcel.leaf) for parcel in outgoing]
  sent = [
    coder.encode(parcel.values, parcel.key)
    for coder, parcel in zip(coders, outgoing, strict=True)
  ]
  return coders, sent


def _count(flags: tuple[Array, ...]) -> Scalar:
  """How many take part, from everybody's flag."""
  (each,) = flags
  return jnp.sum(each, dtype=jnp.float32)


def _cut(values: Array, cut: Leaf) -> Array:
  """Values as [M, chunk], zeros at the end."""
  flat = values.reshape(-1)
  flat = jnp.pad(flat, (0, cut.num_layers * cut.size - flat.size))
  return flat.reshape(cut.stacked_shape)


def _joined(chunked: Array, shape: tuple[int, ...]) -> Array:
  return chunked.reshape(-1)[: math.prod(shape)].reshape(shape)
