"""Averages over pairs of replicas that are drawn for each exchange.

No replica waits for all others, and the bytes that a replica sends do not grow
with the number of replicas, M. The pairs of an exchange are one round of a
round-robin tournament, drawn with a key that is equal on all replicas. For
M = 4 the tournament has the rounds

    round 0   0-3  1-2
    round 1   1-3  2-0
    round 2   2-3  0-1

In a tournament, each replica meets every other replica once. It has M - 1
rounds if M is even. If M is odd, it has M rounds, and each replica has no
partner in one of them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dilocox_jax.aggregators import byte_collectives
from dilocox_jax.aggregators.collective import FLAG_BYTES, Collective, Sender
from dilocox_jax.aggregators.means import mean_of_messages
from dilocox_jax.aggregators.sizes import encoded_bytes
from dilocox_jax.codecs.base import Codec, Encoder
from dilocox_jax.codecs.batching import Shape
from dilocox_jax.coroutines import Coroutine
from dilocox_jax.plan.operations import Operation, Permute
from dilocox_jax.trees import Array

# It is folded into the random key, so that the draw of the pairs is independent
# of what codecs draw with the same key.
_PAIRS_OF_KEY = 1


def tournament(num_replicas: int) -> list[list[int]]:
  """Returns the partner of each replica in every round of a tournament.

  Args:
    num_replicas: Number of replicas, M.

  Returns:
    Partners [rounds][M]; M - 1 rounds for an even M, M rounds for an odd M. A
    replica that has no partner in a round is its own partner.
  """
  # The circle method: one replica stays in its place, and the others move on by
  # one place each round. If M is odd, one place is empty; its partner waits.
  places = num_replicas + num_replicas % 2
  rounds = []
  for shift in range(places - 1):
    partners = list(range(num_replicas))
    for offset in range(places // 2):
      one = (shift + offset) % (places - 1)
      other = (shift - offset) % (places - 1) if offset else places - 1
      if max(one, other) < num_replicas:
        partners[one] = other
        partners[other] = one
    rounds.append(partners)
  return rounds


class PairMean(Collective):
  """Averages over pairs of replicas that are drawn for each exchange.

  Replicas get different means, so each has outer parameters of its own. In
  float32 a pair also averages its outer parameters, without extra bytes. With a
  codec, only the pseudo-gradients are averaged, and the outer parameters of the
  replicas slowly move apart.

  Source: NoLoCo, Kolehmainen et al., 2025, arXiv 2506.10911, which draws from
  all ways to form pairs.
  Differs: pairs are drawn from the rounds of a tournament, because a compiled
  program must know all routes; each partner is equally likely in both cases.
  The move of a pair's outer parameters toward their mean is a part of the
  gradient for the outer optimizer. NoLoCo has a separate rate for this move.
  """

  is_shared = False
  averages_parameters = True

  def refusal(self, codec: Codec) -> str:
    """Refuses codecs whose state must be equal on all replicas (`LowRank`).

    Returns the reason, or "" for other codecs.
    """
    if not codec.has_shared_state:
      return ""
    return (
      "gives replicas different means, but the codec goes on from means that "
      "all share: take a codec without low_rank"
    )

  def operations(
    self, encoder: Encoder, shapes: tuple[Shape, ...], num_replicas: int
  ) -> list[Operation]:
    """Returns one permute of the codes and of a flag.

    The flag says whether the sender counts in the mean.
    """
    del num_replicas
    return [Permute(encoded_bytes(encoder, shapes) + FLAG_BYTES)]

  def reduce(
    self, encoder: Any, leaves: Sequence[Array], sender: Sender
  ) -> Coroutine:
    """Averages the leaves of one message over a pair of replicas.

    Only messages of participants count: with one participant the mean is its
    decoded message, with none it is zeros. A replica without a partner is a
    pair by itself. `Collective.reduce` has the arguments and the result.
    """
    rounds = tournament(jax.lax.axis_size(sender.axis_name))
    # The key is equal on all replicas, so all draw the same round.
    key = jax.random.fold_in(sender.key, _PAIRS_OF_KEY)
    number = jax.random.randint(key, (), 0, len(rounds))
    arrays = encoder.encode(leaves)
    flag = sender.participates.astype(jnp.uint8)[None]
    # The first `yield` comes before the message leaves, the second one before
    # the received arrays are used. So the caller can run inner steps while the
    # message travels. It gives the yielded arrays back (`coroutines`).
    arrays, flag = yield arrays, flag
    *partner_arrays, partner_flag = yield byte_collectives.swapped_in_pairs(
      [*arrays, flag], rounds, number, sender.axis_name
    )
    both = [
      jnp.stack([own, partner])
      for own, partner in zip(arrays, partner_arrays, strict=True)
    ]
    return mean_of_messages(
      encoder,
      [leaf.shape for leaf in leaves],
      own=arrays,
      arrays=both,
      weights=jnp.concatenate([flag, partner_flag]),
      is_counted=sender.participates,
    )
