"""Four replicas of a Flax NNX model train with Streaming DiLoCo in 4 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import dilocox_jax as dx

jax.config.update("jax_num_cpu_devices", 4)
inputs = (
  np.random.default_rng(0).normal(size=[80, 4, 32, 8]).astype(np.float32)
)  # steps, replicas
targets = np.sin(inputs.sum(-1, keepdims=True))
layers = (
  nnx.Linear(8, 32, rngs=nnx.Rngs(0)),
  nnx.Linear(32, 1, rngs=nnx.Rngs(1)),
)
graph, start = nnx.split(nnx.Sequential(layers[0], nnx.tanh, layers[1]))
tx = dx.streaming_diloco(
  *(optax.adamw(1e-2), optax.sgd(0.7, momentum=0.6, nesterov=True)),
  **dict(sync_interval=10, num_fragments=2, overlap_steps=3),
  **dict(
    codec={"name": "int", "bits": 4},
    error_feedback=True,
    collective="all_gather",
  ),
)


def step(params, state, x, y):
  """One step of one replica."""

  def loss(params):
    return jnp.mean((nnx.merge(graph, params)(x) - y) ** 2)

  value, gradients = jax.value_and_grad(loss)(params)
  updates, state = tx.update(gradients, state, params)
  return optax.apply_updates(params, updates), state, value


stacked = jax.vmap(step, axis_name="replica")  # All replicas on one device.
auto, replica = jax.sharding.AxisType.Auto, jax.P("replica")  # Or on devices:
mesh = jax.make_mesh((4,), ("replica",), axis_types=(auto,))
spread = jax.shard_map(
  jax.vmap(step), mesh=mesh, in_specs=replica, out_specs=replica
)
for name, program in {
  "vmap": jax.jit(stacked),
  "shard_map": jax.jit(spread),
}.items():
  params = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), start)
  state = jax.vmap(tx.init)(params)
  for x, y in zip(inputs, targets, strict=True):
    params, state, losses = program(params, state, x, y)
  print(name, losses)
