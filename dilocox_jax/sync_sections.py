"""The sections of a run's config that say what replicas have in common.

When they meet, what travels, how, and what is made of it; each is checked by
itself. What clashes between sections is found by `config.RunConfig`.
"""

import dataclasses

from dilocox_jax.checks import one_of, positive, require, within
from dilocox_jax.plan.adaptive import MODES
from dilocox_jax.plan.chains import named_payload
from dilocox_jax.plan.choices import REFERENCES, RESIDUAL_DTYPES
from dilocox_jax.plan.collectives import COLLECTIVES
from dilocox_jax.plan.methods import Method, named_method
from dilocox_jax.plan.payload import Payload
from dilocox_jax.plan.ranks import CRITERIA

WARM_STARTS = ("none", "data_parallel", "single")


@dataclasses.dataclass(frozen=True)
class SyncConfig:
  """When and how replicas meet; what is unset is the method's own."""

  method: str = "diloco"
  sync_interval: int | None = None  # H, inner steps.
  num_fragments: int | None = None  # P.
  overlap_steps: int | None = None  # tau, inner steps.
  rule: str | None = None  # reset, continue, mix or eager.
  mixing_alpha: float | None = None  # Weight of the local value.
  fragment_order: str | None = None  # strided or sequential.
  warm_start: str = "none"  # data_parallel, or single (one replica, copied).
  warm_start_steps: int = 0
  steps_per_dispatch: int = 50  # Steps a program where there are no rounds.

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
    """The method with its settings."""
    given = dataclasses.asdict(self)
    for name in ("warm_start", "warm_start_steps", "steps_per_dispatch"):
      given.pop(name)
    try:
      return named_method(given.pop("method"), **given)
    except ValueError as error:
      raise ValueError(f"sync.{error}") from error


@dataclasses.dataclass(frozen=True)
class CodecConfig:
  """What travels between replicas; what is unset is the part's own."""

  name: str = "float32"  # Parts joined by "+", e.g. low_rank+int.
  rank: int | None = None  # low_rank: columns of a factor.
  power_iterations: int | None = None  # low_rank: passes over the matrix.
  factorisation: str | None = None  # low_rank: shared or local.
  bits: int | None = None  # int: 8, 4, 2 or 1.
  scale: str | None = None  # int: one scale a block, row or tensor.
  block_size: int | None = None  # int, e3m0: values that share a scale.
  rounding: str | None = None  # int: nearest or stochastic.
  top_k_fraction: float | None = None  # top_k: share of values kept.
  top_k_block_size: int | None = None  # top_k: values it chooses among.
  indices: str | None = None  # top_k: packed or bitmap.
  mask_fraction: float | None = None  # random_mask: share of values sent.

  def __post_init__(self):
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
  """How it travels, and what becomes of what was lost."""

  collective: str = "auto"  # all_reduce, all_gather or reduce_scatter.
  error_feedback: bool = False  # What was lost is added to the next exchange.
  keep_unsent: bool = False  # What was lost stays in the replica's parameters.
  feedback_decay: float = 1.0  # Share of the residual that is kept.
  feedback_against: str = "own"  # own or mean: what the residual is left of.
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
    require(
      0 <= self.feedback_decay <= 1,
      f"exchange.feedback_decay={self.feedback_decay} must lie between 0 and 1",
    )


@dataclasses.dataclass(frozen=True)
class AdaptiveConfig:
  """Ranks, and H, that follow the rank of the averaged update."""

  mode: str = "off"  # off, rank, or rank_and_interval.
  window_rounds: int = 5  # Rounds measured before each choice.
  criterion: str = "energy"  # How ranks are measured: energy or stable.
  energy: float = 0.95  # Share of the squared norm that the rank must hold.
  by_leaf: bool = False  # Divide bytes among leaves by energy (docs/log.md).

  def __post_init__(self):
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
  learning_rate: float = 0.7
  momentum: float = 0.6  # The papers have 0.9; see docs/log.md.
  nesterov: bool = True

  def __post_init__(self):
    positive("outer", learning_rate=self.learning_rate)
    within(0, 1, "outer", momentum=self.momentum)
