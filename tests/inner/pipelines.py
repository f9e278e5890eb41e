"""Pipelined gradients of tiny models, and the plain ones beside them."""

import dataclasses
import functools
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dilocox_jax.inner import pipeline
from dilocox_jax.inner.activation_codec import AS_COMPUTED
from dilocox_jax.inner.pipeline import CutModel, pipelined_gradient
from dilocox_jax.inner.step import accumulated_gradient
from dilocox_jax.models.loss import next_token_loss, token_loss
from dilocox_jax.models.segments import segment_ids
from dilocox_jax.models.transformer import Model, build_model
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.plan.pipeline.timeline import Pipeline
from dilocox_jax.plan.pipeline.timetable import Timetable, timetable

SMALL = ModelShape(
  num_layers=5, model_dim=8, num_heads=2, ff_dim=12, vocab_size=17, qk_norm=True
)
BATCH_SIZE, LENGTH = 2, 6
# Compiling is nearly all that these tests do; machine code may be slow.
QUICKLY = {"xla_backend_optimization_level": 0}
Z_LOSS = 0.01


def counts(num_layers, num_stages, num_chunks=1):
  """Layers of every chunk, [stage][chunk]; the first parts have one more."""
  parts = num_stages * num_chunks
  sizes = [num_layers // parts + (k < num_layers % parts) for k in range(parts)]
  return tuple(
    tuple(sizes[chunk * num_stages + stage] for chunk in range(num_chunks))
    for stage in range(num_stages)
  )


def _places(layer_counts):
  """(stage, chunk, row) of every layer, in order of the layers."""
  stages, chunks = np.shape(layer_counts)
  return [
    (stage, chunk, row)
    for chunk in range(chunks)
    for stage in range(stages)
    for row in range(layer_counts[stage][chunk])
  ]


def spread(blocks, layer_counts):
  """Leaves [layers, ...] to [stages, chunks, K, ...]; NaN in unused rows."""
  most = int(np.max(layer_counts))
  stage, chunk, row = zip(*_places(layer_counts), strict=True)

  def one(x):
    spread = np.full((*np.shape(layer_counts), most, *x.shape[1:]), np.nan)
    spread[stage, chunk, row] = x
    return jnp.asarray(spread, x.dtype)

  return jax.tree.map(one, blocks)


def gathered(blocks, layer_counts):
  """Back to leaves [layers, ...]."""
  stage, chunk, row = zip(*_places(layer_counts), strict=True)
  return jax.tree.map(lambda x: np.asarray(x)[stage, chunk, row], blocks)


def cut(model: Model, end_of_text: int | None = None) -> CutModel:
  return CutModel(
    model.embed,
    model.block,
    lambda rest, x, targets: token_loss(model.logits(rest, x), targets, Z_LOSS),
    None
    if end_of_text is None
    else functools.partial(segment_ids, end_of_text=end_of_text),
  )


def over_stages(model: CutModel, table: Timetable, layer_counts, **options):
  """(blocks [stages, ...], rest, tokens) -> the whole loss and gradients."""
  gradient = pipelined_gradient(model, table, layer_counts, **options)
  devices = np.asarray(jax.devices()[: table.num_stages])

  def local(blocks, rest, tokens):
    blocks = jax.tree.map(lambda x: x[0], blocks)
    loss, block_gradients, rest = gradient(blocks, rest, tokens)
    total = jax.lax.psum((loss, rest), "stage")
    return total, jax.tree.map(lambda x: x[None], block_gradients)

  return jax.jit(
    jax.shard_map(
      local,
      mesh=Mesh(devices, ("stage",)),
      in_specs=(PartitionSpec("stage"), PartitionSpec(), PartitionSpec()),
      out_specs=(PartitionSpec(), PartitionSpec("stage")),
      check_vma=False,
    ),
    compiler_options=QUICKLY,
  )


@dataclasses.dataclass(frozen=True)
class Case:
  schedule: str
  num_stages: int
  num_micro_batches: int = 4
  num_chunks: int = 1
  remat: str = "dots"
  shape: ModelShape = SMALL
  dtype: str = "float32"
  end_of_text: int | None = None  # Token at which a document ends.

  @property
  def table(self) -> Timetable:
    return timetable(
      Pipeline(
        self.schedule, self.num_stages, self.num_micro_batches, self.num_chunks
      )
    )

  @property
  def counts(self):
    return counts(self.shape.num_layers, self.num_stages, self.num_chunks)

  def lowered(self, batch_size=BATCH_SIZE, length=LENGTH):
    """The step, lowered; nothing is allocated."""
    model = build_model(self.shape)
    params = jax.eval_shape(model.init, jax.random.key(0))
    rows = (*np.shape(self.counts), int(np.max(self.counts)))
    blocks = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((*rows, *x.shape[1:]), x.dtype),
      params.pop("blocks"),
    )
    tokens = (self.num_micro_batches, batch_size, length + 1)
    step = over_stages(cut(model), self.table, self.counts, remat=self.remat)
    return step.lower(blocks, params, jax.ShapeDtypeStruct(tokens, np.int32))

  def pipelined(self, codec=AS_COMPUTED, fill=np.nan):
    """Loss and gradients, as a tree like the parameters.

    Buffers hold `fill` before they are written. NaN by default, so that a slot
    that is read too early spoils the result.
    """
    model, params, tokens = _drawn(
      self.shape, self.dtype, self.num_micro_batches
    )
    rest = {name: x for name, x in params.items() if name != "blocks"}
    step = over_stages(
      cut(model, self.end_of_text),
      self.table,
      self.counts,
      remat=self.remat,
      codec=codec,
    )
    blocks = spread(params["blocks"], self.counts)

    def filled(shape, dtype):
      is_float = jnp.issubdtype(dtype, jnp.inexact)
      return jnp.full(shape, fill if is_float else 0, dtype)

    with unittest.mock.patch.object(pipeline, "empty_buffer", filled):
      (loss, rest), blocks = step(blocks, rest, tokens)
    return loss, {**rest, "blocks": gathered(blocks, self.counts)}

  def plain(self):
    return _plain(
      self.shape, self.dtype, self.num_micro_batches, self.end_of_text
    )


@functools.cache
def _drawn(shape: ModelShape, dtype: str, num_micro_batches: int):
  model = build_model(shape, dtype=jnp.dtype(dtype))
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    # Far from where training starts, so that every term counts.
    lambda x: (0.5 * rng.normal(size=x.shape)).astype(
      "float64" if dtype == "float64" else "float32"
    ),
    jax.eval_shape(model.init, jax.random.key(0)),
  )
  tokens = (num_micro_batches, BATCH_SIZE, LENGTH + 1)
  drawn = rng.integers(0, shape.vocab_size, tokens).astype(np.int32)
  return model, params, drawn


@functools.cache
def _plain(
  shape: ModelShape,
  dtype: str,
  num_micro_batches: int,
  end_of_text: int | None,
):
  model, params, tokens = _drawn(shape, dtype, num_micro_batches)
  gradient = accumulated_gradient(
    lambda p, t: next_token_loss(model, p, t, Z_LOSS, end_of_text),
    num_micro_batches,
  )
  return jax.device_get(
    jax.jit(gradient, compiler_options=QUICKLY)(
      params, tokens.reshape(-1, LENGTH + 1)
    )
  )


def error(actual, expected) -> float:
  """Largest difference in any leaf, as a share of the leaf's maximum."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  worst = 0.0
  for a, b in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    # Not max(): a NaN must not be lost.
    worst = np.maximum(worst, np.max(np.abs(a - b)) / np.max(np.abs(b)))
  return float(worst)
