"""Codecs built from payloads, part by part."""

import functools

import jax
import jax.numpy as jnp

from dilocox_jax.codecs import low_rank, quantize, sparse
from dilocox_jax.codecs.base import Codec, CodecSteps, Encoder, Reduced
from dilocox_jax.plan.wire.chain import Chain, Encoding, links_of
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import E3M0, Dense, Int, Payload
from dilocox_jax.plan.wire.reduction import LowRank, RandomMask, TopK
from dilocox_jax.pytypes import Array, Tree


def encoder(encoding: Encoding, leaf: Leaf) -> Encoder:
  """The encoder of a leaf.

  Args:
    encoding: Selections and a quantiser.
    leaf: What is encoded.
  """
  head, *rest = encoding.links
  if isinstance(head, Dense):
    return quantize.dense(head, leaf)
  if isinstance(head, Int):
    return quantize.integer(head, leaf)
  if isinstance(head, E3M0):
    return quantize.e3m0(head, leaf)
  inner = [encoder(Encoding(tuple(rest)), part) for part in head.carried(leaf)]
  if isinstance(head, TopK):
    return sparse.top_k(head, leaf, inner[0])
  assert isinstance(head, LowRank), f"no codec for {head}"
  if not head.factorises(leaf):
    return inner[0]
  return low_rank.local_factors(head, (inner[0], inner[1]))


def codec(payload: Payload, leaf: Leaf, max_rank: int = 0) -> Codec:
  """The codec of a leaf.

  Args:
    payload: The leaf's payload.
    leaf: What is compressed.
    max_rank: Rank that the state of low-rank factors has room for.
  """
  head, *rest = links_of(payload)
  if not head.is_projection:
    return _exchanged_once(Encoding((head, *rest)), leaf)
  follow = Chain(tuple(rest))
  inner = [codec(follow, part) for part in head.carried(leaf)]
  if isinstance(head, RandomMask):
    return sparse.random_mask(head, leaf, inner[0])
  assert isinstance(head, LowRank), f"no codec for {head}"
  if not head.factorises(leaf):
    if not max_rank or not LowRank(1).factorises(leaf):
      return inner[0]
    # With another rank it is factorised, and states must be alike.
    start = functools.partial(low_rank.first_factors, leaf, max_rank)
    return inner[0]._replace(init=start)
  return low_rank.shared_factors(head, leaf, inner[0], inner[1], max_rank)


def _exchanged_once(encoding: Encoding, leaf: Leaf) -> Codec:
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
    values: [num_layers, *shape].
    state: Its state.
    key: A random key.

  Returns:
    What is decoded, the new state, and the wire arrays of every phase.
  """
  run, sent = built.run(values, state, key), []
  asked = next(run)
  for number, (encoding, leaf) in enumerate(built.messages):
    coder = encoder(encoding, leaf)
    sent.append(coder.encode(asked, jax.random.fold_in(key, number)))
    decoded = coder.decode(sent[-1])
    try:
      asked = run.send(Reduced(decoded, decoded))
    except StopIteration as stop:
      reduced, state = stop.value
      return reduced.own.astype(jnp.float32), state, sent
  raise AssertionError("a codec asked for more than its payload has")
