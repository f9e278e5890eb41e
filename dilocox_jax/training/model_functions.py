"""Builds the functions that compute a model's gradient and validation loss.

A model runs whole on one device, or divided among several devices: into
pipeline stages (groups of layers), data shards (each reads other sequences of
the batch) and tensor shards (which share the matrix products of a layer).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from dilocox_jax.checks import changed_fields, require
from dilocox_jax.config import RunConfig
from dilocox_jax.config.platforms import Computation
from dilocox_jax.distributed.partition_rules import divided_by_rule
from dilocox_jax.inner import automatic, sharded, vocabulary
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
  token_scores_of_columns,
)
from dilocox_jax.models.transformer import remat_wrapper
from dilocox_jax.plan.model.division import Division
from dilocox_jax.trees import Scalar, Tree, shapes_by_path

# The model with the loss of evaluations, its gradient, and its evaluation.
ModelFunctions = tuple[LossModel, Gradient, Callable[..., Scalar]]


def run_division(config: RunConfig, supplied: LossModel | None) -> Division:
  """Returns how the arrays of a replica are divided among its devices.

  Args:
    config: Config of the run.
    supplied: Model of the user; None means the model of the config.

  Raises:
    ValueError: If the user's model cannot be divided as the config says.
  """
  if supplied is None or not config.mesh.is_divided:
    return config.division
  params = jax.eval_shape(supplied.init, jax.random.key(0))
  return divided_by_rule(
    config.division, shapes_by_path(params), supplied.partition
  )


def model_functions(
  config: RunConfig,
  computation: Computation,
  division: Division,
  gather: str,
  supplied: LossModel | None,
  end_of_text: int | None,
  trainable: Adaptation | None = None,
) -> ModelFunctions:
  """Builds the model of a replica with its gradient and its evaluation.

  Args:
    config: Config of the run.
    computation: Settings of the computation that depend on the devices.
    division: How a replica is divided among its devices (`run_division`).
    gather: When data shards collect the layers of a pipeline stage: all at once
      ("stage") or one after the other ("layer").
    supplied: Model of the user; None means the model of the config.
    end_of_text: Token after which attention starts anew. None: attention reads
      the whole sequence.
    trainable: The part of the model that is trained; None means all of it.

  Returns:
    Three values:

    - The model with the loss of evaluations. If only a part of the model is
      trained, `init` makes this part, but `loss` takes the whole model.
    - The gradient: (params, batch) -> (loss, gradients).
    - The evaluation: (params, batches [N, B, L + 1]) -> mean loss. Batches are
      trees [N, B, ...] if the user's model has a loss of its own.

    If only a part of the model is trained, params are this part, and the
    gradient and the evaluation have one more argument, `frozen`.

  Raises:
    ValueError: If pipeline stages would have to train only a part of the model,
      if tensor shards cannot divide the heads of the model, or if the builder
      of a preset returns a model with other leaves than the preset.
  """
  whole_model_functions = functools.partial(
    _whole_model_functions,
    trainable=trainable,
    micro_batches=config.inner.accumulate_steps,
    stacked_by=computation.stacked_by,
  )
  if supplied is not None:
    return _supplied_model_functions(
      config, computation, division, supplied, whole_model_functions
    )
  shape = config.model.shape
  chunk_tokens = computation.loss_chunk_tokens
  remat = computation.remat
  if config.mesh.is_divided:
    remat = "none"  # Stages and shards apply `mesh.remat` to layers themselves.
  model = config.model_builder(
    shape,
    dtype=jnp.dtype(computation.compute_dtype),
    unroll=computation.scan_unroll,
    attention=computation.attention,
    remat=remat,
  )
  # A builder may return something else. All leaves then count as missing.
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
  # The z-loss is a part of the training loss only.
  evaluated = LossModel(model.init, functools.partial(loss, model))
  if config.mesh.is_divided:
    # A function from the weight of the z-loss to the model in parts.
    cut_model = functools.partial(
      _cut_model, config, model, end_of_text, chunk_tokens
    )
    _check_heads(config)
    if config.mesh.num_stages > 1:
      require(
        trainable is None,
        "trainable: pipeline stages train all of a model: set "
        "mesh.num_stages=1",
      )
      gradient, evaluation = _divided_functions(config, cut_model, gather)
      return evaluated, gradient, evaluation
    evaluated = LossModel(model.init, _loss_of_shards(config, cut_model(0.0)))
    loss = _loss_of_shards(config, cut_model(config.model.z_loss))
    return whole_model_functions(evaluated, loss)
  loss = functools.partial(loss, model, z_loss=config.model.z_loss)
  return whole_model_functions(evaluated, loss)


def _supplied_model_functions(
  config: RunConfig,
  computation: Computation,
  division: Division,
  supplied: LossModel,
  whole_model_functions: Callable[[LossModel, Loss], ModelFunctions],
) -> ModelFunctions:
  """Returns the results of `model_functions` for a model of the user.

  `whole_model_functions` is `_whole_model_functions` with the settings of the
  run. It gets the model with the loss of evaluations, and the loss of training.
  """
  loss = supplied.loss
  # The layers of this model are not known, and it may compute them again by
  # itself. So model.remat is applied to the whole loss, and only if it is set.
  if computation.remat != "auto":
    loss = remat_wrapper(computation.remat, prevent_cse=True)(loss)
  if not config.mesh.is_divided:
    return whole_model_functions(supplied, loss)
  evaluated = supplied._replace(
    loss=automatic.with_divided_rows(supplied.loss, division)
  )
  evaluated, gradient, evaluation = whole_model_functions(
    evaluated, automatic.with_divided_rows(loss, division)
  )
  gradient = automatic.with_divided_gradients(gradient, division)
  return evaluated, gradient, evaluation


def _check_heads(config: RunConfig) -> None:
  """Raises ValueError unless tensor shards can divide the attention heads."""
  num_shards = config.mesh.num_tensor_shards
  shape = config.model.shape
  for name, count in (
    ("heads", shape.num_heads),
    ("heads of keys and values", shape.kv_heads),
  ):
    require(
      count % num_shards == 0,
      f"mesh.num_tensor_shards={num_shards} cannot divide the {count} {name} "
      f"of the model: take a divisor of {count}",
    )


def _whole_model_functions(
  evaluated: LossModel,
  loss: Loss,
  trainable: Adaptation | None,
  micro_batches: int,
  stacked_by: str,
) -> ModelFunctions:
  """Returns the results of `model_functions` without pipeline stages.

  The model `evaluated` has the loss of evaluations; `loss` is that of training.
  Replicas on one device take their steps in turn if `stacked_by` is "map", and
  together if it is "vmap".
  """
  if trainable:
    gradient, evaluation = _partial_functions(
      evaluated, loss, trainable, micro_batches
    )
    evaluated = LossModel(trainable.init, evaluated.loss, evaluated.module)
  else:
    gradient = accumulated_gradient(loss, micro_batches)
    evaluation = _mean_over_batches(evaluated.loss)
  # On a CPU the batched matrix products of vmap are slow. So replicas on one
  # device run in turn instead.
  if stacked_by == "map":
    gradient = sequential_vmap(gradient)
  return evaluated, gradient, evaluation


def _partial_functions(
  model: LossModel, loss: Loss, trainable: Adaptation, micro_batches: int
) -> tuple[Gradient, Callable[..., Scalar]]:
  """Builds gradient and evaluation if only a part of the model is trained.

  Both functions get the trained part as `params` and the rest as `frozen`. The
  model has the loss of evaluations, and `loss` is that of training.
  """
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
  """Turns the loss of one batch into the mean loss of batches [N, B, ...]."""

  def mean(params: Tree, batches: Tree) -> Scalar:
    # `map` runs the batches in turn, so memory holds the logits of one batch.
    return jnp.mean(jax.lax.map(lambda batch: loss(params, batch), batches))

  return mean


def _divided_functions(
  config: RunConfig, cut_model: Callable[[float], CutModel], gather: str
) -> tuple[Gradient, Loss]:
  """Builds gradient and evaluation of a replica with pipeline stages.

  `cut_model` is a function from the weight of the z-loss to the model in parts.
  Data shards collect the layers of a stage at once (`gather` "stage") or in
  turn ("layer").
  """
  mesh = config.mesh
  layers = config.stage_layers
  num_micro_batches = config.inner.accumulate_steps
  # Rows of a micro-batch on a data shard. Evaluations use as many if they can.
  num_rows = config.data.batch_size // num_micro_batches // mesh.num_data_shards
  tables = config.division.divided_tables(config.model.shape)
  stage_gradient = pipelined_gradient(
    cut_model(config.model.z_loss),
    config.pipeline,
    layers.counts,
    remat=mesh.remat,
  )
  gradient = sharded.sharded_gradient(
    stage_gradient,
    config.division,
    layers,
    num_micro_batches=num_micro_batches,
    divided_tables=tables,
    gather=gather,
  )
  stage_loss = pipelined_loss(cut_model(0.0), layers.counts)
  evaluation = sharded.sharded_loss(
    stage_loss,
    config.division,
    layers,
    num_rows=num_rows,
    divided_tables=tables,
    gather=gather,
  )
  return gradient, evaluation


def _loss_of_shards(config: RunConfig, cut_model: CutModel) -> Loss:
  """Returns the loss function of a replica in data shards or tensor shards."""
  division = config.division
  stage_loss = sharded.loss_by_layer(cut_model, config.mesh.remat)
  loss = sharded.sharded_loss(
    stage_loss,
    division,
    None,
    num_rows=1,  # No effect: `loss_by_layer` computes all rows at once.
    divided_tables=division.divided_tables(config.model.shape),
  )
  # `loss` takes batches [N, B, L + 1], so this batch becomes N = 1 batches.
  return lambda params, batch: loss(params, batch[None])


def _cut_model(
  config: RunConfig,
  model: transformer.Model,
  end_of_text: int | None,
  chunk_tokens: int,
  z_loss: float,
) -> CutModel:
  """Cuts a model into embedding, blocks and loss.

  The logits of `chunk_tokens` tokens are computed at once; 0 means all.
  """
  tables = config.division.divided_tables(config.model.shape)
  head = "embed/embedding" if config.model.shape.tied_head else "head/kernel"

  def loss(outside_blocks: Tree, x: Tree, targets: Tree) -> Scalar:
    logits = functools.partial(model.logits, outside_blocks)
    scores = token_scores
    if config.mesh.num_tensor_shards > 1:
      scores = token_scores_of_columns
    if head in tables:
      logits = vocabulary.divided_logits(logits)
      scores = vocabulary.divided_scores
    return chunked_token_loss(
      logits,
      x,
      targets,
      z_loss=z_loss,
      chunk_tokens=chunk_tokens,
      scores=scores,
    )

  embed = model.embed
  if "embed/embedding" in tables:
    embed = vocabulary.divided_embed(embed)
  segments = None
  if end_of_text is not None:
    segments = functools.partial(segment_ids, end_of_text=end_of_text)
  return CutModel(embed=embed, block=model.block, loss=loss, segments=segments)
