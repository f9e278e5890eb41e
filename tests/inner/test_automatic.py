"""JAX's partitioner divides the work of a model that a user brings."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dilocox_jax.distributed.partition_rules import divide_model
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.inner import automatic

NUM_LAYERS = 6
WIDTH = 64


def loss(params, batch):
  @jax.checkpoint
  def layer(hidden, kernels):
    up, down = kernels
    return hidden + jnp.tanh(hidden @ up) @ down, None

  kernels = params["up"], params["down"]
  hidden, _ = jax.lax.scan(layer, batch, kernels)
  return jnp.mean(hidden**2)


def parameters():
  rng = np.random.default_rng(0)

  def kernel(*shape):
    return jnp.asarray(rng.normal(size=shape) / 16, jnp.float32)

  return {
    "up": kernel(NUM_LAYERS, WIDTH, 4 * WIDTH),
    "down": kernel(NUM_LAYERS, 4 * WIDTH, WIDTH),
  }


def test_a_scan_collects_one_layer_at_a_time_and_gradients_stay_divided():
  params = parameters()
  batch = np.random.default_rng(1).normal(size=(1, 2048, WIDTH))
  batch = jnp.asarray(batch, jnp.float32)
  division = divide_model(params, num_data_shards=4)
  replicas = Replicas(1, "mesh", division)
  gradient = automatic.with_divided_gradients(
    jax.value_and_grad(automatic.with_divided_rows(loss, division)), division
  )
  program = jax.jit(replicas.map(gradient, (None, 0), (None, None)))
  placed = replicas.place_state(params, None)
  text = program.lower(placed, batch).compile().as_text() or ""
  gathered = set(re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text))
  layer_shapes = {f"{WIDTH},{4 * WIDTH}", f"{4 * WIDTH},{WIDTH}"}
  assert layer_shapes & gathered
  assert not any(shape.startswith(f"{NUM_LAYERS},") for shape in gathered), (
    gathered
  )
  value, gradients = program(placed, batch)
  expected_value, expected = jax.value_and_grad(loss)(params, batch[0])
  np.testing.assert_allclose(value, expected_value, rtol=1e-5)
  for name, leaf in gradients.items():
    np.testing.assert_allclose(leaf, expected[name], rtol=1e-4, atol=1e-6)
    assert leaf.sharding.is_equivalent_to(placed[name].sharding, leaf.ndim)


def test_tokens_look_up_a_divided_table_on_both_kinds_of_shards():
  """XLA aborts this process if the data shards divide the table."""
  rng = np.random.default_rng(0)
  params = parameters()
  params["table"] = jnp.asarray(rng.normal(size=(64, WIDTH)), jnp.float32)

  def partition(path, shape):
    del shape
    return {
      "up": PartitionSpec(None, "data", "tensor"),
      "down": PartitionSpec(None, "tensor", "data"),
      "table": PartitionSpec("data", None),
    }[path]

  def loss_of_tokens(params, tokens):
    return loss(params, params["table"][tokens])

  # Both replicas read the same tokens, so their results are equal.
  tokens = jnp.asarray(rng.integers(64, size=512), jnp.int32)
  division = divide_model(
    params, num_data_shards=2, num_tensor_shards=2, partition=partition
  )
  replicas = Replicas(2, "mesh", division)
  gradient = automatic.with_divided_gradients(
    jax.value_and_grad(automatic.with_divided_rows(loss_of_tokens, division)),
    division,
  )
  program = jax.jit(replicas.map(gradient, (None, None), (None, None)))
  placed = replicas.place_state(params, None)
  value, gradients = program(placed, tokens)
  expected_value, expected = jax.value_and_grad(loss_of_tokens)(params, tokens)
  np.testing.assert_allclose(value, expected_value, rtol=1e-5)
  for name, leaf in gradients.items():
    np.testing.assert_allclose(leaf, expected[name], rtol=1e-4, atol=1e-6)
    assert leaf.sharding.is_equivalent_to(placed[name].sharding, leaf.ndim)
  text = program.lower(placed, tokens).compile().as_text() or ""
  gathered = set(re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text))
  assert f"64,{WIDTH}" in gathered  # The table.
  assert not any(shape.startswith(f"{NUM_LAYERS},") for shape in gathered), (
    gathered
  )
