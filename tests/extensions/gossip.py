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

import dilocox_jax as dx

PULL = 0.5  # Weight of the difference of the outer parameters.


def pairings(num_replicas: int) -> list[list[tuple[int, int]]]:
  """Returns M - 1 ways to pair an even number of replicas.

  As in a tournament, replica M - 1 stays where it is and the others move by
  one, so that each meets each.
  """
  last = num_replicas - 1
  if last % 2 == 0:
    raise ValueError(f"num_replicas={num_replicas} must be even for gossip")
  rounds = []
  for turn in range(last):
    pairs = [(turn, last)] + [
      ((turn + k) % last, (turn - k) % last)
      for k in range(1, num_replicas // 2)
    ]
    rounds.append([*pairs, *((b, a) for a, b in pairs)])
  return rounds


def collectives(codec, shapes, num_replicas, collective="auto"):
  """Lists what one exchange sends: a pseudo-gradient and parameters in fp32."""
  _check_settings(codec, collective=collective)
  pairings(num_replicas)
  num_values = sum(math.prod(shape) for shape in shapes.values())
  return [dx.Collective("permute", 2 * 4 * num_values)]


def aggregator(
  codec="float32",
  *,
  feedback=0.0,
  keep_unsent=False,
  collective="auto",
  axis_name="replica",
  **others,
) -> dx.Aggregator:
  """Averages with one other replica, which changes from exchange to exchange.

  A pair is not averaged if a value of either is not finite.
  """
  del others  # They are about residuals and codecs.
  _check_settings(codec, bool(feedback) or keep_unsent, collective)

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
    is_usable = jnp.all(jnp.isfinite(own) & jnp.isfinite(other))
    other_values, other_params = unravel(jnp.where(is_usable, other, own))

    def gradient(mine, theirs, param, other_param):
      mean = (mine + theirs) / 2 + PULL * (param - other_param) / 2
      return jnp.where(is_usable, mean, 0)

    mean = jax.tree.map(gradient, values, other_values, params, other_params)
    return mean, values, state + 1

  # The count is the same on all replicas, the result is not.
  return dx.Aggregator(init, average, axes=None, is_shared=False)


def _check_settings(codec, makes_up=False, collective="auto") -> None:
  if codec not in ("float32", dx.named_codec("float32")) or makes_up:
    raise ValueError("gossip sends all of float32: set exchange.codec=float32")
  if collective != "auto":
    raise ValueError("gossip has no collective: leave it at auto")


def register() -> None:
  """Makes "gossip" a name for `exchange.kind`."""
  kind = dx.ExchangeKind(collectives, aggregator)
  dx.register_exchange("gossip", kind)
