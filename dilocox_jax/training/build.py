"""Builds every part of a run from its config.

Model, inner step, exchange and outer step take plain arguments and do not know
the config. This is the only file that reads the config and joins these parts.
The trainer only goes through the plan.
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
from dilocox_jax.exchange.feedback import Feedback
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
from dilocox_jax.plan.choices import loaded
from dilocox_jax.plan.pipeline.timetable import timetable
from dilocox_jax.plan.wire.adaptive import RoundSetting
from dilocox_jax.plan.wire.collectives import EXCHANGES
from dilocox_jax.pytypes import Aggregator, Scalar, Tree


@dataclasses.dataclass(frozen=True)
class Programs:
  """Holds the model and all programs that run on the devices.

  Attributes:
    model: Functions of the model.
    schedule: Function from the inner step to the learning rate.
    steps: Programs of data-parallel steps of all replicas.
    single: Programs of steps of one replica, for the phase "single".
    rounds: Programs of the method's rounds.
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
    """The jitted function (params, batches) -> mean loss (nats a token).

    Batches are token ids [N, B, L + 1]: N batches of B sequences. A sequence
    has L + 1 tokens, and each of its last L tokens is predicted.
    """

    def mean_loss(params: Tree, batches: Tree) -> Scalar:
      # `map` runs the batches in turn, so memory holds the logits of one batch.
      losses = jax.lax.map(
        lambda batch: next_token_loss(self.model, params, batch), batches
      )
      return jnp.mean(losses)

    return jax.jit(mean_loss)


def aggregator(
  config: RunConfig, setting: RoundSetting | None = None
) -> Aggregator:
  """Builds the function that averages a fragment over the replicas.

  Args:
    config: Config of the run.
    setting: Rank and H of the rounds; None takes those of the config.
  """
  exchange, payload = config.exchange, to_plan.payload(config, setting)
  feedback = Feedback(
    exchange.feedback_decay, exchange.feedback_against, exchange.feedback_dtype
  )
  build = loaded(EXCHANGES[exchange.kind].aggregator)
  return build(
    Compression(payload, exchange.collective, config.seed, _max_rank(config)),
    feedback if exchange.error_feedback else None,
  )


def _max_rank(config: RunConfig) -> int:
  """Returns the largest rank that fits into codec states.

  The value is 0 if the rank never changes; states then have the config's rank.
  """
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
    ValueError: If there are too few devices, a device lacks the memory kind of
      the config, or optax lacks an optimizer of the config.
  """
  _check_memory(config.mesh.outer_memory)
  sizes, inner = config.model, config.inner
  model = loaded(type(sizes.shape).builder)(
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
  # A method that sends gradients compresses them. A warm start sends gradients
  # without compression.
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

  Only this part of a round depends on the current rank and H. So an adaptive
  run replaces it when they change, and keeps its model and inner step.

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
  """Builds the function (params, batch) -> (loss, gradients) of one replica."""
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
  # On CPU, the batched matrix products that vmap makes are slow. So replicas
  # on one device run in turn instead.
  if mesh.stacked_by == "map":
    gradient = sequential_vmap(gradient)
  return gradient


def corpus(config: RunConfig) -> Corpus:
  """Loads the text of the config's data source.

  Raises:
    ValueError: If the source has no text. The message is one line.
  """
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
  """Returns the validation batches that every evaluation uses.

  Returns:
    Token ids [N, B, L + 1]: N batches of B sequences of L + 1 tokens.
  """
  return validation_batches(
    text.validation,
    batch_size=config.data.batch_size,
    sequence_length=config.data.sequence_length,
    max_sequences=config.evaluation.num_sequences,
  )
