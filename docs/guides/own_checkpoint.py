"""Four replicas on four devices, saved with Orbax.

The same command again goes on from the newest checkpoint, in a new process:

    python docs/guides/own_checkpoint.py runs/own 20
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import dilocox_jax as dx

jax.config.update("jax_num_cpu_devices", 4)
NUM_REPLICAS = 4
SAVE_EVERY = 5
spec = jax.P("replica")
axes = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((NUM_REPLICAS,), ("replica",), axis_types=axes)
place = jax.NamedSharding(mesh, spec)  # A replica on each device.
inner = optax.adamw(1e-2)
tx = dx.streaming_diloco(
  inner, sync_interval=6, num_fragments=2, overlap_steps=2
)


def first_values():
  """Returns what a checkpoint holds: parameters and state of all replicas."""
  weights = {"w": jnp.zeros((8, 1)), "b": jnp.zeros(1)}
  params = jax.tree.map(lambda leaf: jnp.stack([leaf] * NUM_REPLICAS), weights)
  return {"params": params, "state": jax.vmap(tx.init)(params)}


def step(params, state, x):
  """One step of one replica."""

  def loss(params):
    wanted = jnp.sin(x.sum(axis=-1, keepdims=True))
    return jnp.mean((x @ params["w"] + params["b"][None] - wanted) ** 2)

  value, gradients = jax.value_and_grad(loss)(params)
  updates, state = tx.update(gradients, state, params)
  return optax.apply_updates(params, updates), state, value


def restored(checkpointer, folder, number):
  """Returns the values of a checkpoint, each replica on its own device.

  Orbax is told the shape of each array and where it belongs. Arrays made by
  `jnp.stack` as a template would all be on the first device.
  """
  shapes = jax.eval_shape(first_values)
  targets = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
    shapes,
  )
  return checkpointer.restore(folder / str(number), targets)


folder = pathlib.Path(sys.argv[1]).absolute()
num_steps = int(sys.argv[2])
checkpointer = ocp.StandardCheckpointer()
# A checkpoint that is not complete has a longer name.
saved = [int(each.name) for each in folder.glob("*") if each.name.isdigit()]
begun = max(saved, default=0)
if saved:
  print(f"going on from step {begun}")
  values = restored(checkpointer, folder, begun)
else:
  values = jax.device_put(first_values(), place)
replicas = jax.jit(
  jax.shard_map(jax.vmap(step), mesh=mesh, in_specs=spec, out_specs=spec)
)
params = values["params"]
state = values["state"]
for number in range(begun + 1, num_steps + 1):
  batch = jax.random.normal(jax.random.key(number), (NUM_REPLICAS, 32, 8))
  params, state, losses = replicas(params, state, batch)
  if number % SAVE_EVERY == 0:
    kept = {"params": params, "state": state}
    checkpointer.save(folder / str(number), kept)
checkpointer.wait_until_finished()
model = dx.outer_params(state, params)
print("outer weights", model["w"][0].ravel().tolist())
