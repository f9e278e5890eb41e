"""The sections of a run's config.

Each section checks its own fields. `config.run.RunConfig` checks how sections
fit together. A field that is None by default has the value of the preset, the
method or the codec.
"""

import dataclasses
import math
import typing
from typing import Any

from dilocox_jax.checks import one_of, positive, require, within
from dilocox_jax.plan.choices import (
  BOUNDARIES,
  LAYOUTS,
  MEMORIES,
  REFERENCES,
  REMATS,
  RESIDUAL_DTYPES,
  SCHEDULES,
)
from dilocox_jax.plan.model.presets import MODEL_PRESETS
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.plan.pipeline.orders import PIPELINES
from dilocox_jax.plan.schedule.methods import Method, named_method
from dilocox_jax.plan.wire.adaptive import MODES
from dilocox_jax.plan.wire.collectives import COLLECTIVES
from dilocox_jax.plan.wire.payload import Payload
from dilocox_jax.plan.wire.payload_names import named_payload
from dilocox_jax.plan.wire.ranks import CRITERIA

# A field that the method's recipe may set (`config.recipes`) is None until a
# `RunConfig` is built, which then puts a value in its place. So type checkers
# are told the type that readers of a run's config find, without the None.
OF_METHOD: Any = None
if typing.TYPE_CHECKING:
  Value = typing.TypeVar("Value")
  OfMethod = typing.Annotated[Value, "None until a run's config is built"]
else:
  OfMethod = typing.Optional


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """The text that replicas are trained on."""

  source: str = "stdlib"  # Python's own library; or text_files, synthetic.
  glob: str = ""  # Files of text_files, e.g. "notes/**/*.txt".
  validation_fraction: float = 0.05  # Share of files kept for validation.
  batch_size: int = 8  # Sequences of one replica's inner step.
  sequence_length: int = 128  # Tokens that a sequence predicts.

  def __post_init__(self):
    positive(
      "data", batch_size=self.batch_size, sequence_length=self.sequence_length
    )
    require(
      0 < self.validation_fraction < 1,
      f"data.validation_fraction={self.validation_fraction} must lie "
      "between 0 and 1",
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The model; sizes that are not set are those of the preset."""

  preset: str = "tiny"
  num_layers: int | None = None
  model_dim: int | None = None
  num_heads: int | None = None
  ff_dim: int | None = None
  activation: str | None = None  # swiglu or gelu.
  qk_norm: bool | None = None
  num_kv_heads: int | None = None  # Fewer than num_heads share keys, values.
  tied_head: bool | None = None  # The head is the token table.
  compute_dtype: str = "float32"  # float32 or bfloat16; parameters are fp32.
  scan_unroll: int = 0  # Blocks of one scan step; 0: all (fast on CPU).
  z_loss: float = 0.0  # Weight of log(sum(exp(logits)))^2 in training.

  def __post_init__(self):
    one_of("model.preset", self.preset, MODEL_PRESETS)
    one_of("model.compute_dtype", self.compute_dtype, ("float32", "bfloat16"))
    # A negative weight would reward large logits.
    within(0, math.inf, "model", z_loss=self.z_loss)
    require(
      self.scan_unroll >= 0,
      f"model.scan_unroll={self.scan_unroll} must be 0 (all) or more",
    )

  @property
  def shape(self) -> ModelShape:
    """Sizes of the preset, except for those that are set."""
    preset = MODEL_PRESETS[self.preset]
    names = {field.name for field in dataclasses.fields(preset)}
    given = {
      k: v
      for k, v in dataclasses.asdict(self).items()
      if k in names and v is not None
    }
    return dataclasses.replace(preset, **given)


@dataclasses.dataclass(frozen=True)
class InnerConfig:
  """The local optimizer step."""

  optimizer: OfMethod[str] = OF_METHOD  # Name of any optimizer of optax.
  learning_rate: float = 2e-3
  schedule: str = "cosine"  # constant, cosine or wsd.
  warmup_steps: OfMethod[int] = OF_METHOD  # None: a quarter, at most 50.
  final_fraction: float = 0.05  # Last learning rate / highest one.
  clip_norm: float = 1.0  # 0 turns clipping off.
  accumulate_steps: int = 1  # Micro-batches of an inner step.
  b1: float = 0.9
  b2: float = 0.95
  weight_decay: float = 0.1
  momentum: float = 0.0  # For optimizers that have it, such as sgd.

  def __post_init__(self):
    one_of("inner.schedule", self.schedule, SCHEDULES)
    positive(
      "inner",
      learning_rate=self.learning_rate,
      accumulate_steps=self.accumulate_steps,
    )
    # A negative limit would reverse every gradient, so the loss would grow.
    within(0, math.inf, "inner", clip_norm=self.clip_norm)
    within(0, math.inf, "inner", weight_decay=self.weight_decay)
    within(0, 1, "inner", final_fraction=self.final_fraction)
    within(0, 1, "inner", b1=self.b1, b2=self.b2, momentum=self.momentum)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """The number of replicas, and how each is divided among devices."""

  num_replicas: int = 2
  layout: str = "stacked"  # stacked (on one device) or mesh (on their own).
  stacked_by: str = "map"  # map (one by one: CPU) or vmap (together: GPU).
  num_data_shards: int = 1  # Devices that share the work of a stage.
  num_stages: int = 1  # Pipeline stages of a replica.
  pipeline: str = "1f1b"  # gpipe, 1f1b, interleaved or zb_h1.
  chunks_per_stage: int = 1  # interleaved: runs of layers that a stage has.
  remat: str = "dots"  # Recomputed: none, all but dots, or full.
  boundary: str = "none"  # Compression between stages: bfloat16 or int8.
  outer_memory: str = "device"  # Outer state: device or pinned_host.

  def __post_init__(self):
    positive("mesh", num_replicas=self.num_replicas)
    positive("mesh", num_data_shards=self.num_data_shards)
    positive("mesh", num_stages=self.num_stages)
    one_of("mesh.layout", self.layout, LAYOUTS)
    one_of("mesh.stacked_by", self.stacked_by, ("map", "vmap"))
    one_of("mesh.pipeline", self.pipeline, PIPELINES)
    one_of("mesh.remat", self.remat, REMATS)
    one_of("mesh.boundary", self.boundary, BOUNDARIES)
    one_of("mesh.outer_memory", self.outer_memory, MEMORIES)
    require(
      self.layout == "mesh" or not self.is_divided,
      f"mesh.layout={self.layout!r} has one device for all, but "
      f"num_data_shards={self.num_data_shards} and "
      f"num_stages={self.num_stages} divide a replica: take layout 'mesh'",
    )

  @property
  def is_divided(self) -> bool:
    """Whether a replica has more than one device."""
    return self.num_data_shards * self.num_stages > 1


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """Validation during the run and at its end."""

  interval_steps: int = 150  # 0: at the end only.
  num_sequences: int = 128

  def __post_init__(self):
    positive("evaluation", num_sequences=self.num_sequences)
    require(
      self.interval_steps >= 0,
      f"evaluation.interval_steps={self.interval_steps} must not be negative",
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """What is saved, and what a new run starts from."""

  interval_steps: int = 150  # At the end of the round that follows.
  keep: int = 2  # Number of checkpoints that are kept.
  init_from: str = ""  # Run directory to take the first parameters from.

  def __post_init__(self):
    positive("checkpoint", interval_steps=self.interval_steps, keep=self.keep)


WARM_STARTS = ("none", "data_parallel", "single")


@dataclasses.dataclass(frozen=True)
class SyncConfig:
  """The method and its schedule; what is not set is the method's own."""

  method: str = "diloco"
  sync_interval: int | None = None  # H, inner steps.
  num_fragments: int | None = None  # P.
  overlap_steps: int | None = None  # tau, inner steps.
  rule: str | None = None  # reset, continue, mix or eager.
  mixing_alpha: float | None = None  # Weight of the replica's own value.
  fragment_order: str | None = None  # strided or sequential.
  warm_start: str = "none"  # data_parallel, or single (one replica, copied).
  warm_start_steps: int = 0
  steps_per_dispatch: int = 50  # Steps of a program without rounds.

  def __post_init__(self):
    one_of("sync.warm_start", self.warm_start, WARM_STARTS)
    positive("sync", steps_per_dispatch=self.steps_per_dispatch)
    is_warm = self.warm_start != "none"
    require(
      is_warm == (self.warm_start_steps > 0),
      f"sync.warm_start={self.warm_start!r} does not go with "
      f"sync.warm_start_steps={self.warm_start_steps}: set both or neither",
    )
    is_gradient = self.named.exchanged == "gradient"
    require(
      not (is_warm and is_gradient),
      f"sync.method={self.method!r} already averages every step: "
      "leave sync.warm_start at 'none'",
    )

  @property
  def named(self) -> Method:
    """The schedule and rule of the method with these settings."""
    given = dataclasses.asdict(self)
    for name in ("warm_start", "warm_start_steps", "steps_per_dispatch"):
      given.pop(name)
    try:
      return named_method(given.pop("method"), **given)
    except ValueError as error:
      raise ValueError(f"sync.{error}") from error


@dataclasses.dataclass(frozen=True)
class CodecConfig:
  """What replicas send each other; what is not set is the link's own."""

  name: OfMethod[str] = OF_METHOD  # float32, or e.g. low_rank+int.
  rank: int | None = None  # low_rank: columns of a factor.
  power_iterations: int | None = None  # low_rank: passes over the matrix.
  factorisation: str | None = None  # low_rank: shared or local.
  bits: int | None = None  # int: 8, 4, 2 or 1.
  scale: str | None = None  # int: block, row or tensor shares a scale.
  block_size: int | None = None  # int, e3m0: values that share a scale.
  rounding: str | None = None  # int: nearest or stochastic.
  top_k_fraction: float | None = None  # top_k: share of values kept.
  top_k_block_size: int | None = None  # top_k: values of which it keeps some.
  indices: str | None = None  # top_k: packed or bitmap.
  mask_fraction: float | None = None  # random_mask: share of values sent.

  def __post_init__(self):
    if self.name is not OF_METHOD:
      _ = self.payload

  @property
  def payload(self) -> Payload:
    """The payload with its settings."""
    try:
      return named_payload(**dataclasses.asdict(self))
    except ValueError as error:
      raise ValueError(f"codec.{error}") from error


@dataclasses.dataclass(frozen=True)
class ExchangeConfig:
  """How payloads are sent, and what becomes of what a codec loses."""

  collective: str = "auto"  # all_reduce, all_gather or reduce_scatter.
  error_feedback: OfMethod[bool] = OF_METHOD  # Sends later what was lost.
  keep_unsent: bool = False  # Leaves what was lost in the replica.
  feedback_decay: OfMethod[float] = OF_METHOD  # Share of residuals kept.
  feedback_against: str = "own"  # Residual of one's own message, or the mean.
  feedback_dtype: str = "float32"  # float32, bfloat16 or int8.

  def __post_init__(self):
    one_of("exchange.collective", self.collective, COLLECTIVES)
    one_of("exchange.feedback_against", self.feedback_against, REFERENCES)
    one_of("exchange.feedback_dtype", self.feedback_dtype, RESIDUAL_DTYPES)
    require(
      not (self.error_feedback and self.keep_unsent),
      "exchange.error_feedback and exchange.keep_unsent both make up for what "
      "a codec loses: set one of them",
    )
    within(0, 1, "exchange", feedback_decay=self.feedback_decay)


@dataclasses.dataclass(frozen=True)
class AdaptiveConfig:
  """Ranks and H that follow the measured rank of the averaged update."""

  mode: OfMethod[str] = OF_METHOD  # off, rank, or rank_and_interval.
  window_rounds: int = 5  # Rounds measured before each choice.
  criterion: str = "energy"  # Measure of the rank: energy or stable.
  energy: float = 0.95  # Share of the squared norm in that rank.
  by_leaf: bool = False  # Gives leaves different ranks (docs/log.md).

  def __post_init__(self):
    if self.mode is not OF_METHOD:
      one_of("adaptive.mode", self.mode, MODES)
    one_of("adaptive.criterion", self.criterion, CRITERIA)
    positive("adaptive", window_rounds=self.window_rounds)
    require(
      0 < self.energy <= 1,
      f"adaptive.energy={self.energy} must be above 0 and at most 1",
    )


@dataclasses.dataclass(frozen=True)
class OuterConfig:
  """The optimizer of the outer parameters."""

  optimizer: str = "sgd"  # Any optimizer of optax by name.
  learning_rate: OfMethod[float] = OF_METHOD
  momentum: OfMethod[float] = OF_METHOD
  nesterov: bool = True

  def __post_init__(self):
    positive("outer", learning_rate=self.learning_rate)
    within(0, 1, "outer", momentum=self.momentum)
