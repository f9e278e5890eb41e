"""Encoded values across the replica axis.

All leaves that a codec step sends travel together, as one message
(`messages`). The message also says whether its sender participates: a message
for that alone would cost a slow link as much latency again. The plan chooses
which collective carries what (`plan.wire.collectives`), and counts the bytes
by the same choice.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dilocox_jax.checks import require
from dilocox_jax.codecs.base import Encoder, Reduced
from dilocox_jax.codecs.compose import encoder
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.exchange import messages
from dilocox_jax.exchange.mean import mean_of_participants, summed
from dilocox_jax.plan.wire.chain import Encoding
from dilocox_jax.plan.wire.collectives import chosen_collective
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.pytypes import Array, Boolean, Pausing, Tree


class LeafMessage(NamedTuple):
  """One leaf's part of a message.

  Attributes:
    values: Values of this replica, [num_layers, *shape].
    encoding: How the values are encoded.
    leaf: Shape of the values.
    key: Random key of this replica, for stochastic rounding.
  """

  values: Array
  encoding: Encoding
  leaf: Leaf
  key: Array


def reduce(
  outgoing: Mapping[str, LeafMessage],
  participates: Boolean,
  collective: str,
  axis_name: str = REPLICA_AXIS,
  shares_add_up: bool = False,
) -> Pausing:
  """Averages values over the replicas that participate.

  Messages that need no other one leave together.

  Args:
    outgoing: Message of every leaf by path.
    participates: Whether this replica participates; if not, its values are
      zero.
    collective: One of `plan.wire.collectives.COLLECTIVES`.
    axis_name: Axis over which replicas are mapped.
    shares_add_up: Whether the own parts of all replicas add up to the mean
      times their number even where the mean is rounded too (`_scatter`).

  Returns:
    A generator that pauses as `Aggregator.paused` does. In the end it returns
    the mean and the replica's own part of it, by path.
  """
  num_replicas = jax.lax.axis_size(axis_name)
  functions = {
    "all_reduce": _add,
    "all_gather": _gather,
    "reduce_scatter": functools.partial(_scatter, shares_add_up=shares_add_up),
  }
  paths = {
    kind: [
      path
      for path, message in outgoing.items()
      if chosen_collective(message.encoding, collective, num_replicas) == kind
    ]
    for kind in functions
  }
  runs = {
    kind: functions[kind](
      [outgoing[path] for path in own], participates, axis_name
    )
    for kind, own in paths.items()
    if own
  }
  ends = yield from _together(runs)
  return {
    path: reduced
    for kind, found in ends.items()
    for path, reduced in zip(paths[kind], found, strict=True)
  }


def _together(runs: Mapping[str, Pausing]) -> Pausing:
  """Runs generators so that all pause at the same time.

  Returns:
    A generator that returns the value of each by its name.
  """
  trees: dict[str, Tree] = {name: next(run) for name, run in runs.items()}
  ends = {}
  while trees:
    trees = yield trees
    for name in list(trees):
      try:
        trees[name] = runs[name].send(trees[name])
      except StopIteration as stop:
        ends[name] = stop.value
        del trees[name]
  return ends


def _add(
  outgoing: Sequence[LeafMessage], participates: Boolean, axis_name: str
) -> Pausing:
  """The network adds; in fp32, or in fewer bits if the user asks for it."""
  coders, sent = _encoded(outgoing)
  sent, participates = yield sent, participates
  totals, count = yield summed(sent, participates, axis_name)
  return [
    Reduced(mean_of_participants(coder.decode(total), count), coder.decode(own))
    for coder, own, total in zip(coders, sent, totals, strict=True)
  ]


def _gather(
  outgoing: Sequence[LeafMessage], participates: Boolean, axis_name: str
) -> Pausing:
  """Every replica receives all messages, decodes them and adds them up."""
  coders, sent = _encoded(outgoing)
  flag = participates.astype(jnp.uint8)
  sent, flag = yield sent, flag[None]
  arrived = yield messages.all_gathered([*sent, (flag,)], axis_name)
  *gathered, flags = arrived
  count = jnp.sum(flags[0], dtype=jnp.float32)
  results = []
  for coder, own, arrays in zip(coders, sent, gathered, strict=True):
    # One replica after the other, so that the decoded values of one replica
    # at most are in memory.
    total = coder.decode(tuple(array[0] for array in arrays))
    for replica in range(1, jax.lax.axis_size(axis_name)):
      total += coder.decode(tuple(array[replica] for array in arrays))
    mean = mean_of_participants(total, count)
    results.append(Reduced(mean, coder.decode(own)))
  return results


def _scatter(
  outgoing: Sequence[LeafMessage],
  participates: Boolean,
  axis_name: str,
  shares_add_up: bool,
) -> Pausing:
  """Each replica owns a slice, adds it up and sends its mean to all.

  M = 3 and 7 values: a slice has ceil(7 / 3) = 3 values, and zeros fill the
  last one.

      replica 0 has   1 2 3 | 4 5 6 | 7 0 0   encoded as three slices
      all_to_all:     replica 0 receives the first slice of all three replicas,
                      replica 1 the second, replica 2 the third
      each owner      decodes three slices, adds them up, divides by the number
                      of participants, and encodes the mean of its slice
      all_gather:     every replica receives the means of the three slices,
                      joins them and drops the two zeros

  So the mean is rounded once more than the values. The replica's own part is
  what the owners decoded of it, before that second rounding.

  With error feedback the second rounding must be made up for as well, and at
  one bit a value it loses as much as the first. So with `shares_add_up` the
  owner uses the exact values of its own slice, which no link carries, and its
  own part there is what it had less what the rounding of the sum has lost.
  Example: two replicas have 0.4 and 0.8 in a slice of the first one, and codes
  are whole numbers. The owner receives 1, its mean is 0.7, and all receive 1.
  The rounding added 0.3 to the mean, which is 0.6 of the sum. So the own parts
  are 0.4 + 0.6 = 1 and 1, and the owner owes 0.4 - 1 = -0.6.
  """
  num_replicas = jax.lax.axis_size(axis_name)
  slices = [_cut(message, num_replicas) for message in outgoing]
  coders, sent = _encoded(slices)
  flag = jnp.full((num_replicas, 1), participates, jnp.uint8)
  sent, flag = yield sent, flag
  *swapped, flags = yield messages.all_to_all([*sent, (flag,)], axis_name)
  count = jnp.sum(flags[0], dtype=jnp.float32)
  replica = jax.lax.axis_index(axis_name)
  means, exact_means = [], []
  for message, coder, arrays in zip(slices, coders, swapped, strict=True):
    arrived = coder.decode(arrays)
    if shares_add_up:
      exact = message.values[replica].astype(arrived.dtype)
      arrived = arrived.at[replica].set(exact)
    total = jnp.sum(arrived, axis=0, keepdims=True)
    mean = mean_of_participants(total, count)
    exact_means.append(mean[0])
    # The values took their random numbers from the key itself.
    key = jax.random.fold_in(message.key, num_replicas)
    owner = encoder(message.encoding, Leaf(1, message.leaf.shape))
    means.append(owner.encode(mean, key))
  means = yield means
  gathered = yield messages.all_gathered(means, axis_name)
  results = []
  for message, cut, coder, codes, arrays, exact_mean in zip(
    outgoing, slices, coders, sent, gathered, exact_means, strict=True
  ):
    mean = coder.decode(tuple(array[:, 0] for array in arrays))
    own, shape = coder.decode(codes), message.values.shape
    if shares_add_up:
      lost = count * (exact_mean - mean[replica])
      exact = cut.values[replica].astype(own.dtype)
      own = own.at[replica].set(exact - lost)
    results.append(Reduced(_joined(mean, shape), _joined(own, shape)))
  return results


def _encoded(
  outgoing: Sequence[LeafMessage],
) -> tuple[list[Encoder], list[tuple[Array, ...]]]:
  """Returns each message's encoder and its wire arrays."""
  coders = [encoder(message.encoding, message.leaf) for message in outgoing]
  sent = [
    coder.encode(message.values, message.key)
    for coder, message in zip(coders, outgoing, strict=True)
  ]
  for message, arrays in zip(outgoing, sent, strict=True):
    _check_bytes(message, arrays)
  return coders, sent


def _check_bytes(message: LeafMessage, arrays: tuple[Array, ...]) -> None:
  """Raises ValueError if a codec makes other arrays than its payload says."""
  counted = message.encoding.num_bytes(message.leaf)
  sent = sum(array.size * array.dtype.itemsize for array in arrays)
  names = "+".join(type(link).__name__ for link in message.encoding.links)
  require(
    sent == counted,
    f"the encoder of {names} sends {sent} bytes for a leaf of shape "
    f"{message.leaf.stacked_shape}, but its payload counts {counted}: "
    "own_wires must describe the arrays that encode returns",
  )


def _cut(message: LeafMessage, num_replicas: int) -> LeafMessage:
  """Returns a message of values [M, slice], with zeros at the end."""
  slices = message.encoding.links[0].slices(message.leaf, num_replicas)
  flat = message.values.reshape(-1)
  flat = jnp.pad(flat, (0, slices.num_layers * slices.size - flat.size))
  return message._replace(
    values=flat.reshape(slices.stacked_shape), leaf=slices
  )


def _joined(slices: Array, shape: tuple[int, ...]) -> Array:
  """Reverses `_cut`: drops the zeros and restores the shape."""
  return slices.reshape(-1)[: math.prod(shape)].reshape(shape)
