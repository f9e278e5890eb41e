"""An exchange outside the package: gossip averaging between two replicas.

In each exchange a replica meets one other, and the two average their
pseudo-gradients and draw their outer parameters together. No operation waits
for all replicas, so each has outer parameters of its own.

Source: NoLoCo, arXiv 2506.10911, equations for the modified Nesterov step: the
gradient has a term gamma (phi_i - mean of phi over the group).
"""

import math

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from dilocox_jax.checks import require
from dilocox_jax.exchange.compressed import Compression
from dilocox_jax.exchange.feedback import Feedback
from dilocox_jax.plan.wire.collectives import (
  Collective,
  ExchangeKind,
  register_exchange,
)
from dilocox_jax.plan.wire.leaf import Shapes
from dilocox_jax.plan.wire.payload import Dense, Payload
from dilocox_jax.pytypes import Aggregator
from dilocox_jax.trees import all_finite

PULL = 0.5  # Weight of the difference of the outer parameters.


def pairings(num_replicas: int) -> list[list[tuple[int, int]]]:
  """Returns M - 1 ways to pair an even number of replicas.

  As in a tournament, replica M - 1 stays where it is and the others move by
  one, so that each meets each.
  """
  last = num_replicas - 1
  require(last % 2 == 1, f"num_replicas={num_replicas} must be even for gossip")
  rounds = []
  for turn in range(last):
    pairs = [(turn, last)] + [
      ((turn + k) % last, (turn - k) % last)
      for k in range(1, num_replicas // 2)
    ]
    rounds.append([*pairs, *((b, a) for a, b in pairs)])
  return rounds


def collectives(
  payload: Payload, shapes: Shapes, num_replicas: int, collective: str
) -> list[Collective]:
  """Lists what one exchange sends: a pseudo-gradient and parameters in fp32."""
  require(payload == Dense(), "gossip sends float32: set codec.name=float32")
  require(collective == "auto", "gossip has no collective: leave it at auto")
  pairings(num_replicas)
  num_values = sum(math.prod(shape) for shape in shapes.values())
  return [Collective("permute", 2 * 4 * num_values)]


def aggregator(
  compression: Compression, feedback: Feedback | None
) -> Aggregator:
  """Averages with one other replica, which changes from exchange to exchange.

  A pair is not averaged if a value of either is not finite.
  """
  require(feedback is None, "gossip loses nothing: drop error_feedback")
  axis_name = compression.axis_name

  def init(params):
    del params
    return jnp.int32(0)

  def average(values, state, params):
    own, unravel = ravel_pytree((values, params))
    rounds = pairings(jax.lax.psum(1, axis_name))
    other = jax.lax.switch(
      state % len(rounds),
      [lambda x, to=to: jax.lax.ppermute(x, axis_name, to) for to in rounds],
      own,
    )
    is_usable = all_finite((own, other))
    other_values, other_params = unravel(jnp.where(is_usable, other, own))

    def gradient(mine, theirs, param, other_param):
      mean = (mine + theirs) / 2 + PULL * (param - other_param) / 2
      return jnp.where(is_usable, mean, 0)

    mean = jax.tree.map(gradient, values, other_values, params, other_params)
    return mean, values, state + 1

  # The count is the same on all replicas, the result is not.
  return Aggregator(init, average, axes=None, is_shared=False)


def register() -> None:
  """Makes "gossip" a name for `exchange.kind`."""
  register_exchange("gossip", ExchangeKind(collectives, aggregator))
