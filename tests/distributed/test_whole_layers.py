import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.distributed.whole_layers import on_whole_layers
from dilocox_jax.optimizers import inner_optimizer
from dilocox_jax.plan.model.division import Division

DIVISIONS = (Division(2, 2), Division(4, 1), Division(1, 4, False))
# Rows are divided, columns are, both are, nothing is.
SHAPES = ((3, 8, 6), (4, 8, 8), (3, 6, 8), (3, 2, 6), (5, 2, 2), (3, 3, 5))


def update(gradients, state, params):
  """Needs whole matrices: no part of a result follows from a part of it."""

  def cubed(leaf):
    if leaf.ndim != 3:
      return 2 * leaf
    return leaf @ jnp.swapaxes(leaf, 1, 2) @ leaf

  moved = cubed(gradients["blocks"]["x"]["kernel"])
  state = jax.tree.map(lambda leaf: cubed(leaf) + 1, state)
  scale = gradients["blocks"]["n"]["scale"] * params["blocks"]["n"]["scale"]
  updates = {"blocks": {"x": {"kernel": moved}, "n": {"scale": scale}}}
  return updates, state


def trees(shape):
  rng = np.random.default_rng(0)
  return tuple(
    {
      "blocks": {
        "x": {"kernel": rng.integers(-3, 4, shape).astype(np.float32)},
        "n": {"scale": rng.integers(1, 4, shape[:2]).astype(np.float32)},
      }
    }
    for _ in range(3)
  )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_results_are_those_of_one_device(division, shape):
  given = trees(shape)
  replicas = Replicas(1, "mesh", division)
  axes = (None,) * 3
  mapped = jax.jit(replicas.map(on_whole_layers(update), axes, (None, None)))
  found = mapped(*(replicas.place_state(tree, None) for tree in given))
  # Small integers multiply without rounding errors.
  jax.tree.map(np.testing.assert_array_equal, found, update(*given))


@pytest.mark.parametrize("num_layers, each", [(4, 1), (5, 2), (9, 3)])
def test_a_device_has_its_share_of_the_layers(num_layers, each):
  seen = []

  def watched(gradients, state, params):
    seen.append(gradients["blocks"]["x"]["kernel"].shape)
    return update(gradients, state, params)

  replicas = Replicas(1, "mesh", Division(2, 2))
  mapped = replicas.map(on_whole_layers(watched), (None,) * 3, (None, None))
  jax.eval_shape(mapped, *trees((num_layers, 8, 8)))
  assert seen == [(each, 8, 8)]


def updated(division, num_layers):
  """Muon's update of kernels that devices divide, and its program."""
  rng = np.random.default_rng(0)
  leaf = rng.normal(size=(num_layers, 16, 24)).astype(np.float32)
  tree = {"blocks": {"mlp": {"kernel": jnp.asarray(leaf)}}}
  optimizer = inner_optimizer("muon", lambda step: 0.1, clip_norm=0.0)
  replicas = Replicas(1, "mesh", division)

  def update(tree):
    updates, _ = optimizer.update(tree, optimizer.init(tree), tree)
    return updates

  program = jax.jit(
    replicas.map(update, (None,), None),
    out_shardings=replicas.state_shardings(tree, None),
  )
  placed = replicas.place_state(tree, None)
  text = program.lower(placed).compile().as_text() or ""
  return jax.device_get(program(placed))["blocks"]["mlp"]["kernel"], text


@pytest.mark.parametrize("num_layers", [3, 4])
@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_a_device_updates_whole_layers_and_never_has_all(division, num_layers):
  expected, _ = updated(Division(), num_layers)
  found, text = updated(division, num_layers)
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
  assert f"[{num_layers},16,24]" not in text
