"""Defines the sections of a run's config; each checks its own fields.

The section `lora` is not here; it is `plan.model.adapters.Lora`. `RunConfig`
(`config.run`) checks that the sections fit together.

`setting` declares a field with limits and facts, e.g. whether it may change
when a run is resumed; `limited` declares limits alone.
"""

import dataclasses
import functools
import math
import typing
from typing import Any

from dilocox_jax.checks import (
  check_limits,
  check_types,
  in_front,
  limited,
  one_of,
  require,
)
from dilocox_jax.codecs.named import named_codec, split_links
from dilocox_jax.data import sources
from dilocox_jax.field_facts import ReadIf, setting
from dilocox_jax.plan import choices
from dilocox_jax.plan.adaptive import MODES
from dilocox_jax.plan.collectives import (
  MAILBOX,
  MAILBOX_SHARES,
  collective_names,
)
from dilocox_jax.plan.model.presets import MODEL_PRESETS
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.plan.pipeline import PIPELINES
from dilocox_jax.plan.schedule import membership
from dilocox_jax.plan.schedule.methods import (
  METHODS,
  Method,
  method_parts,
  named_method,
)

# A field that the method's recipe may set (`config.recipes`) can be None until
# a `RunConfig` is built, which replaces None by a value. So code that reads the
# config of a run never gets None, and type checkers see the type without None.
OF_METHOD: Any = None
if typing.TYPE_CHECKING:
  from dilocox_jax.codecs.base import Codec

  Value = typing.TypeVar("Value")
  OfMethod = typing.Annotated[Value, "None until a run's config is built"]
else:
  OfMethod = typing.Optional


# Number of devices of a replica. A `ReadIf` may name it like a field.
DEVICES = "mesh.num_stages*num_data_shards*num_tensor_shards"


def _reads(field: str) -> ReadIf:
  """Returns the condition that `data.source` reads a field of `DataConfig`."""
  return ReadIf("data.source", lambda source: sources.reads(source, field))


def _takes(section: str, option: str) -> ReadIf:
  """Returns the condition that an optimizer has an option.

  Example: `_takes("inner", "b1")` holds if `inner.optimizer` has b1. It also
  holds for any optimizer that is not in `OPTIMIZER_OPTIONS`.
  """

  def has_option(optimizer: str) -> bool:
    options = choices.OPTIMIZER_OPTIONS.get(optimizer, choices.ALL_OPTIONS)
    return option in options

  return ReadIf(f"{section}.optimizer", has_option)


def _method_has_rounds(method: str) -> bool:
  """Returns whether a method sends pseudo-gradients, not gradients each step.

  An unknown name counts as True; another check refuses it.
  """
  name, _ = method_parts(method)
  if name not in METHODS:
    return True
  return METHODS[name]().exchanged != "gradient"


def _codec_has_low_rank(codec: str) -> bool:
  """Returns whether a codec is `low_rank`, or a chain that contains it."""
  return "low_rank" in dict(split_links(codec))


HAS_ROUNDS = ReadIf("sync.method", _method_has_rounds)
LOSES_VALUES = ReadIf("exchange.codec", lambda codec: codec != "float32")
HAS_LOW_RANK = ReadIf("exchange.codec", _codec_has_low_rank)
USES_MAILBOX = ReadIf("exchange.collective", lambda name: name == MAILBOX)


class Section:
  """Base class of all sections. It checks types and limits of the fields.

  Raises:
    ValueError: If a field has a wrong type or is outside its limits. The
      message is one line.
  """

  def __post_init__(self):
    # The fields of DataConfig are "data.source" and so on in messages.
    name = type(self).__name__.removesuffix("Config").lower()
    check_types(self, f"{name}.")
    check_limits(self, f"{name}.")


@dataclasses.dataclass(frozen=True)
class DataConfig(Section):
  """The text, the tokenizer and the batches on which replicas are trained."""

  # Source of the text: stdlib (Python's library), text_files, shards or
  # synthetic.
  source: str = setting("stdlib", may_differ=True)
  # text_files: pattern of the files, e.g. "notes/**/*.txt". Several patterns,
  # joined by ";", name the parts of the text. shards: folder of the shards.
  glob: str = setting("", read_if=_reads("glob"), may_differ=True)
  # Name of the field of a JSON line that holds the text.
  text_field: str = setting("text", read_if=_reads("text_field"))
  # bytes, bpe (trained on the text), or a tokenizer.json.
  tokenizer: str = setting("bytes", read_if=_reads("tokenizer"))
  # bpe: number of tokens.
  vocab_size: int = setting(
    1024,
    at_least=257,
    at_most=2**24,
    read_if=ReadIf("data.tokenizer", lambda name: name == "bpe"),
  )
  # tokenizer.json: token between documents; "" means a known one, such as
  # <|endoftext|> or </s>.
  end_of_text: str = setting(
    "",
    read_if=ReadIf("data.tokenizer", lambda name: name not in ("bytes", "bpe")),
  )
  # Whether a token attends only to its own document. A sequence may start and
  # end anywhere in the text, so it may have parts of several documents.
  document_masks: bool = False
  # Share of the files that is held out for validation.
  validation_fraction: float = setting(
    0.05, above=0, below=1, read_if=_reads("validation_fraction")
  )
  # Share of the held-out files that only the last evaluation reads. So nobody
  # can choose settings by the loss on these files.
  judge_fraction: float = setting(
    0.0, at_least=0, below=1, read_if=_reads("judge_fraction")
  )
  # Parts of the text that replicas read: "" (all replicas read all parts), own
  # (replica m reads part m), weights of the parts, e.g. "0.7,0.3", or weights
  # for each replica, e.g. "0.9,0.1;0.1,0.9".
  mix: str = setting("", read_if=_reads("glob"))
  # Number of sequences of a replica's step.
  batch_size: int = setting(8, at_least=1, may_differ=True)
  # Number of tokens that are predicted in a sequence.
  sequence_length: int = limited(128, at_least=1)


@dataclasses.dataclass(frozen=True)
class ModelConfig(Section):
  """The model. A field that is None has the value of the preset.

  Exceptions: if `compute_dtype`, `scan_unroll`, `attention`, `remat` or
  `loss_chunk_tokens` is None or "auto", the kind of the device decides.
  """

  # Name of a model; `python -m experiments.fits` shows its leaves.
  preset: str = limited("tiny", choices=MODEL_PRESETS)
  num_layers: int | None = None  # Number of blocks.
  model_dim: int | None = None  # Width of the residual stream.
  num_heads: int | None = None  # Attention heads of a layer.
  ff_dim: int | None = None  # Width inside the MLP.
  activation: str | None = None  # swiglu, gelu or relu.
  qk_norm: bool | None = None  # Whether queries and keys are normalized.
  # Number of heads of keys and values. If it is less than num_heads, several
  # heads share keys and values.
  num_kv_heads: int | None = None
  vocab_size: int | None = None  # Number of different tokens.
  tied_head: bool | None = None  # Whether the head is the token table.
  head_dim: int | None = None  # Width of a head; 0: model_dim / num_heads.
  positions: str | None = None  # rope (rotary) or learned.
  num_positions: int | None = None  # learned: longest sequence.
  # rope: base of the angles.
  rope_base: float | None = setting(
    None,
    read_if=ReadIf("model.positions", lambda kind: kind != "learned"),
  )
  # rope: factor by which slow rotations are slowed down, as in Llama 3.1; 1:
  # they are not.
  rope_factor: float | None = setting(
    None,
    read_if=ReadIf("model.positions", lambda kind: kind != "learned"),
  )
  norm: str | None = None  # rms, or layer (with a bias).
  norm_epsilon: float | None = None  # Added to a norm's mean square.
  biases: str | None = None  # Projections with a bias: none, qkv or all.
  # The next five are left to the devices by default (`config.platforms`).
  # float32 or bfloat16, for activations. Parameters are always float32.
  compute_dtype: str = setting(
    "auto", choices=choices.COMPUTE_DTYPES, is_left_to_device=True
  )
  # Layers in one iteration of the loop over layers; 0 means all, which runs
  # fast but compiles slowly.
  scan_unroll: int | None = setting(
    None, at_least=0, may_differ=True, is_left_to_device=True
  )
  # plain (weights of all queries at once), blockwise (weights of some queries
  # at a time), cudnn (NVIDIA) or splash (TPU).
  attention: str = setting(
    "auto",
    choices=choices.ATTENTIONS,
    may_differ=True,
    is_left_to_device=True,
  )
  # What the backward computes again, if a replica has one device: none, dots
  # (everything except matrix products) or full (everything). Replicas of
  # several devices have mesh.remat. The setting applies to the whole loss of a
  # model that the user supplies; "auto" means none for it.
  remat: str = setting(
    "auto",
    choices=("auto", *choices.REMATS),
    read_if=ReadIf(DEVICES, lambda count: count == 1),
    may_differ=True,
    is_left_to_device=True,
  )
  # Tokens whose logits are in memory together; 0 means all of a batch.
  loss_chunk_tokens: int | None = setting(
    None, at_least=0, may_differ=True, is_left_to_device=True
  )
  # Weight of log(sum(exp(logits)))^2 in the training loss. A negative weight
  # would reward large logits.
  z_loss: float = limited(0.0, at_least=0, below=math.inf)

  def __post_init__(self):
    super().__post_init__()
    self._check_preset_is_read()

  def _check_preset_is_read(self) -> None:
    """Refuses a preset that the user's own fields override completely."""
    preset = MODEL_PRESETS[self.preset]
    default_preset = MODEL_PRESETS[type(self).preset]
    is_default = preset == default_preset
    # A preset of another class is always read: it decides the kind of model.
    if is_default or type(preset) is not type(default_preset):
      return
    # Only fields in which the preset differs from the default preset count.
    preset_fields = [
      name
      for name, value in vars(preset).items()
      if value != getattr(default_preset, name)
    ]
    is_read = any(getattr(self, name) is None for name in preset_fields)
    values = ", ".join(
      f"model.{name}={getattr(self, name)}" for name in preset_fields
    )
    require(
      is_read,
      f"model.preset={self.preset!r} would be ignored, as all that it says is "
      f"set by hand ({values}): change these, or leave model.preset out",
    )

  @property
  def label(self) -> str:
    """Words for the model in logs.

    - "tiny": no field differs from the preset "tiny".
    - "tiny with 512 tokens": only `vocab_size` differs, and is 512.
    - "of own sizes": another field differs from the preset.
    """
    preset = MODEL_PRESETS[self.preset]
    changed = [
      name
      for name, value in vars(self.shape).items()
      if value != getattr(preset, name)
    ]
    if not changed:
      return self.preset
    if changed == ["vocab_size"]:
      return f"{self.preset} with {self.shape.vocab_size} tokens"
    return "of own sizes"

  @functools.cached_property
  def shape(self) -> ModelShape:
    """Shape of the model: the preset's, changed by the fields that are set.

    Raises:
      ValueError: If a field has a wrong value, or if fields do not fit each
        other.
    """
    preset = MODEL_PRESETS[self.preset]
    values = dict(vars(preset))
    for name in values:
      value = getattr(self, name, None)
      if value is not None:
        values[name] = value
    return type(preset)(**values)


@dataclasses.dataclass(frozen=True)
class InnerConfig(Section):
  """The optimizer of the inner steps, and its learning-rate schedule."""

  optimizer: OfMethod[str] = OF_METHOD  # Name of an optax optimizer.
  # Highest learning rate.
  learning_rate: float = limited(2e-3, above=0, below=math.inf)
  # constant, cosine or wsd.
  schedule: str = limited("cosine", choices=choices.SCHEDULES)
  # Inner steps in which the learning rate rises. None means a quarter of the
  # run, at most 50.
  warmup_steps: OfMethod[int] = limited(OF_METHOD, at_least=0)
  # Last learning rate divided by the highest one.
  final_fraction: float = setting(
    0.05,
    at_least=0,
    at_most=1,
    read_if=ReadIf("inner.schedule", lambda name: name != "constant"),
  )
  # Largest norm of a gradient; 0 turns clipping off. A negative limit would
  # reverse every gradient.
  clip_norm: float = limited(1.0, at_least=0, below=math.inf)
  # Number of micro-batches that the batch of an inner step is divided into.
  accumulate_steps: int = setting(1, at_least=1, may_differ=True)
  # Decay of the first moment; 1 would make the first update infinite.
  b1: float = setting(0.9, at_least=0, below=1, read_if=_takes("inner", "b1"))
  # Decay of the second moment.
  b2: float = setting(0.95, at_least=0, below=1, read_if=_takes("inner", "b2"))
  # Weight decay: a step subtracts this share of a parameter, times the learning
  # rate.
  weight_decay: float = setting(
    0.1, at_least=0, below=math.inf, read_if=_takes("inner", "weight_decay")
  )
  # Momentum of optimizers that have one, such as sgd and muon. 0 means the
  # default of the optimizer: 0.95 for muon, none for sgd.
  momentum: float = setting(
    0.0, at_least=0, below=1, read_if=_takes("inner", "momentum")
  )

  @property
  def changed_options(self) -> list[str]:
    """Names of the optimizer's options whose values are not the defaults."""
    defaults = vars(type(self)())
    values = vars(self)
    return [
      option
      for option in choices.ALL_OPTIONS
      if values.get(option) != defaults.get(option)
    ]


@dataclasses.dataclass(frozen=True)
class MeshConfig(Section):
  """The number of replicas, and how each replica is divided among devices."""

  # M: number of copies of the model that train on their own.
  num_replicas: int = limited(2, at_least=1)
  # stacked (all replicas on one device) or mesh (each has its own devices).
  layout: str = setting(
    "stacked", choices=choices.LAYOUTS, is_free_on_resume=True
  )
  # How stacked replicas run: map (one by one, good on a CPU), vmap (together,
  # good on a GPU) or auto (chosen by the device).
  stacked_by: str = setting(
    "auto",
    choices=choices.STACKED_BY,
    may_differ=True,
    is_left_to_device=True,
  )
  # Number of devices, of a replica or of each pipeline stage, that read
  # different sequences of the batch.
  num_data_shards: int = setting(1, at_least=1, is_free_on_resume=True)
  # Number of devices that share the matrix products of a layer, and read the
  # same sequences.
  num_tensor_shards: int = setting(1, at_least=1, is_free_on_resume=True)
  # Number of pipeline stages of a replica.
  num_stages: int = setting(1, at_least=1, is_free_on_resume=True)
  # Pipeline schedule: gpipe or 1f1b.
  pipeline: str = setting(
    "1f1b",
    choices=PIPELINES,
    read_if=ReadIf("mesh.num_stages", lambda count: count > 1),
    is_free_on_resume=True,
  )
  # What the backward computes again, if a replica has several devices: none,
  # dots (everything except matrix products) or full (everything).
  remat: str = setting(
    "dots",
    choices=choices.REMATS,
    read_if=ReadIf(DEVICES, lambda count: count > 1),
    is_free_on_resume=True,
  )
  # When the data shards of a pipeline stage collect its layers: stage (all of
  # them once a step), layer (one layer for each micro-batch: less memory, more
  # bytes inside a cluster) or auto (stage if it fits into a device).
  gather: str = setting(
    "auto",
    choices=choices.GATHERS,
    read_if=ReadIf("mesh.num_stages", lambda count: count > 1),
    is_free_on_resume=True,
    is_left_to_device=True,
  )
  # Where the outer parameters and their optimizer's state are kept: device, or
  # pinned_host (memory of the host).
  outer_memory: str = setting(
    "device", choices=choices.MEMORIES, is_free_on_resume=True
  )
  # What starts a delayed exchange: round (the program that takes the inner
  # steps), thread (a second thread, so that CPUs overlap it with steps) or auto
  # (a thread if it is needed).
  exchange_dispatch: str = setting(
    "auto", choices=choices.DISPATCHES, is_free_on_resume=True
  )

  def __post_init__(self):
    super().__post_init__()
    require(
      self.layout == "mesh" or not self.is_divided,
      f"mesh.layout={self.layout!r} has one device for all, but "
      f"num_data_shards={self.num_data_shards}, "
      f"num_tensor_shards={self.num_tensor_shards} and "
      f"num_stages={self.num_stages} divide a replica: set mesh.layout='mesh'",
    )

  @property
  def is_divided(self) -> bool:
    """Whether a replica is divided among several devices."""
    return self.num_devices > 1

  @property
  def num_devices(self) -> int:
    """Number of devices of one replica."""
    return self.num_data_shards * self.num_tensor_shards * self.num_stages


@dataclasses.dataclass(frozen=True)
class EvaluationConfig(Section):
  """How often a run is evaluated on the validation text, and on how much."""

  # Inner steps between two validations; 0 validates at the end only. None is a
  # tenth of the run, and at most 150 steps. A validation takes place at the end
  # of the round in which the interval is over.
  interval_steps: OfMethod[int] = setting(
    OF_METHOD, at_least=0, is_free_on_resume=True
  )
  # Number of sequences that one validation reads; 0 reads all tokens.
  num_sequences: int = setting(128, at_least=0, may_differ=True)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Section):
  """How often the state is saved, and from which parameters a run starts."""

  # Inner steps between two checkpoints. None is a quarter of the run, and at
  # most 150 steps. A checkpoint is saved at the end of the round in which the
  # interval is over.
  interval_steps: OfMethod[int] = setting(
    OF_METHOD, at_least=1, is_free_on_resume=True
  )
  # Number of newest checkpoints to keep.
  keep: int = setting(2, at_least=1, is_free_on_resume=True)
  # Run directory, or folder of a checkpoint of OPT, Llama or Qwen. The run
  # starts from its parameters. "" means random parameters.
  init_from: str = setting("", may_differ=True)


# Fields of `SyncConfig` that are settings of methods.
_SCHEDULE_FIELDS = (
  "sync_interval",
  "first_interval",
  "steps_per_doubling",
  "num_fragments",
  "overlap_steps",
  "rule",
  "mixing_alpha",
  "fragment_order",
)


@dataclasses.dataclass(frozen=True)
class SyncConfig(Section):
  """The method by which replicas synchronize, and its schedule.

  If a field of the schedule is None, the method's own value counts. A setting
  may also stand behind the method's name: "diloco(sync_interval=32)" sets
  `sync_interval`.
  """

  # Name of the method. Its recipe also sets codec, feedback and optimizers.
  method: str = "diloco"
  # H: inner steps between two sends of the same fragment.
  sync_interval: int | None = None
  # H of the first rounds, which then grow to sync_interval; None: all rounds
  # have sync_interval steps.
  first_interval: int | None = None
  # Inner steps after which the length of a round doubles, while it grows.
  steps_per_doubling: int | None = None
  # P: number of fragments that the parameters are cut into.
  num_fragments: int | None = None
  # tau: inner steps from when a fragment is sent to when its mean is applied.
  overlap_steps: int | None = None
  # How a replica goes on when a mean arrives: reset, continue, mix or eager
  # (docs/methods.md).
  rule: str | None = None
  # Rule mix: weight of the replica's own parameters, 0 to 1.
  mixing_alpha: float | None = None
  # Content of a fragment: whole layers (strided or sequential), or rows of
  # every leaf (sliced or interleaved).
  fragment_order: str | None = None
  # Inner steps before the first round, in which gradients are averaged.
  warm_start_steps: int = limited(0, at_least=0)
  # Inner steps that are dispatched as one program in phases without rounds.
  # None is a tenth of the run, and at most 50 steps.
  steps_per_dispatch: OfMethod[int] = setting(OF_METHOD, at_least=1)

  def __post_init__(self):
    super().__post_init__()
    with in_front("sync."):
      self._move_settings()
    require(
      not self.warm_start_steps or self.named.exchanged != "gradient",
      f"sync.method={self.method!r} already averages every step: "
      "leave sync.warm_start_steps at 0",
    )

  def _move_settings(self) -> None:
    """Moves settings in the text `method` to fields that have their names."""
    name, settings = method_parts(self.method)
    for field in _SCHEDULE_FIELDS:
      if field not in settings:
        continue
      value = getattr(self, field)
      require(
        value is None or value == settings[field],
        f"{field}={value} is set in sync.method={self.method!r} too: drop one",
      )
      object.__setattr__(self, field, settings.pop(field))
    # Settings for which there is no field stay in the text.
    object.__setattr__(self, "method", choices.text_of_part(name, settings))

  @property
  def method_name(self) -> str:
    """Name of the method, without settings."""
    name, _ = method_parts(self.method)
    return name

  @functools.cached_property
  def named(self) -> Method:
    """The method as an object, with the values of the fields that are set.

    Raises:
      ValueError: If there is no such method, or if it does not allow the value
        of a field.
    """
    settings = {field: getattr(self, field) for field in _SCHEDULE_FIELDS}
    with in_front("sync."):
      return named_method(self.method, **settings)


@dataclasses.dataclass(frozen=True)
class ExchangeConfig(Section):
  """How replicas send values to each other: codec, error feedback, collective.

  The values are pseudo-gradients, or the gradients of a method that averages in
  every step.
  """

  # Codec of the messages: names joined by "+", each followed by its settings,
  # e.g. float32, int(bits=1) or low_rank(rank=16)+int(bits=4).
  codec: OfMethod[str] = OF_METHOD
  # auto, all_reduce, all_gather or reduce_scatter; pairs (each replica averages
  # with one other replica at a time); or mailbox (replicas are separate
  # programs that exchange messages through a store), which --mailbox sets.
  collective: str = "auto"
  # Share of the compression error that a replica keeps as a residual and adds
  # to its next message, 0 (none) to 1 (all).
  feedback: OfMethod[float] = setting(
    OF_METHOD, at_least=0, at_most=1, read_if=LOSES_VALUES
  )
  # Whether a replica keeps the compression error in its parameters, instead of
  # in a residual.
  keep_unsent: bool = setting(False, read_if=LOSES_VALUES)
  # What is subtracted to get the residual: own (the replica's message as the
  # others decode it) or mean (the average that comes back).
  against: str = setting(
    "own",
    choices=choices.REFERENCES,
    read_if=ReadIf("exchange.feedback", bool),
  )
  # Largest norm of a replica's values, as a multiple of the usual norm. A
  # replica with a larger norm is left out of the mean. None means 5 with a
  # mailbox. Without a mailbox it means that norms are not compared, because the
  # comparison takes a small message for which all replicas wait.
  max_norm_ratio: float | None = setting(
    None, above=1, below=math.inf, read_if=HAS_ROUNDS
  )

  def __post_init__(self):
    super().__post_init__()
    one_of("exchange.collective", self.collective, collective_names())
    if self.codec is not OF_METHOD:
      _ = self.named_codec
    require(
      not (self.feedback and self.keep_unsent),
      "exchange.feedback and exchange.keep_unsent both make up for what a "
      "codec loses: set one of them",
    )

  @functools.cached_property
  def named_codec(self) -> "Codec":
    """The codec as an object, built from the text `codec`.

    Raises:
      ValueError: If `codec` is None.
    """
    with in_front("exchange."):
      return named_codec(self.codec)


@dataclasses.dataclass(frozen=True)
class MailboxConfig(Section):
  """Rules for replicas that exchange messages through a folder or bucket.

  They are read only if `exchange.collective` is "mailbox".
  """

  # Least number of messages that an event (one exchange) averages. With fewer
  # messages the replicas keep waiting.
  quorum: int = setting(1, at_least=1, read_if=USES_MAILBOX)
  # Seconds that a replica waits for the messages of expected replicas.
  grace_s: float = setting(60.0, above=0, below=math.inf, read_if=USES_MAILBOX)
  # Least number of events between two snapshots of the shared state, from which
  # new replicas start. Between two snapshots each replica also sends at least
  # as many bytes as a snapshot has. Exception: store_bytes needs more
  # snapshots.
  snapshot_every: int = setting(64, at_least=1, read_if=USES_MAILBOX)
  # Largest number of bytes of all objects in the store. None: the limit follows
  # from the size of a snapshot (`mailbox_protocol.store_size`).
  store_bytes: int | None = setting(None, at_least=1, read_if=USES_MAILBOX)
  # Largest norm of a message with full weight, as a multiple of the usual norm.
  # A message with a larger norm has less weight (`mailbox_protocol.manifest`).
  full_weight_ratio: float = setting(
    1.0, at_least=1, below=math.inf, read_if=USES_MAILBOX
  )
  # When each replica makes one share of the mean, and reads the shares of the
  # others instead of their messages: auto (from four replicas on, with floats
  # and with int of 4 or 8 bits); on (from two on, with all codecs that send
  # every value); or off.
  shares: str = setting("auto", choices=MAILBOX_SHARES, read_if=USES_MAILBOX)


@dataclasses.dataclass(frozen=True)
class AdaptiveConfig(Section):
  """Whether and how the codec's rank and H (inner steps of a round) adapt.

  They follow the measured rank of the averaged updates.
  """

  # What adapts: off (nothing), rank, or rank_and_interval (rank and H).
  mode: OfMethod[str] = setting(OF_METHOD, choices=MODES, read_if=HAS_LOW_RANK)
  # Number of rounds that are measured before each choice.
  window_rounds: int = setting(
    5,
    at_least=1,
    read_if=ReadIf("adaptive.mode", lambda mode: mode != "off"),
  )
  # Share of an update's squared norm. The measured rank is the number of
  # directions that hold this share.
  energy: float = setting(0.95, above=0, at_most=1, read_if=HAS_LOW_RANK)


@dataclasses.dataclass(frozen=True)
class OuterConfig(Section):
  """The optimizer of the outer parameters."""

  # Name of an optax optimizer.
  optimizer: str = setting("sgd", read_if=HAS_ROUNDS)
  # Learning rate of the outer step. With 1 and no momentum, the outer
  # parameters become the mean of the replicas.
  learning_rate: OfMethod[float] = setting(
    OF_METHOD, above=0, below=math.inf, read_if=HAS_ROUNDS
  )
  # constant, or cosine (it falls from round to round).
  schedule: str = setting(
    "constant", choices=choices.OUTER_SCHEDULES, read_if=HAS_ROUNDS
  )
  # Ratio to learning_rate that the decay would reach at the end of the run.
  final_fraction: float = setting(
    0.0,
    at_least=0,
    at_most=1,
    read_if=ReadIf("outer.schedule", lambda name: name != "constant"),
  )
  # Momentum of the outer step.
  momentum: OfMethod[float] = setting(
    OF_METHOD, at_least=0, at_most=1, read_if=_takes("outer", "momentum")
  )
  # Whether the momentum is Nesterov's, which looks ahead.
  nesterov: bool = setting(True, read_if=_takes("outer", "nesterov"))
  # Power p of an average of the outer parameters, which is evaluated and kept
  # in place of the newest ones. Round t has about the weight t^p
  # (`outer.average`). 0 means no average.
  average_power: OfMethod[float] = limited(
    OF_METHOD, at_least=0, below=math.inf
  )

  def __post_init__(self):
    super().__post_init__()
    require(
      self.optimizer != "muon",
      "outer.optimizer='muon' needs whole matrices, and a fragment may have"
      " only some rows of them (sync.fragment_order='sliced' or 'interleaved'):"
      " take 'sgd', or inner.optimizer='muon'",
    )
    require(
      not self.is_schedule_free or self.schedule == "constant",
      f"outer.optimizer={self.optimizer!r} needs no decay: set outer.schedule="
      "'constant'",
    )
    require(
      not self.is_schedule_free or not self.average_power,
      f"outer.optimizer={self.optimizer!r} keeps an average of its own: set "
      "outer.average_power=0",
    )

  @property
  def is_schedule_free(self) -> bool:
    """Whether the optimizer is schedule-free.

    Such an optimizer keeps an average of the parameters of its own.
    """
    return self.optimizer.startswith("schedule_free")


@dataclasses.dataclass(frozen=True)
class MembershipConfig(Section):
  """Replicas that are absent for some rounds, or slower than others."""

  # Planned absences, e.g. "1:3-5;0:8": replica 1 is absent in the rounds 3 to
  # 5, and replica 0 in round 8. Replicas and rounds are counted from 0.
  absences: str = ""
  # Probability that a replica is absent in a round; drawn from the seed.
  absence_rate: float = limited(0.0, at_least=0, below=1)
  # Inner steps of each replica in a round, e.g. "32,16"; "" means H for all.
  inner_steps: str = ""

  def plan(
    self, method: Method, num_replicas: int, seed: int
  ) -> membership.Membership:
    """Returns which replicas take part in each round, and with how many steps.

    Args:
      method: Method of the run, which has the schedule of the rounds.
      num_replicas: Number of replicas of the run.
      seed: Seed of the random absences (`absence_rate`).

    Raises:
      ValueError: One line, if a field has a wrong form or does not fit the
        schedule.
    """
    with in_front("membership."):
      return membership.Membership(
        schedule=method.schedule,
        num_replicas=num_replicas,
        absences=membership.named_absences(self.absences),
        absence_rate=self.absence_rate,
        seed=seed,
        inner_steps=membership.named_inner_steps(self.inner_steps),
      )
