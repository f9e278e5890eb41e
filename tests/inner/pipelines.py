"""Pipelined gradients of tiny models, and the plain ones beside them."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dilocox_jax.inner import pipeline, pipeline_stage
from dilocox_jax.inner.pipeline import CutModel, pipelined_gradient
from dilocox_jax.inner.step import accumulated_gradient
from dilocox_jax.models.attention import segment_ids
from dilocox_jax.models.loss import next_token_loss, token_loss
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.model.division import StageLayers
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.plan.pipeline import Pipeline

SMALL = ModelShape(
  num_layers=5, model_dim=8, num_heads=2, ff_dim=12, vocab_size=17, qk_norm=True
)
BATCH_SIZE = 2
LENGTH = 6
# Compiling is nearly all that these tests do; machine code may be slow.
QUICKLY = {"xla_backend_optimization_level": 0}
Z_LOSS = 0.01
STAGE = PartitionSpec("stage")
WHOLE = PartitionSpec()


def over_stages(local, num_stages, out=(WHOLE, WHOLE, STAGE)):
  """Maps (blocks, rest, tokens) of a stage over all stages."""

  def one(blocks, rest, tokens):
    return local(jax.tree.map(lambda x: x[0], blocks), rest, tokens)

  mesh = Mesh(np.asarray(jax.devices()[:num_stages]), ("stage",))
  places = {"in_specs": (STAGE, WHOLE, WHOLE), "out_specs": out}
  mapped = jax.shard_map(one, mesh=mesh, check_vma=False, **places)
  return jax.jit(mapped, compiler_options=QUICKLY)


def gradient_over_stages(model: CutModel, schedule, layer_counts, **options):
  """(blocks [stages, ...], rest, tokens) -> loss, rest and block gradients."""
  gradient = pipelined_gradient(model, schedule, layer_counts, **options)

  def local(blocks, rest, tokens):
    loss, block_gradients, rest = gradient(blocks, rest, tokens)
    total = jax.lax.psum((loss, rest), "stage")
    return *total, jax.tree.map(lambda x: x[None], block_gradients)

  return over_stages(local, schedule.num_stages)


@dataclasses.dataclass(frozen=True)
class Case:
  schedule: str
  num_stages: int
  num_micro_batches: int = 4
  remat: str = "dots"
  shape: ModelShape = SMALL
  dtype: str = "float32"
  end_of_text: int | None = None  # Token at which a document ends.

  @property
  def pipeline(self):
    return Pipeline(self.schedule, self.num_stages, self.num_micro_batches)

  @property
  def layers(self):
    return StageLayers(self.shape.num_layers, self.num_stages)

  @property
  def model(self):
    return build_model(self.shape, dtype=jnp.dtype(self.dtype))

  @property
  def cut(self):
    def loss(rest, x, targets):
      return token_loss(self.model.logits(rest, x), targets, Z_LOSS)

    end = self.end_of_text or 0
    segments = functools.partial(segment_ids, end_of_text=end)
    return CutModel(
      self.model.embed, self.model.block, loss, segments if end else None
    )

  def step(self):
    return gradient_over_stages(
      self.cut, self.pipeline, self.layers.counts, remat=self.remat
    )

  def lowered(self, batch_size=BATCH_SIZE, length=LENGTH):
    """The step, lowered; nothing is allocated."""
    params = jax.eval_shape(self.model.init, jax.random.key(0))
    blocks = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        (*self.layers.table.shape, *x.shape[1:]), x.dtype
      ),
      params.pop("blocks"),
    )
    shape = (self.num_micro_batches, batch_size, length + 1)
    tokens = jax.ShapeDtypeStruct(shape, np.int32)
    return self.step().lower(blocks, params, tokens)

  def drawn(self):
    """Blocks by stage, with NaN in unused rows, other leaves and tokens."""
    params, tokens = _drawn(self.shape, self.dtype, self.num_micro_batches)
    rest = {name: x for name, x in params.items() if name != "blocks"}

    def spread(x):
      filler = np.full((1, *x.shape[1:]), np.nan, x.dtype)
      return jnp.asarray(np.concatenate([x, filler])[self.layers.table])

    return jax.tree.map(spread, params["blocks"]), rest, tokens

  def pipelined(self):
    """Loss, gradients as a tree like the parameters, and the program."""
    arguments = self.drawn()
    with mock.patch.object(pipeline, "empty_buffer", _spoiled):
      program = self.step().lower(*arguments).compile()
    loss, rest, blocks = program(*arguments)

    def joined(x):
      return np.asarray(x).reshape(-1, *x.shape[2:])[self.layers.rows]

    blocks = jax.tree.map(joined, blocks)
    return loss, {**rest, "blocks": blocks}, program.as_text()

  def losses(self):
    """What each stage contributes to the loss of an evaluation."""
    loss = pipeline_stage.pipelined_loss(self.cut, self.layers.counts)
    program = over_stages(
      lambda *args: loss(*args)[None], self.num_stages, STAGE
    )
    with mock.patch.object(pipeline_stage, "empty_buffer", _spoiled):
      return program(*self.drawn())

  def plain(self):
    sizes = self.num_micro_batches, self.end_of_text
    return _plain(self.shape, self.dtype, *sizes)


def _spoiled(shape, dtype):
  """Buffers of NaN, so that a slot that is read too early spoils the result."""
  value = np.nan if jnp.issubdtype(dtype, jnp.inexact) else 0
  return jnp.full(shape, value, dtype)


@functools.cache
def _drawn(shape, dtype, num_micro_batches):
  model = build_model(shape, dtype=jnp.dtype(dtype))
  rng = np.random.default_rng(0)
  kept = "float64" if dtype == "float64" else "float32"
  params = jax.tree.map(
    # Far from where training starts, so that every term counts.
    lambda x: (0.5 * rng.normal(size=x.shape)).astype(kept),
    jax.eval_shape(model.init, jax.random.key(0)),
  )
  tokens = (num_micro_batches, BATCH_SIZE, LENGTH + 1)
  return params, rng.integers(0, shape.vocab_size, tokens).astype(np.int32)


@functools.cache
def _plain(shape, dtype, num_micro_batches, end_of_text):
  model = build_model(shape, dtype=jnp.dtype(dtype))
  params, tokens = _drawn(shape, dtype, num_micro_batches)
  gradient = accumulated_gradient(
    lambda p, t: next_token_loss(model, p, t, Z_LOSS, end_of_text),
    num_micro_batches,
  )
  program = jax.jit(gradient, compiler_options=QUICKLY)
  return jax.device_get(program(params, tokens.reshape(-1, LENGTH + 1)))


def error(actual, expected) -> float:
  """Largest difference in any leaf, as a share of the leaf's maximum."""

  def one(a, b):
    a = np.asarray(a, np.float64)
    b = np.asarray(b, np.float64)
    assert a.shape == b.shape
    # Shifting all scores of a token changes nothing: some gradients are 0.
    return np.max(np.abs(a - b)) / np.maximum(np.max(np.abs(b)), 1e-4)

  # Not max(): a NaN must not be lost.
  return float(np.max(jax.tree.leaves(jax.tree.map(one, actual, expected))))
