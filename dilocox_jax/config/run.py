"""The config of one run, which is checked before anything is built.

Experiments give a plain mapping, which becomes frozen values here. Numbers that
follow from others (tokens, bytes, the overlap of a whole round) are computed
where they are used and are no fields.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dilocox_jax.checks import (
  dataclass_from,
  flat,
  in_front,
  require,
  shown,
)
from dilocox_jax.codecs.named import split_links
from dilocox_jax.config import sections
from dilocox_jax.config.recipes import DEFAULTS, resolved, unread_fields
from dilocox_jax.field_facts import Facts, facts_of
from dilocox_jax.plan.choices import check_splash_length, loaded
from dilocox_jax.plan.collectives import MAILBOX
from dilocox_jax.plan.model.adapters import Lora
from dilocox_jax.plan.model.division import Division, StageLayers
from dilocox_jax.plan.pipeline import Pipeline
from dilocox_jax.plan.schedule.fragments import Fragments, Shapes, stacked_shape
from dilocox_jax.plan.schedule.methods import with_interval

LARGEST_COUNT = 2**31 - 1  # Steps are counted in 32 bits, with a sign.
LARGEST_SEED = 2**32 - 1  # jax.random.key drops the bits above the 32nd.


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """Everything that a run depends on.

  Fields that were left to the method (None) have values once it is built.
  """

  seed: int = 0  # 0 to LARGEST_SEED.
  total_steps: int = 600  # Inner steps, warm start included.
  data: sections.DataConfig = sections.DataConfig()
  model: sections.ModelConfig = sections.ModelConfig()
  lora: Lora = Lora()
  inner: sections.InnerConfig = sections.InnerConfig()
  sync: sections.SyncConfig = sections.SyncConfig()
  exchange: sections.ExchangeConfig = sections.ExchangeConfig()
  mailbox: sections.MailboxConfig = sections.MailboxConfig()
  adaptive: sections.AdaptiveConfig = sections.AdaptiveConfig()
  outer: sections.OuterConfig = sections.OuterConfig()
  mesh: sections.MeshConfig = sections.MeshConfig()
  membership: sections.MembershipConfig = sections.MembershipConfig()
  evaluation: sections.EvaluationConfig = sections.EvaluationConfig()
  checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()

  def __repr__(self) -> str:
    """Names what is trained on one line; `to_mapping` has all fields."""
    count = self.mesh.num_replicas
    replicas = f"{count} replica{'s' * (count != 1)}"
    return (
      f"RunConfig({self.sync.method}, {self.total_steps:,} steps, model "
      f"{self.model.label}, {replicas})"
    )

  def __post_init__(self):
    self._resolve()
    self._check_sizes()
    require(
      0 <= self.seed <= LARGEST_SEED,
      f"seed={self.seed} must be from 0 to {LARGEST_SEED}: JAX's keys hold 32 "
      "bits of it",
    )
    require(
      self.total_steps > self.sync.warm_start_steps,
      f"total_steps={self.total_steps} must exceed "
      f"sync.warm_start_steps={self.sync.warm_start_steps}",
    )
    require(
      0 <= self.inner.warmup_steps < self.total_steps,
      f"inner.warmup_steps={self.inner.warmup_steps} must be less than "
      f"total_steps={self.total_steps}",
    )
    with in_front("model/sync: "):
      _ = self.trained_shapes, self.fragments
    length, longest = self.data.sequence_length, self.model.shape.num_positions
    require(
      not longest or length <= longest,
      f"data.sequence_length={length} exceeds the learned positions of the "
      f"model: take at most model.num_positions={longest}",
    )
    if self.model.attention == "splash":
      check_splash_length(length)
    with in_front("exchange."):
      self._check_collective()
    self._check_rank()
    self._check_mesh()
    self._check_unsent()
    self._check_adaptive()
    self._check_membership()
    if self.uses_mailbox:
      self._check_meeting()
    messages = unread_fields(
      flat(self.to_mapping()), _defaults(), field_facts()
    )
    for message in messages.values():
      raise ValueError(message)

  def _check_sizes(self) -> None:
    """Refuses counts that arrays and counters of JAX cannot hold."""
    for path, value in flat(self.to_mapping()).items():
      is_count = isinstance(value, int) and path != "seed"
      require(
        not is_count or abs(value) <= LARGEST_COUNT,
        f"{path}={shown(value)} must be at most {LARGEST_COUNT}",
      )

  def _resolve(self) -> None:
    """Puts values in the place of all that is left to the method."""
    given = self.to_mapping()
    values = resolved(flat(given), field_facts())
    for name, section in given.items():
      if isinstance(section, dict):
        filled = {field: values[f"{name}.{field}"] for field in section}
        object.__setattr__(self, name, type(getattr(self, name))(**filled))

  def _check_rank(self) -> None:
    """Refuses a rank that no matrix has, as none would be factorized then."""
    rank = getattr(self.exchange.named_codec, "rank", 0)
    shapes = self.trained_shapes.items()
    layers = [stacked_shape(path, shape)[1:] for path, shape in shapes]
    highest = max(min(shape) for shape in layers if len(shape) == 2)
    require(
      rank <= highest,
      f"exchange.codec={self.exchange.codec!r}: rank={rank} exceeds that of "
      "every matrix of the model, so nothing would be factorized: take at most "
      f"{highest}",
    )

  def _check_collective(self) -> None:
    # Loaded here, because it loads JAX, which `--help` needs not wait for.
    from dilocox_jax.aggregators.collective import chosen_collective

    exchange = self.exchange
    any_number = 2  # Of replicas: it only decides what "auto" stands for.
    chosen = chosen_collective(
      exchange.named_codec, exchange.collective, any_number
    )
    require(
      chosen.is_shared or self.sync.named.exchanged == "pseudo_gradient",
      f"collective={exchange.collective!r} gives each replica another mean, "
      f"but sync.method={self.sync.method!r} trains one model on mean "
      "gradients: take 'auto', or a method with rounds such as diloco",
    )

  def _check_mesh(self) -> None:
    divisor = self.inner.accumulate_steps * self.mesh.num_data_shards
    require(
      self.data.batch_size % divisor == 0,
      f"data.batch_size={self.data.batch_size} must be divisible by "
      f"inner.accumulate_steps={self.inner.accumulate_steps} times "
      f"mesh.num_data_shards={self.mesh.num_data_shards}",
    )
    require(
      not (self.lora.rank and self.mesh.num_stages > 1),
      "lora.rank: pipeline stages train all of a model: set mesh.num_stages=1",
    )
    with in_front("mesh: "):
      _ = self.pipeline, self.stage_layers

  def _check_unsent(self) -> None:
    method = self.sync.named
    require(
      not self.exchange.keep_unsent or method.can_keep_unsent,
      "exchange.keep_unsent=True needs replicas that go on from the outer "
      f"parameters at once, or rule 'continue', not {method.rule!r} with "
      f"overlap_steps={method.schedule.overlap_steps}: take "
      "exchange.feedback",
    )

  def _check_adaptive(self) -> None:
    mode = self.adaptive.mode
    if mode == "off":
      return
    require(
      split_links(self.exchange.codec)[0][0] == "low_rank",
      f"adaptive.mode={mode!r} needs a rank to adapt, but exchange.codec="
      f"{self.exchange.codec!r} has no shared low-rank part: take "
      "'low_rank+int'",
    )
    require(
      self.sync.named.exchanged == "pseudo_gradient",
      f"adaptive.mode={mode!r} follows rounds, but sync.method="
      f"{self.sync.method!r} sends gradients: take mode 'off'",
    )
    if mode == "rank_and_interval":
      instead = f"adaptive.mode={mode!r} (take 'rank' instead)"
      with in_front(f"{instead} does not go with sync."):
        with_interval(self.sync.named, 1)

  def _check_membership(self) -> None:
    """Refuses absences and uneven steps where their rules say nothing."""
    if self.membership == sections.MembershipConfig():
      return
    mode = self.adaptive.mode
    others = {
      f"adaptive.mode={mode!r}: take rank": mode == "rank_and_interval",
      "a divided replica: take one stage and one shard": self.mesh.is_divided,
      # It would compare norms that are weighted, and a mean of too few.
      "exchange.max_norm_ratio: drop it": bool(self.exchange.max_norm_ratio),
    }
    reason = _unfit(self, others)
    require(
      not reason,
      "membership.absences, absence_rate and inner_steps do not go with "
      f"{reason}, or drop them",
    )
    _ = self.membership.plan(self.sync.named, self.mesh.num_replicas, self.seed)

  def _check_meeting(self) -> None:
    """Refuses what replicas that are programs of their own cannot do."""
    mode, steps = self.adaptive.mode, self.sync.warm_start_steps
    plans_absences = self.membership != sections.MembershipConfig()
    others = {
      f"adaptive.mode={mode!r}: take off": mode != "off",
      f"sync.warm_start_steps={steps}: take 0": steps > 0,
      "membership's planned absences: drop them": plans_absences,
    }
    reason = _unfit(self, others)
    require(
      not reason, f"replicas that meet in a store do not go with {reason}"
    )

  @property
  def uses_mailbox(self) -> bool:
    """Whether replicas are programs of their own that meet in a store."""
    return self.exchange.collective == MAILBOX

  @property
  def num_local_replicas(self) -> int:
    """Replicas of one runtime: all of them, or one if they meet in a store."""
    return 1 if self.uses_mailbox else self.mesh.num_replicas

  @property
  def num_devices(self) -> int:
    """Devices of one runtime: one if the replicas are stacked."""
    is_mesh = self.mesh.layout == "mesh"
    return self.num_local_replicas * self.division.num_devices if is_mesh else 1

  @functools.cached_property
  def trained_shapes(self) -> Shapes:
    """Shape of every leaf that is trained: of the adapters, or of the model."""
    whole = self.model.shape.parameter_shapes
    return self.lora.shapes(whole) if self.lora.rank else whole

  @functools.cached_property
  def fragments(self) -> Fragments:
    """Fragments into which the method divides the model."""
    method = self.sync.named
    return Fragments(
      method.schedule.num_fragments,
      self.model.shape.num_layers,
      method.fragment_order,
    )

  @property
  def model_builder(self) -> Callable[..., Any]:
    """Function that builds the model from its shape (`ModelShape.builder`)."""
    return loaded(type(self.model.shape).builder)

  @property
  def pipeline(self) -> Pipeline:
    """Order in which the stages run the micro-batches of an inner step."""
    mesh = self.mesh
    return Pipeline(mesh.pipeline, mesh.num_stages, self.inner.accumulate_steps)

  @property
  def stage_layers(self) -> StageLayers:
    """Layers of each pipeline stage."""
    return StageLayers(self.model.shape.num_layers, self.mesh.num_stages)

  @property
  def division(self) -> Division:
    """Division of a replica's arrays among its devices."""
    is_whole = self.fragments.num_fragments == 1
    return Division(
      num_data_shards=self.mesh.num_data_shards,
      num_stages=self.mesh.num_stages,
      num_tensor_shards=self.mesh.num_tensor_shards,
      layers_on_stages=is_whole and self.stage_layers.is_even,
    )

  @property
  def tokens_per_replica_step(self) -> int:
    """Number of tokens in one replica's inner step."""
    return self.data.batch_size * self.data.sequence_length

  @classmethod
  def from_mapping(cls, values: Mapping[str, Any]) -> "RunConfig":
    """Builds a config and checks it.

    Args:
      values: Nested mapping from sections to fields, or dotted names of
        fields. Fields that are missing have their defaults; None leaves a field
        to the method where a method may set it.

    Raises:
      ValueError: One line that names the field, the value and what to change.
    """
    nested: dict[str, Any] = {}
    for path, value in flat(values).items():
      if value == {} and "." not in path:  # A section in which nothing is set.
        nested.setdefault(path, {})
        continue
      section, _, field = path.rpartition(".")
      (nested.setdefault(section, {}) if section else nested)[field] = value
    return dataclass_from(cls, nested)

  @classmethod
  def from_saved(cls, values: Mapping[str, Any]) -> "RunConfig":
    """Builds a config from what a run has written, which is every field.

    Args:
      values: What `to_mapping` returned.

    Raises:
      ValueError: One line, if a field is missing or wrong. A default would take
        the place of a field that is lost, and describe another run.
    """
    lost = flat(cls().to_mapping()).keys() - flat(values).keys()
    require(
      not lost,
      f"it lacks {min(lost, default='')}: it is damaged, or of another version",
    )
    return cls.from_mapping(values)

  def to_mapping(self) -> dict[str, Any]:
    """Returns nested plain values, from which `from_mapping` builds it."""
    return dataclasses.asdict(self)


def check_config(config: Any) -> None:
  """Raises TypeError unless a value is the config of a run."""
  if not isinstance(config, RunConfig):
    raise TypeError(
      f"config={shown(config)} must be a dilocox_jax.RunConfig, such as "
      "RunConfig(total_steps=100)"
    )


def _unfit(config: RunConfig, others: Mapping[str, bool]) -> str:
  """Returns what replicas that come and go cannot do, and what to take instead.

  Args:
    config: Config of a run whose replicas come and go, or differ in pace.
    others: More reasons, and whether they hold.
  """
  method, memory = config.sync.named, config.mesh.outer_memory
  is_gradient = method.exchanged == "gradient"
  reasons = {
    f"sync.method={config.sync.method!r}: take diloco": is_gradient,
    "sync.rule='eager': take continue": method.rule == "eager",
    f"mesh.outer_memory={memory!r}: take device": memory != "device",
    **others,
  }
  return next((reason for reason, is_so in reasons.items() if is_so), "")


def _fields() -> Iterator[tuple[str, dataclasses.Field]]:
  """Yields the fields of all sections, each with its dotted name."""
  for section in dataclasses.fields(RunConfig):
    if dataclasses.is_dataclass(section.default):
      for field in dataclasses.fields(section.default):
        yield f"{section.name}.{field.name}", field


@functools.cache
def _defaults() -> dict[str, Any]:
  """Default values of all fields of all sections, by their dotted names."""
  return {path: field.default for path, field in _fields()} | dict(DEFAULTS)


@functools.cache
def field_facts() -> dict[str, Facts]:
  """Returns what is true of the fields of all sections, by dotted names."""
  return {path: facts_of(field) for path, field in _fields()}


def free_on_resume() -> tuple[str, ...]:
  """Returns the dotted names of fields that may change on resume."""
  facts = field_facts().items()
  return tuple(path for path, fact in facts if fact.is_free_on_resume)


def may_differ() -> tuple[str, ...]:
  """Returns the fields in which programs of one run may differ.

  They are programs that have one replica each. What a replica reads of the text
  is compared by its digest, and weights make up for another batch size.
  """
  facts = field_facts().items()
  return tuple(path for path, fact in facts if fact.may_differ)


from_mapping = RunConfig.from_mapping
from_saved = RunConfig.from_saved
