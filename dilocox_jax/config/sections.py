"""The sections of a run's config.

The limits of a field stand beside it (`limited`), and each section checks its
own fields. `config.run.RunConfig` checks how sections fit together. A field
that is None by default has the value of the preset, the method or the codec.
"""

import dataclasses
import typing
from typing import Any

from dilocox_jax.checks import check_limits, in_front, limited, require
from dilocox_jax.plan import choices
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


class Section:
  """Base of all sections; checks the limits of their fields.

  Raises:
    ValueError: One line that names the field, its value and its limits.
  """

  def __post_init__(self):
    # The fields of DataConfig are "data.source" and so on in messages.
    name = type(self).__name__.removesuffix("Config").lower()
    check_limits(self, f"{name}.")


@dataclasses.dataclass(frozen=True)
class DataConfig(Section):
  """The text that replicas are trained on."""

  source: str = "stdlib"  # Python's own library; or text_files, synthetic.
  glob: str = ""  # Files of text_files, e.g. "notes/**/*.txt".
  # Share of files kept for validation.
  validation_fraction: float = limited(0.05, above=0, below=1)
  # Sequences of one replica's inner step.
  batch_size: int = limited(8, at_least=1)
  # Tokens that a sequence predicts.
  sequence_length: int = limited(128, at_least=1)


@dataclasses.dataclass(frozen=True)
class ModelConfig(Section):
  """The model; sizes that are not set are those of the preset."""

  preset: str = limited("tiny", choices=MODEL_PRESETS)
  num_layers: int | None = None
  model_dim: int | None = None
  num_heads: int | None = None
  ff_dim: int | None = None
  activation: str | None = None  # swiglu or gelu.
  qk_norm: bool | None = None
  num_kv_heads: int | None = None  # Fewer than num_heads share keys, values.
  tied_head: bool | None = None  # The head is the token table.
  # float32 or bfloat16; parameters are fp32.
  compute_dtype: str = limited("float32", choices=choices.COMPUTE_DTYPES)
  # Blocks of one scan step; 0: all (fast on CPU).
  scan_unroll: int = limited(0, at_least=0)
  # Weight of log(sum(exp(logits)))^2 in training. A negative one would reward
  # large logits.
  z_loss: float = limited(0.0, at_least=0)

  @property
  def shape(self) -> ModelShape:
    """Sizes of the preset, except for those that are set."""
    preset = vars(MODEL_PRESETS[self.preset])
    given = {k: v for k, v in vars(self).items() if v is not None}
    return ModelShape(**{k: given.get(k, v) for k, v in preset.items()})


@dataclasses.dataclass(frozen=True)
class InnerConfig(Section):
  """The local optimizer step."""

  optimizer: OfMethod[str] = OF_METHOD  # Name of any optimizer of optax.
  learning_rate: float = limited(2e-3, above=0)
  # constant, cosine or wsd.
  schedule: str = limited("cosine", choices=choices.SCHEDULES)
  warmup_steps: OfMethod[int] = OF_METHOD  # None: a quarter, at most 50.
  # Last learning rate / highest one.
  final_fraction: float = limited(0.05, at_least=0, at_most=1)
  # 0 turns clipping off. A negative limit would reverse every gradient.
  clip_norm: float = limited(1.0, at_least=0)
  # Micro-batches of an inner step.
  accumulate_steps: int = limited(1, at_least=1)
  b1: float = limited(0.9, at_least=0, at_most=1)
  b2: float = limited(0.95, at_least=0, at_most=1)
  weight_decay: float = limited(0.1, at_least=0)
  # For optimizers that have it, such as sgd.
  momentum: float = limited(0.0, at_least=0, at_most=1)


@dataclasses.dataclass(frozen=True)
class MeshConfig(Section):
  """The number of replicas, and how each is divided among devices."""

  num_replicas: int = limited(2, at_least=1)
  # stacked (on one device) or mesh (on their own).
  layout: str = limited("stacked", choices=choices.LAYOUTS)
  # map (one by one: CPU) or vmap (together: GPU).
  stacked_by: str = limited("map", choices=("map", "vmap"))
  # Devices that share the work of a stage.
  num_data_shards: int = limited(1, at_least=1)
  num_stages: int = limited(1, at_least=1)  # Pipeline stages of a replica.
  # gpipe, 1f1b, interleaved or zb_h1.
  pipeline: str = limited("1f1b", choices=PIPELINES)
  chunks_per_stage: int = 1  # interleaved: runs of layers that a stage has.
  # Recomputed: none, all but dots, or full.
  remat: str = limited("dots", choices=choices.REMATS)
  # Compression between stages: bfloat16 or int8.
  boundary: str = limited("none", choices=choices.BOUNDARIES)
  # Outer state: device or pinned_host.
  outer_memory: str = limited("device", choices=choices.MEMORIES)

  def __post_init__(self):
    super().__post_init__()
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
class EvaluationConfig(Section):
  """Validation during the run and at its end."""

  interval_steps: int = limited(150, at_least=0)  # 0: at the end only.
  num_sequences: int = limited(128, at_least=1)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Section):
  """What is saved, and what a new run starts from."""

  # At the end of the round that follows.
  interval_steps: int = limited(150, at_least=1)
  keep: int = limited(2, at_least=1)  # Number of checkpoints that are kept.
  init_from: str = ""  # Run directory to take the first parameters from.


@dataclasses.dataclass(frozen=True)
class SyncConfig(Section):
  """The method and its schedule; what is not set is the method's own."""

  method: str = "diloco"
  sync_interval: int | None = None  # H, inner steps.
  num_fragments: int | None = None  # P.
  overlap_steps: int | None = None  # tau, inner steps.
  rule: str | None = None  # reset, continue, mix or eager.
  mixing_alpha: float | None = None  # Weight of the replica's own value.
  fragment_order: str | None = None  # strided or sequential.
  # data_parallel, or single (one replica, copied).
  warm_start: str = limited("none", choices=choices.WARM_STARTS)
  warm_start_steps: int = 0
  # Steps of a program without rounds.
  steps_per_dispatch: int = limited(50, at_least=1)

  def __post_init__(self):
    super().__post_init__()
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
    with in_front("sync."):
      return named_method(given.pop("method"), **given)


@dataclasses.dataclass(frozen=True)
class CodecConfig(Section):
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
    with in_front("codec."):
      return named_payload(**dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class ExchangeConfig(Section):
  """How payloads are sent, and what becomes of what a codec loses."""

  # all_reduce, all_gather or reduce_scatter.
  collective: str = limited("auto", choices=COLLECTIVES)
  error_feedback: OfMethod[bool] = OF_METHOD  # Sends later what was lost.
  keep_unsent: bool = False  # Leaves what was lost in the replica.
  # Share of residuals kept.
  feedback_decay: OfMethod[float] = limited(OF_METHOD, at_least=0, at_most=1)
  # Residual of one's own message, or the mean.
  feedback_against: str = limited("own", choices=choices.REFERENCES)
  # float32, bfloat16 or int8.
  feedback_dtype: str = limited("float32", choices=choices.RESIDUAL_DTYPES)

  def __post_init__(self):
    super().__post_init__()
    require(
      not (self.error_feedback and self.keep_unsent),
      "exchange.error_feedback and exchange.keep_unsent both make up for what "
      "a codec loses: set one of them",
    )


@dataclasses.dataclass(frozen=True)
class AdaptiveConfig(Section):
  """Ranks and H that follow the measured rank of the averaged update."""

  # off, rank, or rank_and_interval.
  mode: OfMethod[str] = limited(OF_METHOD, choices=MODES)
  # Rounds measured before each choice.
  window_rounds: int = limited(5, at_least=1)
  # Measure of the rank: energy or stable.
  criterion: str = limited("energy", choices=CRITERIA)
  # Share of the squared norm in that rank.
  energy: float = limited(0.95, above=0, at_most=1)
  by_leaf: bool = False  # Gives leaves different ranks (docs/log.md).


@dataclasses.dataclass(frozen=True)
class OuterConfig(Section):
  """The optimizer of the outer parameters."""

  optimizer: str = "sgd"  # Any optimizer of optax by name.
  learning_rate: OfMethod[float] = limited(OF_METHOD, above=0)
  momentum: OfMethod[float] = limited(OF_METHOD, at_least=0, at_most=1)
  nesterov: bool = True
