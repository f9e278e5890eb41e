"""Defines `RunConfig`, the config of one run, and its checks across sections.

`RunConfig.from_mapping` builds a frozen config from a mapping, e.g. from the
command line, and checks it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dilocox_jax.checks import (
  check_types,
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

# Compiled programs count steps as int32.
LARGEST_COUNT = 2**31 - 1
# `jax.random.key` reads 32 bits of a seed, and drops the others.
LARGEST_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """All settings of a run, in sections.

  A method may have a recipe: values for some fields, e.g. for the codec
  (`config.recipes`). If a field that recipes may set is None, the built config
  has the value of the recipe, or a default if the recipe does not set it. Some
  other fields, such as `inner.warmup_steps`, follow from `total_steps` if they
  are None.

  Attributes:
    seed: Seed of the parameters, the data and the codecs, 0 to 2^32 - 1.
    total_steps: Number of inner steps of each replica, including
      `sync.warm_start_steps`.
    data: Text, tokenizer and batches.
    model: Sizes and parts of the model.
    lora: Adapters that are trained in place of the whole model.
    inner: Optimizer of the inner steps.
    sync: Method, and its schedule of exchanges.
    exchange: Codec, error feedback and collective of exchanges.
    mailbox: Rules for replicas that exchange through a folder or bucket.
    adaptive: How the low rank and H (inner steps of a round) adapt.
    outer: Optimizer of the outer parameters.
    mesh: Number of replicas, and how each is divided among devices.
    membership: Planned or random absences of replicas, and slow replicas.
    evaluation: When the loss is evaluated, and on how much text.
    checkpoint: When the state is saved, and from what the run starts.

  Raises:
    ValueError: One line, if a field has a wrong type or is outside its limits,
      if fields contradict each other, or if a field was changed that the run
      would not read.
  """

  seed: int = 0
  total_steps: int = 600
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
    """Returns one line with the most important fields."""
    count = self.mesh.num_replicas
    replicas = "1 replica" if count == 1 else f"{count} replicas"
    return (
      f"RunConfig({self.sync.method}, {self.total_steps:,} steps, model "
      f"{self.model.label}, {replicas})"
    )

  def __post_init__(self):
    """Replaces None where recipe or `total_steps` decide; checks all fields."""
    check_types(self)
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
      self.inner.warmup_steps < self.total_steps,
      f"inner.warmup_steps={self.inner.warmup_steps} must be less than "
      f"total_steps={self.total_steps}",
    )
    with in_front("model/sync: "):
      # These two raise an error if the model or the schedule is wrong.
      _ = self.trained_shapes
      _ = self.fragments
    length = self.data.sequence_length
    longest = self.model.shape.num_positions  # 0 if positions are not learned.
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
      self._check_mailbox()
    # A changed field that the run would ignore is a mistake of the user.
    messages = unread_fields(
      flat(self.to_mapping()), _defaults(), field_facts()
    )
    if messages:
      raise ValueError(next(iter(messages.values())))

  def _check_sizes(self) -> None:
    """Refuses integers that do not fit into int32, except for the seed."""
    for path, value in flat(self.to_mapping()).items():
      is_count = isinstance(value, int) and path != "seed"
      require(
        not is_count or abs(value) <= LARGEST_COUNT,
        f"{path}={shown(value)} must be at most {LARGEST_COUNT}",
      )

  def _resolve(self) -> None:
    """Replaces None in the fields that the recipe or `total_steps` decides."""
    sections_with_none = self.to_mapping()
    values = resolved(flat(sections_with_none), field_facts())
    for name, section in sections_with_none.items():
      if isinstance(section, dict):
        filled = {field: values[f"{name}.{field}"] for field in section}
        section_class = type(getattr(self, name))
        # A frozen dataclass can set its fields only in this way.
        object.__setattr__(self, name, section_class(**filled))

  def _check_rank(self) -> None:
    """Refuses a low rank above the shorter side of every trained matrix."""
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
    """Refuses a collective that does not fit the codec or the method."""
    # This module imports JAX. It is imported here so that `--help` is fast.
    from dilocox_jax.aggregators.collective import chosen_collective

    exchange = self.exchange
    # The number of replicas only decides what "auto" chooses. This does not
    # matter here: every choice fits the codec and the method.
    any_number_of_replicas = 2
    chosen = chosen_collective(
      exchange.named_codec, exchange.collective, any_number_of_replicas
    )
    require(
      chosen.is_shared or self.sync.named.exchanged == "pseudo_gradient",
      f"collective={exchange.collective!r} gives each replica another mean, "
      f"but sync.method={self.sync.method!r} trains one model on mean "
      "gradients: take 'auto', or a method with rounds such as diloco",
    )

  def _check_mesh(self) -> None:
    """Refuses to divide a replica in a way that batch, model or LoRA forbid."""
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
      # These two raise an error if the stages or the micro-batches are wrong.
      _ = self.pipeline
      _ = self.stage_layers

  def _check_unsent(self) -> None:
    """Refuses `exchange.keep_unsent` for methods that do not allow it."""
    method = self.sync.named
    require(
      not self.exchange.keep_unsent or method.can_keep_unsent,
      "exchange.keep_unsent=True needs replicas that go on from the outer "
      f"parameters at once, or rule 'continue', not {method.rule!r} with "
      f"overlap_steps={method.schedule.overlap_steps}: take "
      "exchange.feedback",
    )

  def _check_adaptive(self) -> None:
    """Refuses to adapt rank or H if codec, method or schedule forbids it."""
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
      start_of_message = (
        f"adaptive.mode={mode!r} (take 'rank' instead) does not go with sync."
      )
      with in_front(start_of_message):
        # This call raises an error if the method does not allow another H.
        with_interval(self.sync.named, 1)
      require(
        self.outer.schedule == "constant",
        f"adaptive.mode={mode!r} leaves the number of rounds open, so "
        f"outer.schedule={self.outer.schedule!r} has no end: take mode 'rank'",
      )

  def _check_membership(self) -> None:
    """Refuses absent and slow replicas if other fields rule them out."""
    if self.membership == sections.MembershipConfig():
      return
    reason = _reason_against_changing_replicas(self)
    reason = reason or _reason_against_absences(self)
    require(
      not reason,
      "membership.absences, absence_rate and inner_steps do not go with "
      f"{reason}, or drop them",
    )
    # It raises an error if the absences do not fit the schedule.
    _ = self.membership.plan(self.sync.named, self.mesh.num_replicas, self.seed)

  def _check_mailbox(self) -> None:
    """Refuses fields that replicas with a mailbox cannot have."""
    reason = _reason_against_changing_replicas(self)
    reason = reason or _reason_against_a_mailbox(self)
    require(
      not reason, f"replicas that meet in a store do not go with {reason}"
    )

  @property
  def uses_mailbox(self) -> bool:
    """Whether replicas are separate programs that exchange through a mailbox.

    A mailbox is a folder or a bucket.
    """
    return self.exchange.collective == MAILBOX

  @property
  def num_local_replicas(self) -> int:
    """Number of replicas in all processes of this program; 1 with a mailbox."""
    return 1 if self.uses_mailbox else self.mesh.num_replicas

  @property
  def num_devices(self) -> int:
    """Number of devices in all processes of this program.

    It is 1 if all replicas are on one device (`mesh.layout="stacked"`).
    """
    if self.mesh.layout != "mesh":
      return 1
    return self.num_local_replicas * self.division.num_devices

  @functools.cached_property
  def trained_shapes(self) -> Shapes:
    """Shapes of the trained parameters, by path.

    These are the adapters if `lora.rank` is above 0, otherwise the whole model.
    """
    model_shapes = self.model.shape.parameter_shapes
    if not self.lora.rank:
      return model_shapes
    return self.lora.shapes(model_shapes)

  @functools.cached_property
  def fragments(self) -> Fragments:
    """How the method cuts the parameters into fragments, sent one by one."""
    method = self.sync.named
    return Fragments(
      method.schedule.num_fragments,
      self.model.shape.num_layers,
      method.fragment_order,
    )

  @property
  def model_builder(self) -> Callable[..., Any]:
    """The function that builds the model from its `ModelShape` and options."""
    return loaded(type(self.model.shape).builder)

  @property
  def pipeline(self) -> Pipeline:
    """The order in which pipeline stages run micro-batches of an inner step."""
    mesh = self.mesh
    return Pipeline(mesh.pipeline, mesh.num_stages, self.inner.accumulate_steps)

  @property
  def stage_layers(self) -> StageLayers:
    """Which layers each pipeline stage has."""
    return StageLayers(self.model.shape.num_layers, self.mesh.num_stages)

  @property
  def division(self) -> Division:
    """How a replica's arrays are divided among its devices."""
    is_whole = self.fragments.num_fragments == 1
    return Division(
      num_data_shards=self.mesh.num_data_shards,
      num_stages=self.mesh.num_stages,
      num_tensor_shards=self.mesh.num_tensor_shards,
      layers_on_stages=is_whole and self.stage_layers.is_even,
    )

  @property
  def tokens_per_replica_step(self) -> int:
    """Number of tokens that one replica trains on in one inner step."""
    return self.data.batch_size * self.data.sequence_length

  @classmethod
  def from_mapping(cls, values: Mapping[str, Any]) -> "RunConfig":
    """Builds a config and checks it.

    Args:
      values: Fields, nested as {"sync": {"method": "diloco"}} or by dotted name
        as {"sync.method": "diloco"}. Missing fields get their defaults.

    Raises:
      ValueError: If a field is unknown or wrong. The message is one line that
        names the field and the value, and says what to change.
    """
    nested: dict[str, Any] = {}
    for path, value in flat(values).items():
      # `flat` keeps {"sync": {}} as the pair ("sync", {}).
      is_empty_section = value == {} and "." not in path
      section, _, field = path.rpartition(".")
      if is_empty_section:
        nested.setdefault(path, {})
      elif section:
        fields = nested.setdefault(section, {})
        require(
          isinstance(fields, dict),
          f"{section}={shown(fields)} must be a mapping of fields",
        )
        fields[field] = value
      else:
        nested[field] = value
    return dataclass_from(cls, nested)

  @classmethod
  def from_saved(cls, values: Mapping[str, Any]) -> "RunConfig":
    """Builds a config from all the fields that a run has saved.

    Args:
      values: All fields, as `to_mapping` returned them. A missing field is an
        error: its default could describe another run.

    Raises:
      ValueError: If a field is missing, unknown or wrong. The message is one
        line.
    """
    missing = flat(cls().to_mapping()).keys() - flat(values).keys()
    first_missing = min(missing, default="")
    require(
      not missing,
      f"it lacks {first_missing}: it is damaged, or of another version",
    )
    return cls.from_mapping(values)

  def to_mapping(self) -> dict[str, Any]:
    """Returns all fields as nested dicts. `from_mapping` reads them."""
    return dataclasses.asdict(self)


def check_config(config: Any) -> None:
  """Raises TypeError unless `config` is a `RunConfig`."""
  if not isinstance(config, RunConfig):
    raise TypeError(
      f"config={shown(config)} must be a dilocox_jax.RunConfig, such as "
      "RunConfig(total_steps=100)"
    )


def _reason_against_changing_replicas(config: RunConfig) -> str:
  """Returns which field forbids absent replicas, slow ones and a mailbox.

  The result ends an error message, as in "sync.rule='eager': take continue". It
  is "" if no field forbids them.
  """
  method = config.sync.named
  outer_memory = config.mesh.outer_memory
  if method.exchanged == "gradient":
    return f"sync.method={config.sync.method!r}: take diloco"
  if method.rule == "eager":
    return "sync.rule='eager': take continue"
  if outer_memory != "device":
    return f"mesh.outer_memory={outer_memory!r}: take device"
  return ""


def _reason_against_absences(config: RunConfig) -> str:
  """Returns which field forbids absent and slow replicas; "" if none does.

  The result has the form that `_reason_against_changing_replicas` describes.
  Fields that are checked there are not checked here.
  """
  mode = config.adaptive.mode
  if mode == "rank_and_interval":
    return f"adaptive.mode={mode!r}: take rank"
  if config.mesh.is_divided:
    return "a divided replica: take one stage and one shard"
  if config.exchange.max_norm_ratio:
    # Too few replicas would be present for a meaningful median of their norms.
    return "exchange.max_norm_ratio: drop it"
  return ""


def _reason_against_a_mailbox(config: RunConfig) -> str:
  """Returns which field forbids a mailbox; "" if none does.

  The result has the form that `_reason_against_changing_replicas` describes.
  Fields that are checked there are not checked here.
  """
  mode = config.adaptive.mode
  warm_start_steps = config.sync.warm_start_steps
  if mode != "off":
    return f"adaptive.mode={mode!r}: take off"
  if warm_start_steps > 0:
    return f"sync.warm_start_steps={warm_start_steps}: take 0"
  if config.membership != sections.MembershipConfig():
    return "membership's planned absences: drop them"
  return ""


def _fields() -> Iterator[tuple[str, dataclasses.Field]]:
  """Yields each field of each section, as a pair (dotted name, field)."""
  for section in dataclasses.fields(RunConfig):
    if dataclasses.is_dataclass(section.default):
      for field in dataclasses.fields(section.default):
        yield f"{section.name}.{field.name}", field


@functools.cache
def _defaults() -> dict[str, Any]:
  """Returns the default of each section's fields, by dotted name.

  For a field that recipes may set, it is the value without a recipe, not None.
  """
  return {path: field.default for path, field in _fields()} | dict(DEFAULTS)


@functools.cache
def field_facts() -> dict[str, Facts]:
  """Returns what the fields of all sections declare, by dotted name.

  For example, the facts of "data.glob" say when a run reads this field. `seed`
  and `total_steps` are in no section, so they have no entry.
  """
  return {path: facts_of(field) for path, field in _fields()}


def changed_settings(values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
  """Returns the settings of a run that differ from its method's defaults.

  The method and the number of steps are compared with the defaults of
  `RunConfig`. Every other field is compared with its value in a run for which
  only this method and this number of steps are set. If this program cannot
  build such a run, every field is compared with the default of `RunConfig`.

  Args:
    values: All fields of the run's config, nested by section. Unknown fields
      are skipped.

  Returns:
    Pairs (value, default) by dotted name, the method and the number of steps
    first.
  """
  fields = flat(values)
  plain_defaults = dict(flat(RunConfig().to_mapping()))
  choices = {
    path: fields[path]
    for path in ("sync.method", "total_steps")
    if path in fields
  }
  try:
    defaults = dict(flat(RunConfig.from_mapping(choices).to_mapping()))
  except ValueError:  # For example a method that only the run has registered.
    defaults = plain_defaults
  defaults |= {path: plain_defaults[path] for path in choices}
  return {
    path: (fields[path], defaults[path])
    for path in [*choices, *fields]
    if path in defaults and fields[path] != defaults[path]
  }


def free_on_resume() -> tuple[str, ...]:
  """Returns the dotted names of fields that may change if a run is resumed."""
  facts = field_facts().items()
  return tuple(path for path, fact in facts if fact.is_free_on_resume)


def may_differ() -> tuple[str, ...]:
  """Returns the dotted names of fields that may differ between replicas.

  Only replicas with a mailbox can differ: each is a program with its own
  config. For example, their batch sizes may differ.
  """
  facts = field_facts().items()
  return tuple(path for path, fact in facts if fact.may_differ)


from_mapping = RunConfig.from_mapping
from_saved = RunConfig.from_saved
