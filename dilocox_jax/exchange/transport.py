"""Encoded values across the replica axis.

All leaves of one phase travel together, as one message (`messages`). Which
collective carries what is the plan's choice (`plan.collectives`), by which
bytes are also counted.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dilocox_jax.codecs.base import Reduced
from dilocox_jax.codecs.compose import encoder
from dilocox_jax.exchange import messages
from dilocox_jax.mesh import REPLICA_AXIS
from dilocox_jax.plan.collectives import chosen, chunks
from dilocox_jax.plan.leaf import Leaf
from dilocox_jax.plan.wire import Encoding
from dilocox_jax.pytypes import Array, Index


class Parcel(NamedTuple):
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
  parcels: Mapping[str, Parcel], count: Index, num_replicas: int, choice: str
) -> dict[str, Reduced]:
  """Averages parcels over replicas.

  Args:
    parcels: By any name.
    count: Replicas that take part (int32); the others' values are zero.
    num_replicas: M.
    choice: One of `plan.collectives.COLLECTIVES`.
  """
  ways = {"all_reduce": _add, "all_gather": _gather, "reduce_scatter": _scatter}
  found = {}
  for kind, way in ways.items():
    names = [
      name
      for name, parcel in parcels.items()
      if chosen(parcel.encoding, choice, num_replicas) == kind
    ]
    if names:
      answers = way([parcels[name] for name in names], count, num_replicas)
      found.update(zip(names, answers, strict=True))
  return found


def _add(
  parcels: Sequence[Parcel], count: Index, num_replicas: int
) -> list[Reduced]:
  """The network adds; in fp32, or in fewer bits if the user asks for it."""
  del num_replicas
  answers = []
  for parcel in parcels:
    coder = encoder(parcel.encoding, parcel.leaf)
    sent = coder.encode(parcel.values, parcel.key)
    total = coder.decode(jax.lax.psum(sent, REPLICA_AXIS))
    answers.append(Reduced(_over(total, count), coder.decode(sent)))
  return answers


def _gather(
  parcels: Sequence[Parcel], count: Index, num_replicas: int
) -> list[Reduced]:
  """Everybody receives everything, decodes it and adds it up."""
  coders = [encoder(parcel.encoding, parcel.leaf) for parcel in parcels]
  sent = [
    coder.encode(parcel.values, parcel.key)
    for coder, parcel in zip(coders, parcels, strict=True)
  ]
  arrived = messages.gathered(sent)
  answers = []
  for coder, own, all_of_it in zip(coders, sent, arrived, strict=True):
    # One at a time, so that no more than one replica's values are decoded.
    total = coder.decode(tuple(array[0] for array in all_of_it))
    for replica in range(1, num_replicas):
      total += coder.decode(tuple(array[replica] for array in all_of_it))
    answers.append(Reduced(_over(total, count), coder.decode(own)))
  return answers


def _scatter(
  parcels: Sequence[Parcel], count: Index, num_replicas: int
) -> list[Reduced]:
  """Each replica adds up one chunk and sends its mean to all.

  The mean is rounded once more on its way; the replica's own part is what it
  was before that.
  """
  cuts = [chunks(p.encoding, p.leaf, num_replicas) for p in parcels]
  coders = [
    encoder(p.encoding, cut) for p, cut in zip(parcels, cuts, strict=True)
  ]
  sent = [
    coder.encode(_cut(parcel.values, cut), parcel.key)
    for coder, parcel, cut in zip(coders, parcels, cuts, strict=True)
  ]
  means, owners = [], []
  for parcel, coder, cut, arrived in zip(
    parcels, coders, cuts, messages.swapped(sent), strict=True
  ):
    mean = _over(jnp.sum(coder.decode(arrived), axis=0, keepdims=True), count)
    owners.append(encoder(parcel.encoding, Leaf(1, cut.shape)))
    key = jax.random.fold_in(parcel.key, num_replicas)
    means.append(owners[-1].encode(mean, key))
  answers = []
  for parcel, coder, own, whole in zip(
    parcels, coders, sent, messages.gathered(means), strict=True
  ):
    mean = coder.decode(tuple(array[:, 0] for array in whole))
    answers.append(
      Reduced(
        _joined(mean, parcel.values.shape),
        _joined(coder.decode(own), parcel.values.shape),
      )
    )
  return answers


def _over(total: Array, count: Index) -> Array:
  return total / count.astype(total.dtype)


def _cut(values: Array, cut: Leaf) -> Array:
  """Values as [M, chunk], zeros at the end."""
  flat = values.reshape(-1)
  flat = jnp.pad(flat, (0, cut.num_layers * cut.size - flat.size))
  return flat.reshape(cut.stacked_shape)


def _joined(chunked: Array, shape: tuple[int, ...]) -> Array:
  return chunked.reshape(-1)[: math.prod(shape)].reshape(shape)
