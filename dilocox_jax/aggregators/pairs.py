"""Each replica averages with one other replica, drawn for each exchange.

No replica waits for all others, and the bytes of a replica do not grow with M,
the number of replicas. The pairs of an exchange are drawn by the random key of
the exchange. The key is equal on all replicas, so all draw the same pairs. The
pairs are one round of a round-robin tournament, which for M = 4 has the rounds

    round 0   0-3  1-2
    round 1   1-3  2-0
    round 2   2-3  0-1

In the M - 1 rounds, each replica meets every other replica once. So all other
replicas are equally likely to be the partner. If M is odd, there are M rounds,
and in each of them another replica has no partner.
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

# Makes the random number of the pairs independent of those that codecs draw.
_PAIRS_OF_KEY = 1


def tournament(num_replicas: int) -> list[list[int]]:
  """Returns the partner of each replica in every round of a tournament.

  The rounds come from the circle method: one replica stays in its place, and
  the others move on by one place each round. A replica that has no partner in a
  round is its own partner.

  Args:
    num_replicas: Number of replicas, M.

  Returns:
    Partners [rounds][M]; M - 1 rounds for an even M, M rounds for an odd M.
  """
  # If M is odd, one place is empty, and its partner waits.
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

  Replicas get different means, so each has outer parameters of its own. In
  float32 a pair also averages its outer parameters, without extra bytes
  (`CompressedMean._sends_parameters`). With a codec only the pseudo-gradients
  are averaged, and the outer parameters slowly move apart.

  Source: NoLoCo, Kolehmainen et al., 2025, arXiv 2506.10911, which draws from
  all ways to form pairs.
  Differs: pairs are drawn from the rounds of a tournament, so that compiled
  programs know all routes; each partner is equally likely in both cases. The
  outer parameters of a pair move to their mean as a part of the gradient of the
  outer optimizer, where NoLoCo has a separate rate for this move.
  """

  is_shared = False
  averages_parameters = True

  def refusal(self, codec: Codec) -> str:
    """Refuses a codec whose state must be equal on all replicas."""
    if not codec.has_shared_state:
      return ""
    return (
      "gives replicas different means, but the codec goes on from means that "
      "all share: take a codec without low_rank"
    )

  def operations(
    self, encoder: Encoder, shapes: tuple[Shape, ...], num_replicas: int
  ) -> list[Operation]:
    """Returns one message to the partner, with a flag."""
    del num_replicas
    return [Permute(encoded_bytes(encoder, shapes) + FLAG_BYTES)]

  def reduce(
    self, encoder: Any, leaves: Sequence[Array], sender: Sender
  ) -> Coroutine:
    """Averages as `Collective.reduce` says, over a pair.

    If the partner does not participate, or the replica has no partner, the mean
    is the replica's own message, decoded.
    """
    rounds = tournament(jax.lax.axis_size(sender.axis_name))
    key = jax.random.fold_in(sender.key, _PAIRS_OF_KEY)
    number = jax.random.randint(key, (), 0, len(rounds))
    arrays = encoder.encode(leaves)
    flag = sender.participates.astype(jnp.uint8)[None]
    # Stops before the message leaves, and before the received arrays are used.
    # The caller may run inner steps while the message travels. It sends the
    # yielded arrays back (`coroutines`).
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
