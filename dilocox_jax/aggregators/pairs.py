"""Each replica averages with one other replica, another one each time.

No replica waits for all others, and the bytes do not grow with their number.
Every exchange draws its pairs from its number, so all replicas draw the same
and nobody has to tell them. The pairs are those of one round of a round-robin
tournament, e.g. of M = 4 replicas:

    round 0   0-3  1-2
    round 1   1-3  2-0
    round 2   2-3  0-1

In M - 1 rounds each replica meets each other one once, so every other replica
is equally likely to be the partner. With an odd number there are M rounds, and
in each of them another replica waits.
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

# Keeps the random number of the pairs apart from those that codecs draw.
_PAIRS_OF_KEY = 1


def tournament(num_replicas: int) -> list[list[int]]:
  """Returns the partner of each replica in every round of a tournament.

  One replica stays, and the others move on one place each round (the circle
  method). A replica that waits is its own partner.

  Args:
    num_replicas: Number of replicas, M.

  Returns:
    Partners [rounds][M]; M - 1 rounds for an even M, M for an odd one.
  """
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
  """Averages over pairs of replicas that are drawn anew for each exchange.

  Replicas that get different means have outer parameters of their own. In
  float32 a pair averages these with the pseudo-gradients, without a byte more.
  With a codec only the pseudo-gradients are averaged, and the outer parameters
  slowly walk apart.

  Source: NoLoCo, Kolehmainen et al., 2025, arXiv 2506.10911, which draws from
  all ways to form pairs. Differs: the ways are the rounds of a tournament, so
  that compiled programs know all routes. Each partner is as likely there. A
  pair goes all the way to the mean of its outer parameters, by the outer
  optimizer, where NoLoCo has a rate of its own for that.
  """

  is_shared = False
  averages_parameters = True

  def refusal(self, codec: Codec) -> str:
    """Refuses codecs that need all replicas to have got the same means."""
    if not codec.has_shared_state:
      return ""
    return (
      "gives replicas different means, but the codec goes on from means that "
      "all share: take a codec without low_rank"
    )

  def operations(
    self, encoder: Encoder, shapes: tuple[Shape, ...], num_replicas: int
  ) -> list[Operation]:
    """Returns one message to the partner, which has a flag."""
    del num_replicas
    return [Permute(encoded_bytes(encoder, shapes) + FLAG_BYTES)]

  def reduce(
    self, encoder: Any, leaves: Sequence[Array], sender: Sender
  ) -> Coroutine:
    """Averages as `Collective.reduce` says, over a pair.

    A replica whose partner does not participate, or that waits, gets what it
    has sent.
    """
    rounds = tournament(jax.lax.axis_size(sender.axis_name))
    key = jax.random.fold_in(sender.key, _PAIRS_OF_KEY)
    number = jax.random.randint(key, (), 0, len(rounds))
    arrays = encoder.encode(leaves)
    flag = sender.participates.astype(jnp.uint8)[None]
    arrays, flag = yield arrays, flag
    *of_partner, partner_flag = yield byte_collectives.swapped_in_pairs(
      [*arrays, flag], rounds, number, sender.axis_name
    )
    both = [
      jnp.stack([one, other])
      for one, other in zip(arrays, of_partner, strict=True)
    ]
    return mean_of_messages(
      encoder,
      [leaf.shape for leaf in leaves],
      own=arrays,
      arrays=both,
      weights=jnp.concatenate([flag, partner_flag]),
      is_counted=sender.participates,
    )
