"""Builds every part of a run from its config.

Model, inner step, exchange and outer step take plain arguments and do not know
the config. This is the only file that reads the config and joins these parts.
The trainer only goes through the plan.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.custom_batching import sequential_vmap
from jax.sharding import PartitionSpec

from dilocox_jax.checks import require
from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.config.platforms import on_platform
from dilocox_jax.distributed import host_memory
from dilocox_jax.distributed.local_map import map_over_devices
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.exchange.compressed import Compression
from dilocox_jax.exchange.feedback import Feedback
from dilocox_jax.exchange.mean import mean_of_finite_replicas
from dilocox_jax.inner.activation_codec import ACTIVATION_CODECS
from dilocox_jax.inner.pipeline import CutModel, pipelined_gradient
from dilocox_jax.inner.sharded import sharded_gradient
from dilocox_jax.inner.step import (
  Gradient,
  Loss,
  accumulated_gradient,
  inner_step,
)
from dilocox_jax.models import transformer
from dilocox_jax.models.loss import (
  LossModel,
  chunked_token_loss,
  next_token_loss,
)
from dilocox_jax.optimizers import (
  inner_optimizer,
  learning_rate_schedule,
  named_optimizer,
)
from dilocox_jax.outer.data_parallel import StepPrograms
from dilocox_jax.outer.exchange_thread import ExchangeThread
from dilocox_jax.outer.partition import Partition
from dilocox_jax.outer.programs import RoundPrograms
from dilocox_jax.outer.transforms import OuterTransform
from dilocox_jax.plan.choices import loaded
from dilocox_jax.plan.model.shapes import parameter_shapes
from dilocox_jax.plan.pipeline.timetable import timetable
from dilocox_jax.plan.schedule.fragments import BLOCKS
from dilocox_jax.plan.wire.adaptive import RoundSetting
from dilocox_jax.plan.wire.collectives import EXCHANGES
from dilocox_jax.plan.wire.leaf import Shapes
from dilocox_jax.pytypes import Aggregator, Scalar, Tree
from dilocox_jax.training.parts import NO_PARTS, Parts
from dilocox_jax.trees import shapes_by_path


@dataclasses.dataclass(frozen=True)
class Programs:
  """Holds the model and all programs that run on the devices.

  Attributes:
    model: Functions of the model; its loss is that of evaluations.
    schedule: Function from the inner step to the learning rate.
    steps: Programs of data-parallel steps of all replicas.
    single: Programs of steps of one replica, for the phase "single".
    rounds: Programs of the method's rounds.
    shapes: Shape of every parameter by path.
  """

  model: LossModel
  schedule: optax.Schedule
  steps: StepPrograms
  single: StepPrograms
  rounds: RoundPrograms
  shapes: Shapes

  @property
  def parameter_count(self) -> int:
    """Number of parameters of one replica."""
    return sum(math.prod(shape) for shape in self.shapes.values())

  def steps_of(self, phase: str) -> StepPrograms:
    """Returns the programs of steps that the replicas of a phase can run."""
    return self.single if phase == "single" else self.steps

  @functools.cached_property
  def evaluate(self):
    """The jitted function (params, batches) -> mean loss (nats a token).

    Batches are token ids [N, B, L + 1]: N batches of B sequences. A sequence
    has L + 1 tokens, and each of its last L tokens is predicted.
    """

    def mean_loss(params: Tree, batches: Tree) -> Scalar:
      # `map` runs the batches in turn, so memory holds the logits of one batch.
      return jnp.mean(
        jax.lax.map(lambda batch: self.model.loss(params, batch), batches)
      )

    return jax.jit(mean_loss)

  @functools.cached_property
  def evaluate_each(self):
    """The jitted function (params [M, ...], batches) -> losses [M].

    Every replica evaluates its own parameters, so nothing is sent.
    """
    return jax.jit(self.rounds.replicas.map(self.evaluate, (0, None), 0))


def _aggregator(config: RunConfig, setting: RoundSetting | None) -> Aggregator:
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


def programs(
  config: RunConfig,
  parts: Parts = NO_PARTS,
  end_of_text: int | None = None,
  platform: str | None = None,
  devices: Sequence[Any] | None = None,
) -> Programs:
  """Builds the model, the optimizers and the programs of all phases.

  Args:
    config: Config of the run.
    parts: Parts that take the place of what the config names.
    end_of_text: Token at which attention begins anew (`document_end`).
    platform: Kind of devices that the programs are for, e.g. "tpu"; None means
      `devices`, or those that JAX has.
    devices: Devices to compile for (`Replicas.devices`).

  Raises:
    ValueError: If there are too few devices, a device lacks the memory kind of
      the config, or optax lacks an optimizer of the config.
  """
  if devices:
    platform = platform or devices[0].platform
  config = on_platform(config, platform or platform_name())
  inner, mesh = config.inner, config.mesh
  reason = host_memory.unsupported(
    mesh.outer_memory, devices or jax.local_devices()
  )
  require(
    reason is None,
    f"mesh.outer_memory={mesh.outer_memory!r}: {reason}: take 'device'",
  )
  model, gradient = _model_and_gradient(config, parts.model, end_of_text)
  shapes = parameter_shapes(config.model.shape)
  if parts.model is not None:
    shapes = shapes_by_path(jax.eval_shape(model.init, jax.random.key(0)))
  schedule = learning_rate_schedule(
    inner.schedule,
    inner.learning_rate,
    warmup_steps=inner.warmup_steps,
    total_steps=config.total_steps,
    final_fraction=inner.final_fraction,
  )
  optimizer = parts.inner_optimizer or inner_optimizer(
    inner.optimizer,
    schedule,
    clip_norm=inner.clip_norm,
    b1=inner.b1,
    b2=inner.b2,
    weight_decay=inner.weight_decay,
    momentum=inner.momentum,
  )
  replicas = Replicas(
    mesh.num_replicas,
    mesh.layout,
    config.division,
    None if devices is None else tuple(devices),
  )
  one_replica = replicas
  if config.sync.warm_start == "single":
    one_replica = dataclasses.replace(replicas, num_replicas=1)
  transform = outer_transform(config, parts=parts)
  plain_mean = mean_of_finite_replicas()
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
      transform,
      inner_step(gradient, optimizer),
      replicas,
      mesh.outer_memory,
      ExchangeThread() if _needs_thread(config) else None,
    ),
    shapes=shapes,
  )


def _needs_thread(config: RunConfig) -> bool:
  """Whether a second thread dispatches exchanges (`outer.exchange_thread`).

  XLA overlaps transfers with steps on TPUs and GPUs. Between CPUs it does not,
  and inside one process there is no link.
  """
  mesh = config.mesh
  if mesh.exchange_dispatch != "auto":
    return mesh.exchange_dispatch == "thread"
  is_between_cpus = jax.process_count() > 1 and jax.default_backend() == "cpu"
  return is_between_cpus and mesh.outer_memory == host_memory.DEVICE


def outer_transform(
  config: RunConfig,
  setting: RoundSetting | None = None,
  parts: Parts = NO_PARTS,
) -> OuterTransform:
  """Builds the outer side of a round: exchange, outer optimizer, apply rule.

  Only this part of a round depends on the current rank and H. So an adaptive
  run replaces it when they change, and keeps its model and inner step.

  Args:
    config: Config of the run.
    setting: Rank and H of the rounds; None takes those of the config.
    parts: Parts that take the place of what the config names.
  """
  outer = config.outer
  optimizer = parts.outer_optimizer or named_optimizer(
    outer.optimizer,
    outer.learning_rate,
    momentum=outer.momentum or None,
    nesterov=outer.nesterov and bool(outer.momentum),
  )
  return OuterTransform(
    to_plan.method(config, setting),
    Partition(config.fragments),
    optimizer,
    parts.exchange or _aggregator(config, setting),
    config.exchange.keep_unsent,
  )


def _model_and_gradient(
  config: RunConfig, given: LossModel | None, end_of_text: int | None
) -> tuple[LossModel, Gradient]:
  """Builds the model, and (params, batch) -> (loss, gradients) of a replica.

  Raises:
    ValueError: If a model that is handed in is to be divided over devices.
  """
  sizes = config.model
  if given is not None:
    _check_given_model(config, given)
    return given, _whole_gradient(config, given.loss)
  build = functools.partial(
    loaded(type(sizes.shape).builder),
    sizes.shape,
    dtype=jnp.dtype(sizes.compute_dtype),
    unroll=sizes.scan_unroll,
    remat=sizes.remat,
  )
  loss = functools.partial(
    next_token_loss,
    end_of_text=end_of_text,
    chunk_tokens=sizes.loss_chunk_tokens or 0,
  )
  # Evaluation on a mesh is left to JAX's partitioner, which cannot look into a
  # kernel.
  is_kernel = sizes.attention in ("cudnn", "splash")
  on_mesh = config.mesh.layout == "mesh" and is_kernel
  evaluating = build(attention="blockwise" if on_mesh else sizes.attention)
  evaluated = LossModel(evaluating.init, functools.partial(loss, evaluating))
  model = build(attention=sizes.attention)
  if config.mesh.is_divided:
    return evaluated, _divided_gradient(config, model)
  loss = functools.partial(loss, model, z_loss=sizes.z_loss)
  gradient = _whole_gradient(config, loss)
  return evaluated, _on_one_device(gradient) if on_mesh else gradient


def _on_one_device(gradient: Gradient) -> Gradient:
  """Tells JAX that a replica's gradient is not divided among devices.

  A mesh has axes inside a replica even where they are 1 long, and JAX refuses a
  kernel along an axis that its partitioner may divide.
  """
  whole = PartitionSpec()
  return map_over_devices(gradient, (whole, whole), (whole, whole))


def platform_name() -> str:
  """Returns the kind of JAX's devices: "cpu", "tpu", "gpu" (NVIDIA) or "rocm".

  JAX calls the GPUs of NVIDIA and AMD by one name, and only the first have
  cuDNN.
  """
  name = jax.default_backend()
  if name == "gpu" and "rocm" in jax.local_devices()[0].client.platform_version:
    return "rocm"
  return name


def _check_given_model(config: RunConfig, model: LossModel) -> None:
  if config.mesh.is_divided:
    raise ValueError(
      "a model that is handed in cannot be cut into pipeline stages or shards: "
      "set mesh.num_stages=1 and mesh.num_data_shards=1"
    )
  fragments = config.fragments
  if fragments.num_fragments == 1 or fragments.is_sliced:
    return
  params = jax.eval_shape(model.init, jax.random.key(0))
  blocks = params.get(BLOCKS, {}) if isinstance(params, dict) else {}
  depths = {leaf.shape[:1] for leaf in jax.tree.leaves(blocks)}
  if depths != {(fragments.num_layers,)}:
    raise ValueError(
      f"sync.num_fragments={fragments.num_fragments} divides layers, so a "
      f"model that is handed in needs leaves [{fragments.num_layers}, ...] "
      f'below "{BLOCKS}" (model.num_layers={fragments.num_layers}): set '
      "sync.num_fragments=1, or take dilocox_jax.step_transform, which divides "
      "any tree"
    )


def _divided_gradient(config: RunConfig, model: transformer.Model) -> Gradient:
  """Builds the gradient of a replica that several devices hold together."""
  mesh, sizes = config.mesh, config.model
  chunk_tokens = sizes.loss_chunk_tokens or 0

  def end(rest: Tree, x: Tree, targets: Tree) -> Scalar:
    logits = functools.partial(model.logits, rest)
    return chunked_token_loss(logits, x, targets, sizes.z_loss, chunk_tokens)

  stage = pipelined_gradient(
    CutModel(model.embed, model.block, end),
    timetable(config.pipeline),
    config.stage_layers.counts,
    remat=mesh.remat,
    codec=ACTIVATION_CODECS[mesh.boundary],
  )
  return sharded_gradient(
    stage, config.division, config.stage_layers, config.inner.accumulate_steps
  )


def _whole_gradient(config: RunConfig, loss: Loss) -> Gradient:
  """Builds the gradient of a replica that one device holds."""
  gradient = accumulated_gradient(loss, config.inner.accumulate_steps)
  # On CPU, the batched matrix products that vmap makes are slow. So replicas
  # on one device run in turn instead.
  if config.mesh.stacked_by == "map":
    gradient = sequential_vmap(gradient)
  return gradient
