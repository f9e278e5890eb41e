"""Data shards that divide the tables compute what one device would."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dilocox_jax.inner import vocabulary
from dilocox_jax.models import loss as losses
from dilocox_jax.models.attention import segment_ids
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.model.division import DATA_AXIS
from dilocox_jax.plan.model.shapes import ModelShape

SHARDS = 4
ROWS = 2
LENGTH = 5
SHAPE = ModelShape(1, 8, 2, 12, 24, positions="learned", num_positions=LENGTH)
ROW = PartitionSpec(DATA_AXIS)
COLUMN = PartitionSpec(None, DATA_AXIS)
PLACES = {
  "embed": {"embedding": ROW, "positions": PartitionSpec()},
  "final_norm": {"scale": PartitionSpec()},
  "head": {"kernel": COLUMN},
}


def drawn(dtype=jnp.float32):
  model = build_model(SHAPE, dtype=dtype)
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  params = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32), shapes
  )
  return model, {name: params[name] for name in PLACES}


def tokens(*shape):
  return np.random.default_rng(1).integers(0, 24, shape, np.int32)


def over_shards(function, *places, out: Any = ROW):
  """Maps a function of a shard's parts over four shards."""
  return jax.jit(
    jax.shard_map(
      function,
      mesh=Mesh(np.asarray(jax.devices()[:SHARDS]), (DATA_AXIS,)),
      in_specs=places,
      out_specs=out,
      check_vma=False,
    )
  )


@pytest.mark.parametrize("end_of_text", [None, 3])
def test_tokens_have_the_same_rows_and_none_outside_the_vocabulary(end_of_text):
  model, params = drawn(jnp.bfloat16)
  read = tokens(SHARDS * ROWS, LENGTH)
  context = {}
  if end_of_text is not None:
    context = {"segments": segment_ids(jnp.asarray(read), end_of_text)}
  embed = vocabulary.divided_embed(model.embed)
  over = over_shards(lambda p, t, c: embed(p, t, **c), PLACES, ROW, ROW)
  expected = jax.jit(model.embed)(params, read, **context)
  np.testing.assert_array_equal(over(params, read, context), expected)
  read[1, 2] = 24
  read[0, 1] = -1
  is_lost = np.isnan(over(params, read, context)).all(axis=1)
  assert list(np.flatnonzero(is_lost)) == [1, 1 * LENGTH + 2]


@functools.cache
def _stream():
  shape = SHARDS * ROWS * LENGTH, SHAPE.model_dim
  return np.random.default_rng(2).normal(size=shape).astype(np.float32)


# Large logits overflow unless the largest of all shards is subtracted.
@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize("chunk_tokens", [0, 4])
def test_the_loss_and_its_gradients_are_those_of_one_device(
  scale, chunk_tokens
):
  model, params = drawn()
  params["head"]["kernel"] *= scale
  targets = jnp.asarray(tokens(SHARDS * ROWS * LENGTH))

  def divided(params, x, targets):
    logits = vocabulary.divided_logits(functools.partial(model.logits, params))
    return losses.chunked_token_loss(
      logits, x, targets, 0.1, chunk_tokens, vocabulary.divided_scores
    )

  def local(params, x, targets):
    value, (for_params, for_x) = jax.value_and_grad(divided, (0, 1))(
      params, x, targets
    )
    # A part of a table has its sum already, and other leaves have none yet.
    for name in ("final_norm", "embed"):
      for_params[name] = jax.lax.psum(for_params[name], DATA_AXIS)
    return value[None], for_params, for_x

  places = PLACES | {"embed": PartitionSpec()}
  value, for_params, for_x = over_shards(
    local, places, ROW, ROW, out=(ROW, places, ROW)
  )(params, _stream(), targets)

  def plain(params, x):
    return losses.token_loss(model.logits(params, x), targets, 0.1)

  expected = jax.value_and_grad(plain, (0, 1))(params, _stream())
  # The mean over shards is the loss; the shards' sum has four times as much.
  found = (
    jnp.mean(value),
    jax.tree.map(lambda leaf: leaf / SHARDS, (for_params, for_x)),
  )
  largest = max(jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(expected))
  chex.assert_trees_all_close(
    found, expected, rtol=1e-5, atol=1e-6 * float(largest)
  )
