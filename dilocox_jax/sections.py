"""The sections of a run's config, each checked by itself.

One section a station, named like it; those of the exchange between replicas
are in `sync_sections`. What clashes between sections is found by
`config.RunConfig`.
"""

import dataclasses
import math

from dilocox_jax.checks import one_of, positive, require, within
from dilocox_jax.plan.choices import (
  BOUNDARIES,
  LAYOUTS,
  MEMORIES,
  REMATS,
  SCHEDULES,
)
from dilocox_jax.plan.pipeline_orders import PIPELINES
from dilocox_jax.plan.presets import PRESETS
from dilocox_jax.plan.shapes import ModelShape


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where tokens come from."""

  source: str = "stdlib"  # Python's own library; or text_files, synthetic.
  glob: str = ""  # Files of text_files, e.g. "notes/**/*.txt".
  validation_fraction: float = 0.05  # Share of files kept for validation.
  batch_size: int = 8  # Sequences a replica and inner step.
  sequence_length: int = 128  # Tokens predicted a sequence.

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
  """Which model; unset sizes are the preset's."""

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
  scan_unroll: int = 0  # Blocks a scan step; 0 = all: fast on CPU.
  z_loss: float = 0.0  # Weight of log(sum(exp(logits)))^2 in training.

  def __post_init__(self):
    one_of("model.preset", self.preset, PRESETS)
    one_of("model.compute_dtype", self.compute_dtype, ("float32", "bfloat16"))
    require(
      self.scan_unroll >= 0,
      f"model.scan_unroll={self.scan_unroll} must be 0 (all) or more",
    )

  @property
  def shape(self) -> ModelShape:
    """The preset with the set sizes replaced."""
    preset = PRESETS[self.preset]
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

  optimizer: str = "adamw"  # Any optimizer of optax by name.
  learning_rate: float = 2e-3
  schedule: str = "cosine"  # constant, cosine or wsd.
  warmup_steps: int = 50
  final_fraction: float = 0.05  # Last learning rate over the highest.
  clip_norm: float = 1.0  # 0 turns clipping off.
  accumulate_steps: int = 1  # Micro-batches an inner step.
  b1: float = 0.9
  b2: float = 0.95
  weight_decay: float = 0.1
  momentum: float = 0.0  # Read by sgd and its like.

  def __post_init__(self):
    one_of("inner.schedule", self.schedule, SCHEDULES)
    positive(
      "inner",
      learning_rate=self.learning_rate,
      accumulate_steps=self.accumulate_steps,
    )
    # A negative limit would turn every gradient round, and train uphill.
    within(0, math.inf, "inner", clip_norm=self.clip_norm)
    within(0, math.inf, "inner", weight_decay=self.weight_decay)
    within(0, 1, "inner", final_fraction=self.final_fraction)
    within(0, 1, "inner", b1=self.b1, b2=self.b2, momentum=self.momentum)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Replicas, where they live, and how one is divided among its devices."""

  num_replicas: int = 2
  layout: str = "stacked"  # stacked (one device) or mesh (their own).
  stacked_by: str = "map"  # map (in turn: CPU) or vmap (at once: GPU).
  num_data_shards: int = 1  # Devices that share the work of a stage.
  num_stages: int = 1  # Pipeline stages of a replica.
  pipeline: str = "1f1b"  # gpipe, 1f1b, interleaved or zb_h1.
  chunks_per_stage: int = 1  # interleaved: parts of the model a stage has.
  remat: str = "dots"  # Kept in a pipeline: none (all), dots, or full (least).
  boundary: str = "none"  # Between stages: none, bfloat16 or int8.
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
    """Whether a replica has several devices."""
    return self.num_data_shards * self.num_stages > 1


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """Validation during and after the run."""

  interval_steps: int = 150  # 0 evaluates at the end only.
  num_sequences: int = 128

  def __post_init__(self):
    positive("evaluation", num_sequences=self.num_sequences)
    require(
      self.interval_steps >= 0,
      f"evaluation.interval_steps={self.interval_steps} must not be negative",
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """What survives."""

  interval_steps: int = 150  # Inner steps between saves, at ends of rounds.
  keep: int = 2  # How many to keep.
  init_from: str = ""  # Run directory whose outer state a new run starts from.

  def __post_init__(self):
    positive("checkpoint", interval_steps=self.interval_steps, keep=self.keep)
