"""The forwards of a schedule alone give the loss of the plain model."""

import functools
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dilocox_jax.inner import pipeline_loss
from dilocox_jax.models.loss import next_token_loss
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.pipeline.orders import PIPELINES
from dilocox_jax.plan.pipeline.timeline import Pipeline
from tests.inner.pipelines import (
  LENGTH,
  QUICKLY,
  SMALL,
  Z_LOSS,
  counts,
  cut,
  spread,
)

# (schedule, stages, chunks, micro-batches); three are no multiple of two.
CASES = [
  *((name, 4, 1, 3) for name in PIPELINES if name != "interleaved"),
  ("1f1b", 1, 1, 2),
  ("1f1b", 2, 1, 1),
  ("interleaved", 2, 2, 3),
]


@functools.cache
def drawn():
  model = build_model(SMALL)
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: (0.5 * rng.normal(size=x.shape)).astype(np.float32),
    jax.eval_shape(model.init, jax.random.key(0)),
  )
  return model, params


def over_stages(schedule, num_stages, num_chunks, end_of_text):
  """(blocks, rest, tokens) -> what every stage contributes, [stages]."""
  layer_counts = counts(SMALL.num_layers, num_stages, num_chunks)
  # Training takes as many micro-batches as its schedule asks for.
  training = Pipeline(schedule, num_stages, num_stages, num_chunks)
  model = cut(drawn()[0], end_of_text)
  loss = pipeline_loss.pipelined_loss(model, training, layer_counts)

  def local(blocks, rest, tokens):
    return loss(jax.tree.map(lambda x: x[0], blocks), rest, tokens)[None]

  mapped = jax.shard_map(
    local,
    mesh=Mesh(np.asarray(jax.devices()[:num_stages]), ("stage",)),
    in_specs=(PartitionSpec("stage"), PartitionSpec(), PartitionSpec()),
    out_specs=PartitionSpec("stage"),
    check_vma=False,
  )
  return jax.jit(mapped, compiler_options=QUICKLY), layer_counts


@pytest.mark.parametrize(
  ("case", "end_of_text"),
  [*((case, None) for case in CASES), (CASES[1], 3)],
  ids=str,
)
def test_the_last_stage_has_the_loss_of_the_plain_model(case, end_of_text):
  schedule, num_stages, num_chunks, num_micro_batches = case
  model, params = drawn()
  shape = (num_micro_batches, 2, LENGTH + 1)
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, SMALL.vocab_size, shape).astype(np.int32)
  program, layer_counts = over_stages(
    schedule, num_stages, num_chunks, end_of_text
  )
  rest = {name: leaf for name, leaf in params.items() if name != "blocks"}

  def spoiled(shape, dtype):
    # A slot that is read too early would spoil the loss.
    return jnp.full(shape, np.nan, dtype)

  with unittest.mock.patch.object(pipeline_loss, "empty_buffer", spoiled):
    seen = program(spread(params["blocks"], layer_counts), rest, tokens)
  plain = jax.jit(
    lambda p, t: next_token_loss(model, p, t, Z_LOSS, end_of_text)
  )
  expected = plain(params, tokens.reshape(-1, LENGTH + 1))
  np.testing.assert_allclose(seen[-1], expected, rtol=1e-6)
  np.testing.assert_array_equal(seen[:-1], 0)
