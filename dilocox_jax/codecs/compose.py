"""Codecs built from payloads, link by link.

A payload is a chain such as (LowRank, TopK, Int). Links in front, which may be
averaged before they are undone (shared low rank, random mask), become codecs.
The rest of the chain becomes one encoder: here the factors are exchanged, each
as its largest values in 4 bits.
"""

import jax
import jax.numpy as jnp

from dilocox_jax.codecs.base import Codec, CodecSteps, Encoder, Reduced
from dilocox_jax.plan.choices import loaded
from dilocox_jax.plan.wire.chain import Chain, Encoding, links_of
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import Payload
from dilocox_jax.plan.wire.payload_names import codec_of
from dilocox_jax.pytypes import Array, Tree


def encoder(encoding: Encoding, leaf: Leaf) -> Encoder:
  """Returns the encoder of a leaf.

  Args:
    encoding: Selections and a quantiser at the end.
    leaf: Shape of the values.
  """
  head, *rest = encoding.links
  inner = [encoder(Encoding(tuple(rest)), part) for part in head.carried(leaf)]
  return loaded(codec_of(head))(head, leaf, *inner)


def codec(payload: Payload, leaf: Leaf, max_rank: int = 0) -> Codec:
  """Returns the codec of a leaf.

  Args:
    payload: Payload of the leaf.
    leaf: Shape of the values.
    max_rank: Columns that the state of low-rank factors has room for.
  """
  head, *rest = links_of(payload)
  if not head.is_projection:
    return _exchanged_once(Encoding((head, *rest)), leaf)
  follow = Chain(tuple(rest))
  inner = [codec(follow, part) for part in head.carried(leaf)]
  return loaded(codec_of(head))(head, leaf, *inner, max_rank=max_rank)


def _exchanged_once(encoding: Encoding, leaf: Leaf) -> Codec:
  """Returns the codec without a state that sends one message."""

  def run(values: Array, state: Tree, key: Array) -> CodecSteps:
    del key
    reduced = yield values
    return reduced, state

  return Codec(lambda key: (), run, ((encoding, leaf),))


def run_without_exchange(
  built: Codec, values: Array, state: Tree, key: Array
) -> tuple[Array, Tree, list[tuple[Array, ...]]]:
  """Runs a codec for a replica that exchanges with nobody.

  Args:
    built: The codec.
    values: Values [num_layers, *shape].
    state: State of the codec.
    key: Random key.

  Returns:
    The decoded values, the new state, and the wire arrays of every message.
  """
  run, sent = built.run(values, state, key), []
  yielded = next(run)
  for number, (encoding, leaf) in enumerate(built.messages):
    coder = encoder(encoding, leaf)
    sent.append(coder.encode(yielded, jax.random.fold_in(key, number)))
    decoded = coder.decode(sent[-1])
    try:
      yielded = run.send(Reduced(decoded, decoded))
    except StopIteration as stop:
      reduced, state = stop.value
      return reduced.own.astype(jnp.float32), state, sent
  raise AssertionError("a codec yields more than its payload has messages")
