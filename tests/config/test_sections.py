import dataclasses

import pytest

from dilocox_jax import checks
from dilocox_jax.config import RunConfig, membership, sections
from dilocox_jax.config.sections import (
  CodecConfig,
  ExchangeConfig,
  ModelConfig,
  SyncConfig,
)
from dilocox_jax.plan.model.presets import nano, tiny
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.wire.chain import Chain
from dilocox_jax.plan.wire.payload import E3M0, Dense, Int
from dilocox_jax.plan.wire.payload_names import PAYLOADS
from dilocox_jax.plan.wire.reduction import LowRank, RandomMask, TopK

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


def test_every_setting_of_the_packages_payloads_has_a_flag_and_no_other():
  own = [
    kind
    for kind in PAYLOADS.values()
    if kind.payload.__module__.startswith("dilocox_jax.")
  ]
  settings = {setting for kind in own for setting in kind.settings}
  flags = {field.name for field in dataclasses.fields(CodecConfig)}
  assert flags - {"name"} == settings


@pytest.mark.parametrize(
  ("settings", "payload"),
  [
    ({"name": "float32"}, Dense()),
    ({"name": "bfloat16"}, Dense("bfloat16")),
    ({"name": "e3m0", "block_size": 32}, E3M0(32)),
    (
      {"name": "int", "bits": 8, "scale": "row", "rounding": "stochastic"},
      Int(8, "row", rounding="stochastic"),
    ),
    (
      {"name": "low_rank+int", "rank": 3, "power_iterations": 2},
      Chain((LowRank(3, 2), Int())),
    ),
    (
      {"name": "low_rank", "factorisation": "local"},
      Chain((LowRank(factorisation="local"), Dense())),
    ),
    (
      {
        "name": "random_mask+top_k+int",
        "mask_fraction": 0.2,
        "top_k_fraction": 0.5,
        "top_k_block_size": 64,
        "indices": "bitmap",
        "block_size": 16,
      },
      Chain((RandomMask(0.2), TopK(0.5, 64, "bitmap"), Int(block_size=16))),
    ),
  ],
)
def test_the_payload_is_built_from_the_settings(settings, payload):
  built = CodecConfig(**settings).payload
  same_chain = isinstance(payload, Chain) and not isinstance(built, Chain)
  assert (Chain((built,)) if same_chain else built) == payload


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
  ("values", "parts"),
  [
    ({"name": "int5"}, ["codec.name='int5'", "int", "top_k"]),
    ({"name": "int+"}, ["codec.name=''", "joined by '+'"]),
    ({"name": "int", "bits": 5}, ["codec.bits=5", "8, 4, 2, 1"]),
    ({"name": "int", "scale": "column"}, ["codec.scale='column'", "row"]),
    ({"name": "int", "rounding": "up"}, ["codec.rounding='up'", "nearest"]),
    ({"name": "int", "block_size": 0}, ["codec.block_size=0", "at least 1"]),
    ({"name": "e3m0", "block_size": 0}, ["codec.block_size=0"]),
    ({"name": "e3m0", "bits": 4}, ["codec.bits=4", "'e3m0'", "block_size"]),
    ({"name": "float32", "rank": 4}, ["codec.rank=4", "'float32'", "drop"]),
    ({"name": "low_rank", "rank": 0}, ["codec.rank=0", "at least 1"]),
    (
      {"name": "low_rank", "power_iterations": 0},
      ["codec.", "power_iterations=0"],
    ),
    (
      {"name": "low_rank", "factorisation": "svd"},
      ["codec.factorisation='svd'", "shared, local"],
    ),
    ({"name": "top_k", "indices": "raw"}, ["codec.indices='raw'", "bitmap"]),
    ({"name": "top_k", "top_k_fraction": 0.0}, ["codec.", "fraction=0.0"]),
    ({"name": "random_mask", "mask_fraction": 1.5}, ["codec.", "=1.5"]),
    ({"name": "int+top_k"}, ["codec.", "Int -> TopK", "quantiser comes last"]),
    ({"name": "int+e3m0"}, ["codec.", "Int -> E3M0"]),
    ({"name": "top_k+low_rank"}, ["codec.", "TopK -> LowRank"]),
  ],
)
def test_a_codec_section_that_cannot_be_says_why(values, parts):
  message = refusal("codec", **values)
  for part in parts:
    assert part in message


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
    ("exchange", "feedback_decay", -0.1),
    ("exchange", "feedback_decay", 1.1),
    ("exchange", "feedback_against", "theirs"),
    ("exchange", "feedback_dtype", "int4"),
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


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_a_residual_may_be_kept_wholly_in_part_or_not_at_all(decay):
  assert ExchangeConfig(feedback_decay=decay).feedback_decay == decay


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_is_a_value_that_cannot_be_changed(name):
  section = SECTIONS[name]()
  homes = (sections.__name__, membership.__name__)
  assert type(section).__module__ in homes
  first = dataclasses.fields(section)[0].name
  with pytest.raises(dataclasses.FrozenInstanceError):
    setattr(section, first, None)
