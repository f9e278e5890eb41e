"""Parameters come to the stages, and gradients back, whatever the division."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.inner.sharded import sharded_gradient, sharded_loss
from dilocox_jax.plan.model.division import STAGE_AXIS, Division, StageLayers
from tests.tiers import slow

DIM = 8
BATCH_SIZE = 8
LENGTH = 3
CASES = {
  "even": (4, Division(2, 2)),
  "tensor": (4, Division(2, 2, num_tensor_shards=2)),
  "stages only": (4, Division(1, 4)),
  "data only": (3, Division(4, 1)),
  "uneven": (5, Division(2, 2, layers_on_stages=False)),
  "5 over 4": (5, Division(1, 4, layers_on_stages=False)),
}


def parameters(num_layers):
  rng = np.random.default_rng(0)

  def draw(*shape):
    return jnp.asarray(rng.integers(-4, 5, shape), jnp.float32)

  return {
    "embed": {"embedding": draw(16, DIM)},
    "blocks": {
      "mlp": {"up": {"kernel": draw(num_layers, DIM, 2 * DIM)}},
      "norm": {"scale": draw(num_layers, DIM)},
    },
    "final_norm": {"scale": draw(DIM)},
  }


def weighted(leaf):
  """Sums of squares by layer in which every place counts differently."""
  size = int(np.prod(leaf.shape[1:]))
  weights = jnp.linspace(0.5, 1.5, size, dtype=jnp.float32)
  flat = leaf.reshape(leaf.shape[0], size)
  return jnp.sum(flat**2 * weights[None], axis=1)


def value(params, tokens):
  """A number on which every leaf and token has its own influence."""
  layers = jnp.arange(1, params["blocks"]["norm"]["scale"].shape[0] + 1)
  layers = layers.astype(jnp.float32)
  up = weighted(params["blocks"]["mlp"]["up"]["kernel"]) * layers
  norm = weighted(params["blocks"]["norm"]["scale"]) * layers**2
  seen = jnp.mean(params["embed"]["embedding"][tokens] ** 2)
  last = weighted(params["final_norm"]["scale"][None])[0]
  return jnp.mean(up + norm) + seen + 2 * last


def by_stage(parts):
  """Stands for the pipeline: each stage adds what its own layers do."""
  table = jnp.asarray(parts.table)

  def stage_gradient(blocks, rest, tokens):
    stage = jax.lax.axis_index(STAGE_AXIS)
    numbers = table[stage]

    def part(blocks, rest):
      layers = (numbers + 1).astype(jnp.float32)
      is_own = numbers < parts.num_layers
      up = weighted(blocks["mlp"]["up"]["kernel"]) * layers
      norm = weighted(blocks["norm"]["scale"]) * layers**2
      own = jnp.sum(jnp.where(is_own, up + norm, 0.0)) / parts.num_layers
      seen = jnp.mean(rest["embed"]["embedding"][tokens] ** 2)
      last = 2 * weighted(rest["final_norm"]["scale"][None])[0]
      first = jnp.where(stage == 0, seen, 0.0)
      return own + first + jnp.where(stage == parts.num_stages - 1, last, 0.0)

    loss, gradients = jax.value_and_grad(part, argnums=(0, 1))(blocks, rest)
    return loss, *gradients

  return stage_gradient


@pytest.mark.parametrize(
  "name",
  ["even", "uneven", "tensor", *slow("stages only", "data only", "5 over 4")],
)
def test_layers_reach_their_stages_and_gradients_come_back(name):
  num_layers, division = CASES[name]
  parts = StageLayers(num_layers, division.num_stages)
  params = parameters(num_layers)
  tokens = np.random.default_rng(1).integers(0, 16, (BATCH_SIZE, LENGTH))
  replicas = Replicas(1, "mesh", division)
  gradient = sharded_gradient(by_stage(parts), division, parts, 2)
  program = jax.jit(replicas.map(gradient, (None, 0), (None, None)))
  placed = replicas.place_state(params, None)
  loss, gradients = program(placed, tokens.astype(np.int32)[None])
  expected = jax.value_and_grad(value)(params, tokens)
  np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
  for new, old, right in zip(
    *map(jax.tree.leaves, (gradients, placed, expected[1])), strict=True
  ):
    np.testing.assert_allclose(new, right, rtol=1e-6, atol=1e-6)
    # JAX's partitioner decides whether tensor shards divide a gradient.
    if division.num_tensor_shards == 1:
      assert new.sharding.is_equivalent_to(old.sharding, new.ndim)


@pytest.mark.parametrize("num_rows", [6, 3, *slow(8)])
def test_shards_divide_the_rows_of_an_evaluation_if_they_can(num_rows):
  """Two shards have 4 and 3 rows of 8 and 6, and each computes all of 3."""
  division = Division(2, 2)
  parts = StageLayers(4, division.num_stages)
  cut = []

  def stage_loss(blocks, rest, tokens):
    cut.append(tokens.shape[:2])
    whole = by_stage(parts)
    # Losses of micro-batches are means, and so is what they are added up to.
    return jnp.mean(
      jnp.stack([whole(blocks, rest, batch)[0] for batch in tokens])
    )

  replicas = Replicas(1, "mesh", division)
  params = parameters(4)
  shape = (2, num_rows, LENGTH)
  tokens = np.random.default_rng(1).integers(0, 16, shape).astype(np.int32)
  loss = sharded_loss(stage_loss, division, parts, num_rows=2)
  program = jax.jit(replicas.map(loss, (None, None), None))
  seen = program(replicas.place_state(params, None), tokens)
  np.testing.assert_allclose(
    seen, value(params, tokens.reshape(-1, LENGTH)), rtol=1e-6
  )
  assert set(cut) == {{8: (4, 2), 6: (6, 1), 3: (6, 1)}[num_rows]}
