"""Joins a model with what computes its gradient and its validation loss.

A replica that several devices hold runs through pipeline stages. One that has a
single device, or shares it, runs whole.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from dilocox_jax.checks import changed_fields, require
from dilocox_jax.config import RunConfig
from dilocox_jax.config.platforms import Computation
from dilocox_jax.inner import sharded, vocabulary
from dilocox_jax.inner.pipeline import pipelined_gradient
from dilocox_jax.inner.pipeline_stage import CutModel, pipelined_loss
from dilocox_jax.inner.step import Gradient, Loss, accumulated_gradient
from dilocox_jax.models import transformer
from dilocox_jax.models.adapters import Adaptation
from dilocox_jax.models.attention import segment_ids
from dilocox_jax.models.loss import (
  LossModel,
  chunked_token_loss,
  next_token_loss,
  token_scores,
)
from dilocox_jax.models.transformer import remat_wrapper
from dilocox_jax.trees import Scalar, Tree, shapes_by_path


def model_functions(
  config: RunConfig,
  computation: Computation,
  given: LossModel | None,
  end_of_text: int | None,
  trainable: Adaptation | None = None,
) -> tuple[LossModel, Gradient, Callable[..., Scalar]]:
  """Builds the model, and the gradient and evaluation of a replica.

  Args:
    config: Config of the run.
    computation: What of it depends on the devices.
    given: Model that takes the place of the config's; None changes nothing.
    end_of_text: Token at which attention begins anew, or None.
    trainable: What is trained of the model; None: all of it.

  Returns:
    The model, (params, batch) -> (loss, gradients), and (params, batches
    [N, B, L + 1]) -> mean loss. If only a part is trained, params are this
    part, and gradient and evaluation have an argument `frozen`.

  Raises:
    ValueError: If a model that is handed in, or of which only a part is
      trained, is to be divided over devices.
  """
  others = trainable, config.inner.accumulate_steps, computation.stacked_by
  if given is not None:
    require(
      not config.mesh.is_divided,
      "a model that is handed in cannot be cut into stages or shards: register "
      "one with the functions embed, block and logits "
      "(dilocox_jax.register_model), or set mesh.num_stages=1 and "
      "mesh.num_data_shards=1",
    )
    loss = given.loss
    # Its layers are not known, and it may compute them again by itself. So
    # model.remat is applied to the loss as a whole, and only if it is set.
    if computation.remat != "auto":
      loss = remat_wrapper(computation.remat, prevent_cse=True)(loss)
    return _whole(given, loss, *others)
  shape, chunk_tokens = config.model.shape, computation.loss_chunk_tokens
  model = config.model_builder(
    shape,
    dtype=jnp.dtype(computation.compute_dtype),
    unroll=computation.scan_unroll,
    attention=computation.attention,
    # A pipeline wraps the layers itself, as `mesh.remat` says.
    remat="none" if config.mesh.is_divided else computation.remat,
  )
  leaves = {}
  if isinstance(model, transformer.Model):
    leaves = shapes_by_path(jax.eval_shape(model.init, jax.random.key(0)))
  wrong = changed_fields(shape.parameter_shapes, leaves)
  require(
    not wrong,
    f"model.preset={config.model.preset!r}: its builder must return a "
    "dilocox_jax.Model whose init makes the leaves of shape.parameter_shapes, "
    f"returns a {type(model).__name__} ({', '.join(wrong[:1])})",
  )
  loss = functools.partial(
    next_token_loss, end_of_text=end_of_text, chunk_tokens=chunk_tokens
  )
  evaluated = LossModel(model.init, functools.partial(loss, model))
  if config.mesh.is_divided:
    cut = functools.partial(_cut, config, model, end_of_text, chunk_tokens)
    if trainable is None:
      return evaluated, *_divided_functions(config, cut)
    require(
      config.mesh.num_stages == 1,
      "trainable: pipeline stages train all of a model: set mesh.num_stages=1",
    )
    evaluated = LossModel(model.init, _loss_of_shards(config, cut(0.0)))
    loss = _loss_of_shards(config, cut(config.model.z_loss))
    return _whole(evaluated, loss, *others)
  loss = functools.partial(loss, model, z_loss=config.model.z_loss)
  return _whole(evaluated, loss, *others)


def _whole(
  evaluated: LossModel,
  loss: Loss,
  trainable: Adaptation | None,
  micro_batches: int,
  stacked_by: str,
) -> tuple[LossModel, Gradient, Callable[..., Scalar]]:
  """Builds the functions of a replica that one device holds."""
  gradient = accumulated_gradient(loss, micro_batches)
  evaluation = _mean_over_batches(evaluated.loss)
  if trainable:
    given = evaluated, loss, trainable, micro_batches
    gradient, evaluation = _of_a_part(*given)
    evaluated = LossModel(trainable.init, evaluated.loss, evaluated.module)
  # On CPU, the batched matrix products that vmap makes are slow. So replicas
  # on one device run in turn instead.
  if stacked_by == "map":
    gradient = sequential_vmap(gradient)
  return evaluated, gradient, evaluation


def _of_a_part(
  model: LossModel, loss: Loss, trainable: Adaptation, micro_batches: int
) -> tuple[Gradient, Callable[..., Scalar]]:
  """Builds gradient and evaluation where a part is trained."""
  join = trainable.join

  def gradient(params: Tree, batch: Tree, frozen: Tree) -> tuple[Scalar, Tree]:
    def joint_loss(params: Tree, rows: Tree) -> Scalar:
      return loss(join(params, frozen), rows)

    return accumulated_gradient(joint_loss, micro_batches)(params, batch)

  def evaluation(params: Tree, batches: Tree, frozen: Tree) -> Scalar:
    mean_loss = _mean_over_batches(model.loss)
    return mean_loss(join(params, frozen), batches)

  return gradient, evaluation


def _mean_over_batches(loss: Loss) -> Loss:
  """Builds the evaluation of a replica that one device holds."""

  def mean(params: Tree, batches: Tree) -> Scalar:
    # `map` runs the batches in turn, so memory holds the logits of one batch.
    return jnp.mean(jax.lax.map(lambda batch: loss(params, batch), batches))

  return mean


def _divided_functions(
  config: RunConfig, cut: Callable[[float], CutModel]
) -> tuple[Gradient, Loss]:
  """Builds gradient and evaluation of a replica that several devices hold.

  Args:
    config: Config of the run.
    cut: Function from the weight of the z-loss to the cut model.
  """
  mesh, layers = config.mesh, config.stage_layers
  num_micro_batches = config.inner.accumulate_steps
  stage = pipelined_gradient(
    cut(config.model.z_loss), config.pipeline, layers.counts, remat=mesh.remat
  )
  stage_loss = pipelined_loss(cut(0.0), layers.counts)
  num_rows = config.data.batch_size // num_micro_batches // mesh.num_data_shards
  tables = config.division.divided_tables(config.model.shape)
  return (
    sharded.sharded_gradient(
      stage, config.division, layers, num_micro_batches, tables
    ),
    sharded.sharded_loss(stage_loss, config.division, layers, num_rows, tables),
  )


def _loss_of_shards(config: RunConfig, cut: CutModel) -> Loss:
  """Builds (params, batch) -> loss of a replica that data shards hold."""
  division = config.division
  tables = division.divided_tables(config.model.shape)
  stage_loss = sharded.loss_by_layer(cut, config.mesh.remat)
  loss = sharded.sharded_loss(stage_loss, division, None, 1, tables)
  return lambda params, batch: loss(params, batch[None])


def _cut(
  config: RunConfig,
  model: transformer.Model,
  end_of_text: int | None,
  chunk_tokens: int,
  z_loss: float,
) -> CutModel:
  """Cuts a model where a pipeline may cut it."""
  tables = config.division.divided_tables(config.model.shape)
  head = "embed/embedding" if config.model.shape.tied_head else "head/kernel"

  def end(rest: Tree, x: Tree, targets: Tree) -> Scalar:
    logits, scores = functools.partial(model.logits, rest), token_scores
    if head in tables:
      logits = vocabulary.divided_logits(logits)
      scores = vocabulary.divided_scores
    return chunked_token_loss(logits, x, targets, z_loss, chunk_tokens, scores)

  embed = model.embed
  if "embed/embedding" in tables:
    embed = vocabulary.divided_embed(embed)
  segments = None
  if end_of_text is not None:
    segments = functools.partial(segment_ids, end_of_text=end_of_text)
  return CutModel(embed, model.block, end, segments)
