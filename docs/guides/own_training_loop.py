"""Four replicas of a Flax NNX model train with Streaming DiLoCo in 4 bits."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import dilocox_jax as dx

jax.config.update("jax_num_cpu_devices", 4)
inputs = jax.random.normal(jax.random.key(0), (80, 4, 32, 8))  # steps, replicas
targets = jnp.sin(inputs.sum(-1, keepdims=True))
rngs = nnx.Rngs(0)
layers = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)
graph, start = nnx.split(nnx.Sequential(layers[0], nnx.tanh, layers[1]))
inner = optax.sgd(0.05, momentum=0.9)
schedule = {"sync_interval": 10, "num_fragments": 2, "overlap_steps": 3}
sent = dx.exchange("int(bits=4)", feedback=1.0, collective="all_gather")
tx = dx.streaming_diloco(inner, **schedule, exchange=sent)


def step(params, state, x, y):
  """One step of one replica."""

  def loss(params):
    return jnp.mean((nnx.merge(graph, params)(x) - y) ** 2)

  value, gradients = jax.value_and_grad(loss)(params)
  updates, state = tx.update(gradients, state, params)
  return optax.apply_updates(params, updates), state, value


def last_losses(program):
  """Trains from the start; returns every replica's last loss."""
  params = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), start)
  state = jax.vmap(tx.init)(params)
  for x, y in zip(inputs, targets, strict=True):
    params, state, losses = program(params, state, x, y)
  return losses


print("vmap", last_losses(jax.jit(jax.vmap(step, axis_name="replica"))))
axes = (jax.sharding.AxisType.Auto,)
spec = jax.P("replica")
mesh = jax.make_mesh((4,), ("replica",), axis_types=axes)
on_devices = jax.shard_map(
  jax.vmap(step), mesh=mesh, in_specs=spec, out_specs=spec
)
print("shard_map", last_losses(jax.jit(on_devices)))
