import dataclasses

import pytest

from dilocox_jax import config
from dilocox_jax.config import FREE_ON_RESUME, RunConfig, from_mapping
from dilocox_jax.mapping import changed_fields, check_path
from dilocox_jax.models.presets import nano, tiny
from dilocox_jax.plan import methods
from dilocox_jax.plan.fragments import Fragments

EVERYTHING = {
  "seed": 3,
  "total_steps": 90,
  "data": {"source": "text_files", "glob": "*.txt", "batch_size": 6},
  "model": {"preset": "nano", "num_layers": 5, "qk_norm": True},
  "inner": {"optimizer": "sgd", "warmup_steps": 9, "accumulate_steps": 3},
  "sync": {
    "method": "streaming_diloco",
    "sync_interval": 12,
    "num_fragments": 4,
    "overlap_steps": 5,
    "mixing_alpha": 0.25,
    "fragment_order": "sequential",
    "warm_start": "single",
    "warm_start_steps": 10,
  },
  "outer": {"learning_rate": 1.0, "nesterov": False},
  "mesh": {"num_replicas": 4, "layout": "mesh"},
  "evaluation": {"interval_steps": 0},
  "checkpoint": {"keep": 5},
}


def refusal(values):
  """The one line that a config is refused with."""
  with pytest.raises(ValueError) as caught:
    from_mapping(values)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def test_an_empty_mapping_is_the_default_run():
  assert from_mapping({}) == RunConfig()


def test_a_config_comes_back_from_its_own_mapping():
  built = from_mapping(EVERYTHING)
  assert from_mapping(built.to_mapping()) == built
  for name, section in EVERYTHING.items():
    if isinstance(section, dict):
      kept = dataclasses.asdict(getattr(built, name))
      assert section.items() <= kept.items()
    else:
      assert getattr(built, name) == section


def test_the_method_is_built_from_the_settings():
  assert from_mapping(EVERYTHING).sync.named == methods.streaming_diloco(
    12, 4, 5, 0.25, "sequential"
  )
  assert RunConfig().sync.named == methods.diloco()


def test_derived_values_follow_from_the_fields():
  built = from_mapping(EVERYTHING)
  assert built.fragments == Fragments(4, 5, "sequential")
  assert built.tokens_per_replica_step == 6 * built.data.sequence_length


def test_the_model_is_the_preset_with_what_is_set():
  assert RunConfig().model.shape == tiny
  assert from_mapping(EVERYTHING).model.shape == dataclasses.replace(
    nano, num_layers=5, qk_norm=True
  )


def test_fields_that_are_free_on_resume_exist():
  for path in FREE_ON_RESUME:
    check_path(RunConfig, path)


def test_a_resumed_run_may_be_evaluated_otherwise_but_not_trained_otherwise():
  old = RunConfig().to_mapping()
  values = {
    "seed": 1,
    "evaluation": {"interval_steps": 7},
    "checkpoint": {"keep": 9, "init_from": "elsewhere"},
  }
  new = from_mapping(values).to_mapping()
  assert changed_fields(old, new, FREE_ON_RESUME) == [
    "checkpoint.init_from: '' -> 'elsewhere'",
    "seed: 0 -> 1",
  ]


def test_a_misspelt_field_is_answered_with_the_nearest():
  assert refusal({"sync": {"sync_intervall": 3}}) == (
    "unknown config field 'sync.sync_intervall': did you mean 'sync_interval'?"
  )


@pytest.mark.parametrize(
  ("values", "parts"),
  [
    (
      {
        "total_steps": 60,
        "sync": {"warm_start": "single", "warm_start_steps": 60},
      },
      ["total_steps=60", "sync.warm_start_steps=60"],
    ),
    (
      {"total_steps": 30, "inner": {"warmup_steps": 30}},
      ["inner.warmup_steps=30", "total_steps=30"],
    ),
    ({"inner": {"warmup_steps": -1}}, ["inner.warmup_steps=-1"]),
    (
      {"data": {"batch_size": 8}, "inner": {"accumulate_steps": 3}},
      ["data.batch_size=8", "inner.accumulate_steps=3"],
    ),
    (
      {"sync": {"method": "streaming_diloco", "num_fragments": 6}},
      ["num_fragments=6", "num_layers=4", "sync.num_fragments"],
    ),
    (
      {"model": {"model_dim": 30}},
      ["model_dim=30", "num_heads=4"],
    ),
    ({"model": {"num_layers": 0}}, ["model", "num_layers=0"]),
    (
      {"model": {"activation": "relu"}},
      ["model", "activation='relu'", "swiglu", "gelu"],
    ),
  ],
)
def test_values_that_clash_are_named_in_one_line(values, parts):
  message = refusal(values)
  for part in parts:
    assert part in message


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
  message = refusal({"sync": values})
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
    ("outer", "learning_rate", -0.7),
    ("mesh", "num_replicas", 0),
    ("mesh", "layout", "grid"),
    ("mesh", "stacked_by", "turn"),
    ("evaluation", "num_sequences", 0),
    ("evaluation", "interval_steps", -1),
    ("checkpoint", "interval_steps", 0),
    ("checkpoint", "keep", 0),
  ],
)
def test_a_field_out_of_range_is_named_with_its_value(section, name, value):
  assert f"{section}.{name}={value!r}" in refusal({section: {name: value}})


def test_every_section_is_a_value_that_cannot_be_changed():
  for field in dataclasses.fields(RunConfig):
    section = getattr(RunConfig(), field.name)
    if not dataclasses.is_dataclass(section):
      continue
    assert type(section).__module__ == config.__name__
    first = dataclasses.fields(section)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
      setattr(section, first, None)
