"""A replica of a small network, as a program on a machine of its own.

python -m tests.mailbox.unlike PLACE NUMBER METHOD ROUNDS FILE [KIND]

It meets the other replica in the folder PLACE, and writes its outer parameters
after some of the rounds to FILE, with the loss on data that nobody trains on.
KIND is the rounding of its products ("tf32", see tests/rounded_products.py).
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dilocox_jax as dx
from dilocox_jax.rounds.mailbox_runtime import MailboxRuntime
from tests.mailbox import apart
from tests.rounded_products import round_products

NUM_REPLICAS = 2
WIDTH = 32
INPUTS = 16
NOTED_ROUNDS = (1, 10, 40, 200)
INNER = optax.adamw(3e-3)


def first_params():
  """Equal in all replicas up to rounding: each draws them for itself."""
  shapes = {"a": (INPUTS, WIDTH), "b": (WIDTH, WIDTH), "c": (WIDTH, 1)}
  keys = jax.random.split(jax.random.key(0), len(shapes))
  return {
    name: jax.random.normal(key, shape) / jnp.sqrt(shape[0])
    for key, (name, shape) in zip(keys, shapes.items(), strict=True)
  }


def loss(params, x):
  hidden = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])
  target = jnp.sin(x.sum(axis=-1, keepdims=True))
  return jnp.mean((hidden @ params["c"] - target) ** 2)


def step(params, state, batch):
  value, gradient = jax.value_and_grad(loss)(params, batch)
  updates, state = INNER.update(gradient, state, params)
  norm = optax.tree.norm(gradient)
  return optax.apply_updates(params, updates), state, (value, norm)


def inputs(seed, *shape):
  """Inputs of the network, [*shape, 16]."""
  rng = np.random.default_rng(seed)
  return rng.normal(size=[*shape, INPUTS]).astype(np.float32)


def rounds_in(place, number, method):
  schedule, settings = apart.METHODS[method]
  exchange = dx.mailbox(
    place,
    name=f"r{number}",
    secret=apart.SECRET,
    rules=apart.rules(NUM_REPLICAS, grace_s=120.0),
    **settings,
  )
  return dx.make_rounds(
    schedule,
    step,
    optax.sgd(0.7, momentum=0.6, nesterov=True),
    num_replicas=1,
    exchange=exchange,
  )


def main(place, number, method, num_rounds, file, kind=""):
  if kind:
    round_products(kind)
  rounds = rounds_in(place, int(number), method)
  assert isinstance(rounds.runtime, MailboxRuntime)
  params = first_params()
  state = dx.join_rounds(rounds, params, INNER.init(params))
  noted = {}
  for done in range(1, int(num_rounds) + 1):
    batch = inputs([int(number), done], 1, apart.H, 16)
    state, *_ = rounds.run(state, batch)
    if done in NOTED_ROUNDS:
      outer = rounds.outer_params(state)
      noted |= {f"{done}.{name}": leaf for name, leaf in outer.items()}
  state, _ = rounds.flush(state)
  settled = rounds.runtime.client.settled
  np.savez(
    file,
    **noted,
    num_members=[len(each["members"]) for each in settled],
    loss=loss(rounds.outer_params(state), inputs(1, 512)),
  )


if __name__ == "__main__":
  main(*sys.argv[1:])
