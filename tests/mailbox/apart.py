"""Replicas that train by rounds, together in one runtime or each for itself."""

import dataclasses
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dilocox_jax as dx
from dilocox_jax.coroutines import as_function
from dilocox_jax.plan.schedule import methods

H = 4
ROUNDS = 10
LAYERS = 2
SECRET = b"s" * 64
INNER = optax.sgd(0.1)
# Name -> method and settings of its exchange.
METHODS: dict[str, tuple[dx.Method, dict[str, Any]]] = {
  "diloco": (methods.diloco(H), {}),
  "overlap_loco": (
    methods.overlap_loco(H, 2),
    {"codec": "int(bits=1)", "feedback": 1.0},
  ),
  "dilocox": (
    methods.dilocox(H),
    {"codec": "low_rank(rank=2)+int(bits=4)", "feedback": 1.0},
  ),
  "streaming_diloco": (methods.streaming_diloco(H, 2, 1), {"codec": "e3m0"}),
  "delayed": (methods.delayed(H, 2, 1), {}),  # Nothing makes up for losses.
}


def first_params():
  """Equal in all replicas."""
  rng = np.random.default_rng(0)
  return {
    "blocks": {"w": jnp.float32(rng.normal(size=[LAYERS, 8, 6]))},
    "head": jnp.float32(rng.normal(size=[6, 5])),
  }


def step(params, state, batch):
  """Moves toward a point of the replica's own."""

  def loss(params):
    gaps = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), params, batch)
    return sum(jax.tree.leaves(gaps))

  value, gradient = jax.value_and_grad(loss)(params)
  updates, state = INNER.update(gradient, state, params)
  norm = optax.tree.norm(gradient)
  return optax.apply_updates(params, updates), state, (value, norm)


def batches(num_replicas, start, stop):
  """Points for every replica and step."""
  rng = np.random.default_rng(1)
  shapes = jax.tree.map(lambda leaf: leaf.shape, first_params())
  return jax.tree.map(
    lambda shape: rng.normal(size=[num_replicas, ROUNDS * H, *shape])[
      :, start:stop
    ].astype(np.float32),
    shapes,
    is_leaf=lambda shape: isinstance(shape, tuple),
  )


def rounds_of(method, exchange, num_replicas):
  return dx.make_rounds(
    method,
    step,
    optax.sgd(0.7, momentum=0.6, nesterov=True),
    num_replicas=num_replicas,
    num_layers=LAYERS,
    exchange=exchange,
  )


def trained(rounds, own=slice(None)):
  """Returns losses [M, steps] and the outer parameters after a flush."""
  params = first_params()
  losses = []
  state = rounds.init(params, INNER.init(params))
  for number in range(ROUNDS):
    points = batches(3, number * H, (number + 1) * H)
    points = jax.tree.map(lambda leaf: leaf[own], points)
    state, metrics, _ = rounds.run(state, points)
    losses.append(np.asarray(metrics.loss))
  state, _ = rounds.flush(state)
  outer = jax.tree.map(np.asarray, rounds.outer_params(state))
  return np.concatenate(losses, axis=1), outer


def broken(aggregator, factor_of, event=None):
  """Multiplies what replicas send, as a broken device might; or once only."""

  def average(values, state, params=None):
    factor = factor_of()
    if event is not None:
      factor = jnp.where(state.count == event, factor, 1.0)
    values = jax.tree.map(lambda x: x * factor.astype(x.dtype), values)
    return (yield from aggregator.average_coroutine(values, state, params))

  return aggregator._replace(average=as_function(average))


def broken_in_a_store(exchange, factor_of, event=None):
  """The exchange of a mailbox, with `broken` messages."""
  aggregator = broken(exchange.aggregator, factor_of, event)
  return dataclasses.replace(exchange, aggregator=aggregator)


def together(name, num_replicas, factors=None, own=slice(None)):
  """Trains all replicas; what each sends is multiplied by its factor."""
  method, settings = METHODS[name]
  # Where a mean is rounded on its way, the result is another one.
  way = "auto" if name == "diloco" else "all_gather"
  exchange = dx.exchange(**settings, collective=way)
  if factors:
    exchange = dx.norm_filter(exchange, 5.0)
    every = jnp.float32(factors)
    exchange = broken(exchange, lambda: every[jax.lax.axis_index("replica")])
  return trained(rounds_of(method, exchange, num_replicas), own)


def alone(where, name, number, factor=1, event=None, **more):
  """Trains one replica of several."""
  method, settings = METHODS[name]
  exchange = dx.mailbox(
    where, name=f"r{number}", secret=SECRET, **settings, **more
  )
  exchange = broken_in_a_store(exchange, lambda: jnp.float32(factor), event)
  rounds = rounds_of(method, exchange, 1)
  return trained(rounds, slice(number, number + 1))


def rules(num_replicas, max_norm_ratio=100.0, **more):
  """Rules under which all messages that are listed keep their full weight."""
  return dx.MailboxRules(
    num_replicas,
    max_norm_ratio=max_norm_ratio,
    full_weight_ratio=1e6,
    **more,
  )


def in_threads(function, num_replicas, store=None):
  """Calls a function of a replica's number for all at once.

  In a store they take their seats in turn: sums follow the order of seats.
  """
  results = {}
  errors = []

  def run(number):
    try:
      while store and not errors and len(store.sizes("seat")) < number:
        time.sleep(0.01)
      results[number] = function(number)
    except BaseException as error:
      errors.append(error)

  threads = [
    threading.Thread(target=run, args=[n], daemon=True)
    for n in range(num_replicas)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(400)
  if errors:
    raise errors[0]
  return [results[number] for number in range(num_replicas)]
