import dataclasses

import pytest

from dilocox_jax import checks
from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.config import RunConfig, membership, sections
from dilocox_jax.config.sections import (
  ExchangeConfig,
  ModelConfig,
  SyncConfig,
)
from dilocox_jax.plan.model.presets import nano, tiny
from dilocox_jax.plan.schedule import methods

SECTIONS = {
  field.name: type(getattr(RunConfig(), field.name))
  for field in dataclasses.fields(RunConfig)
  if dataclasses.is_dataclass(getattr(RunConfig(), field.name))
}


def refusal(section, **values):
  """The one line that a section is refused with."""
  with pytest.raises(ValueError) as caught:
    SECTIONS[section](**values)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def test_a_requirement_that_does_not_hold_is_an_error_with_its_message():
  checks.require(True, "never seen")
  with pytest.raises(ValueError, match="^a=3 must be even$"):
    checks.require(False, "a=3 must be even")


@pytest.mark.parametrize(
  "section, name, value",
  [
    ("model", "z_loss", -1.0),
    ("inner", "clip_norm", -0.5),
    ("inner", "weight_decay", float("nan")),
    ("inner", "b2", 1.5),
    ("inner", "final_fraction", -0.1),
    ("outer", "momentum", float("nan")),
  ],
)
def test_numbers_without_a_meaning_are_refused(section, name, value):
  assert f"{section}.{name}={value} must be at least 0" in refusal(
    section, **{name: value}
  )


def test_the_method_is_built_from_the_settings():
  sync = SyncConfig(
    "streaming_diloco",
    sync_interval=12,
    num_fragments=4,
    overlap_steps=5,
    mixing_alpha=0.25,
    fragment_order="sequential",
    warm_start="single",
    warm_start_steps=10,
  )
  assert sync.named == methods.streaming_diloco(12, 4, 5, 0.25, "sequential")
  assert SyncConfig().named == methods.diloco()


def test_the_model_is_the_preset_with_what_is_set():
  assert ModelConfig().shape == tiny
  assert ModelConfig(
    "nano", num_layers=5, qk_norm=True
  ).shape == dataclasses.replace(nano, num_layers=5, qk_norm=True)


def test_the_codec_is_built_from_its_text():
  exchange = ExchangeConfig("low_rank(rank=3)+int(bits=8)")
  assert exchange.named_codec == LowRank(3, then=Int(8))


@pytest.mark.parametrize(
  ("values", "parts"),
  [
    ({"method": "dilco"}, ["sync.method='dilco'", "diloco"]),
    ({"sync_interval": 0}, ["sync.sync_interval=0", "at least 1"]),
    (
      {"method": "streaming_diloco", "overlap_steps": 30},
      ["sync.overlap_steps=30", "sync_interval=30"],
    ),
    (
      {"method": "diloco", "overlap_steps": 3},
      ["sync.overlap_steps=3", "'diloco'"],
    ),
    ({"warm_start": "single"}, ["warm_start='single'", "warm_start_steps=0"]),
    ({"warm_start_steps": 5}, ["warm_start='none'", "warm_start_steps=5"]),
    ({"warm_start": "both"}, ["sync.warm_start='both'", "data_parallel"]),
    (
      {
        "method": "allreduce",
        "warm_start": "data_parallel",
        "warm_start_steps": 5,
      },
      ["sync.method='allreduce'", "sync.warm_start"],
    ),
    ({"steps_per_dispatch": 0}, ["sync.steps_per_dispatch=0"]),
  ],
)
def test_a_sync_section_that_cannot_be_says_why(values, parts):
  message = refusal("sync", **values)
  for part in parts:
    assert part in message


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"codec": "int5"}, "exchange.codec='int5' must be one of float32"),
    (
      {"codec": "int(bits=5)"},
      "exchange.codec int: bits=5 must be one of",
    ),
    ({"codec": "int+"}, "exchange.codec='int+' must be written like"),
    (
      {"codec": "int", "feedback": 1.0, "keep_unsent": True},
      "exchange.feedback and exchange.keep_unsent both make up",
    ),
  ],
)
def test_an_exchange_section_that_cannot_be_says_why(values, message):
  assert refusal("exchange", **values).startswith(message)


@pytest.mark.parametrize(
  ("section", "name", "value"),
  [
    ("data", "batch_size", 0),
    ("data", "sequence_length", -4),
    ("data", "validation_fraction", 0.0),
    ("data", "validation_fraction", 1.0),
    ("model", "preset", "huge"),
    ("model", "compute_dtype", "float16"),
    ("model", "scan_unroll", -1),
    ("inner", "schedule", "linear"),
    ("inner", "learning_rate", 0.0),
    ("inner", "accumulate_steps", 0),
    ("exchange", "collective", "broadcast"),
    ("exchange", "feedback", -0.1),
    ("exchange", "feedback", 1.1),
    ("exchange", "against", "theirs"),
    ("exchange", "residual_dtype", "int4"),
    ("outer", "learning_rate", -0.7),
    ("mesh", "num_replicas", 0),
    ("mesh", "layout", "grid"),
    ("mesh", "stacked_by", "turn"),
    ("mesh", "exchange_dispatch", "process"),
    ("evaluation", "num_sequences", -1),
    ("evaluation", "interval_steps", -1),
    ("checkpoint", "interval_steps", 0),
    ("checkpoint", "keep", 0),
    ("inner", "b2", 1.0),
    ("inner", "b1", 1.0),
    ("inner", "momentum", 1.0),
    ("outer", "optimizer", "muon"),
  ],
)
def test_a_field_out_of_range_is_named_with_its_value(section, name, value):
  assert f"{section}.{name}={value!r}" in refusal(section, **{name: value})


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_residual_may_be_kept_wholly_in_part_or_not_at_all(share):
  assert ExchangeConfig(feedback=share).feedback == share


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_is_a_value_that_cannot_be_changed(name):
  section = SECTIONS[name]()
  homes = (sections.__name__, membership.__name__)
  assert type(section).__module__ in homes
  first = dataclasses.fields(section)[0].name
  with pytest.raises(dataclasses.FrozenInstanceError):
    setattr(section, first, None)
