"""Builds every part of a run from its config.

Model, inner step, exchange and outer step take plain arguments and do not know
the config. This is the only file that reads the config and joins them; the
trainer only goes through the plan.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.custom_batching import sequential_vmap

from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.data import sources
from dilocox_jax.data.corpus import Corpus
from dilocox_jax.data.streams import ReplicaStreams, validation_batches
from dilocox_jax.distributed import host_memory
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.exchange.compressed import Compression
from dilocox_jax.exchange.feedback import Feedback, compressed_mean
from dilocox_jax.exchange.mean import mean_of_finite_replicas
from dilocox_jax.inner.activation_codec import activation_codec
from dilocox_jax.inner.pipeline import CutModel, pipelined_gradient
from dilocox_jax.inner.sharded import sharded_gradient
from dilocox_jax.inner.step import Gradient, accumulated_gradient, inner_step
from dilocox_jax.models import transformer
from dilocox_jax.models.loss import next_token_loss, token_loss
from dilocox_jax.optimizers import (
  inner_optimizer,
  learning_rate_schedule,
  named_optimizer,
)
from dilocox_jax.outer.partition import Partition
from dilocox_jax.outer.programs import RoundPrograms, StepPrograms
from dilocox_jax.outer.transforms import OuterTransform
from dilocox_jax.plan.pipeline.timetable import timetable
from dilocox_jax.plan.wire.adaptive import RoundSetting
from dilocox_jax.plan.wire.payload import Dense
from dilocox_jax.pytypes import Aggregator, Scalar, Tree


@dataclasses.dataclass(frozen=True)
class Programs:
  """Everything that runs on the devices.

  Attributes:
    model: Functions of the model.
    schedule: Learning rate by inner step.
    steps: Data-parallel steps of all replicas.
    single: Steps of one replica alone, for a warm start that asks for it.
    rounds: Rounds of the method.
  """

  model: transformer.Model
  schedule: optax.Schedule
  steps: StepPrograms
  single: StepPrograms
  rounds: RoundPrograms

  def steps_of(self, phase: str) -> StepPrograms:
    """Returns the programs of a phase that has no rounds."""
    return self.single if phase == "single" else self.steps

  def replicas_of(self, phase: str) -> Replicas:
    """Returns the replicas that train in a phase."""
    return self.single.replicas if phase == "single" else self.rounds.replicas

  @functools.cached_property
  def evaluate(self):
    """The jitted mean loss: (params, batches [N, B, L + 1]) -> nats a token."""

    def mean_loss(params: Tree, batches: Tree) -> Scalar:
      losses = jax.lax.map(
        lambda batch: next_token_loss(self.model, params, batch), batches
      )
      return jnp.mean(losses)

    return jax.jit(mean_loss)


def aggregator(
  config: RunConfig, setting: RoundSetting | None = None
) -> Aggregator:
  """Builds the exchange of the method: a plain mean if nothing is compressed.

  Args:
    config: Config of the run.
    setting: Rank and H of the rounds; None takes those of the config.
  """
  exchange, sent = config.exchange, to_plan.payload(config, setting)
  is_plain = sent == Dense() and exchange.collective == "auto"
  if is_plain and not exchange.error_feedback:
    return mean_of_finite_replicas()
  feedback = Feedback(
    exchange.feedback_decay, exchange.feedback_against, exchange.feedback_dtype
  )
  return compressed_mean(
    Compression(sent, exchange.collective, config.seed, _max_rank(config)),
    feedback if exchange.error_feedback else None,
  )


def _max_rank(config: RunConfig) -> int:
  """Returns the rank that codec states have room for; 0 if no rank changes."""
  if config.adaptive.mode == "off":
    return 0
  return to_plan.policy(config).first.rank * (
    to_plan.ROOM_BY_LEAF if config.adaptive.by_leaf else 1
  )


def programs(config: RunConfig) -> Programs:
  """Builds the model, the optimizers and the programs of all phases.

  Args:
    config: Config of the run.

  Raises:
    ValueError: If the devices or optax lack what the config asks for.
  """
  _check_memory(config.mesh.outer_memory)
  sizes, inner = config.model, config.inner
  model = transformer.build_model(
    sizes.shape, dtype=jnp.dtype(sizes.compute_dtype), unroll=sizes.scan_unroll
  )
  gradient = _gradient(config, model)
  schedule = learning_rate_schedule(
    inner.schedule,
    inner.learning_rate,
    warmup_steps=inner.warmup_steps,
    total_steps=config.total_steps,
    final_fraction=inner.final_fraction,
  )
  optimizer = inner_optimizer(
    inner.optimizer,
    schedule,
    clip_norm=inner.clip_norm,
    b1=inner.b1,
    b2=inner.b2,
    weight_decay=inner.weight_decay,
    momentum=inner.momentum,
  )
  mesh = config.mesh
  replicas = Replicas(mesh.num_replicas, mesh.layout, config.division)
  one_replica = replicas
  if config.sync.warm_start == "single":
    one_replica = dataclasses.replace(replicas, num_replicas=1)
  transform, plain_mean = outer_transform(config), mean_of_finite_replicas()
  # A method that sends gradients compresses them; a warm start does not.
  sends_gradients = config.sync.named.exchanged == "gradient"
  mean = transform.aggregator if sends_gradients else plain_mean
  return Programs(
    model=model,
    schedule=schedule,
    steps=StepPrograms(gradient, optimizer, mean, replicas),
    single=StepPrograms(gradient, optimizer, plain_mean, one_replica),
    rounds=RoundPrograms(
      transform, inner_step(gradient, optimizer), replicas, mesh.outer_memory
    ),
  )


def outer_transform(
  config: RunConfig, setting: RoundSetting | None = None
) -> OuterTransform:
  """Builds the outer side of a round: exchange, outer optimizer, apply rule.

  It is all of a round that depends on the rank and H in force, so an adaptive
  run keeps its model and inner step and replaces only this.

  Args:
    config: Config of the run.
    setting: Rank and H of the rounds; None takes those of the config.
  """
  outer = config.outer
  optimizer = named_optimizer(
    outer.optimizer,
    outer.learning_rate,
    momentum=outer.momentum or None,
    nesterov=outer.nesterov and bool(outer.momentum),
  )
  return OuterTransform(
    to_plan.method(config, setting),
    Partition(config.fragments),
    optimizer,
    aggregator(config, setting),
    config.exchange.keep_unsent,
  )


def _check_memory(kind: str) -> None:
  reason = host_memory.unsupported(kind, jax.local_devices())
  if reason:
    raise ValueError(f"mesh.outer_memory={kind!r}: {reason}: take 'device'")


def _gradient(config: RunConfig, model: transformer.Model) -> Gradient:
  """Builds (params, batch) -> (loss, gradients) of one replica."""
  mesh, z_loss = config.mesh, config.model.z_loss
  micro_batches = config.inner.accumulate_steps
  if mesh.is_divided:

    def end(rest: Tree, x: Tree, targets: Tree) -> Scalar:
      return token_loss(model.logits(rest, x), targets, z_loss)

    stage = pipelined_gradient(
      CutModel(model.embed, model.block, end),
      timetable(config.pipeline),
      config.stage_layers.counts,
      remat=mesh.remat,
      codec=activation_codec(mesh.boundary),
    )
    return sharded_gradient(
      stage, config.division, config.stage_layers, micro_batches
    )

  def loss(params: Tree, tokens: Tree) -> Scalar:
    return next_token_loss(model, params, tokens, z_loss)

  gradient = accumulated_gradient(loss, micro_batches)
  if mesh.stacked_by == "map":  # A batched product is slow on CPU.
    gradient = sequential_vmap(gradient)
  return gradient


def corpus(config: RunConfig) -> Corpus:
  """Loads the text; raises ValueError with one line if there is none."""
  data = config.data
  return sources.load_corpus(
    data.source,
    glob=data.glob,
    seed=config.seed,
    validation_fraction=data.validation_fraction,
  )


def streams(config: RunConfig, text: Corpus) -> ReplicaStreams:
  """Returns the training batches of every replica."""
  return ReplicaStreams(
    text.train,
    num_replicas=config.mesh.num_replicas,
    batch_size=config.data.batch_size,
    sequence_length=config.data.sequence_length,
    seed=config.seed,
  )


def held_out(config: RunConfig, text: Corpus) -> np.ndarray:
  """Returns the batches of every evaluation, [N, B, L + 1]."""
  return validation_batches(
    text.validation,
    batch_size=config.data.batch_size,
    sequence_length=config.data.sequence_length,
    max_sequences=config.evaluation.num_sequences,
  )
