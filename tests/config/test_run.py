"""What a config stands for, and what it is refused with."""

import dataclasses
import math
import re
from unittest import mock

import pytest

from dilocox_jax.checks import changed_fields, check_path
from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.config import (
  RunConfig,
  free_on_resume,
  from_mapping,
  platforms,
  sections,
  to_plan,
)
from dilocox_jax.config.platforms import chosen_values, on_platform
from dilocox_jax.config.run import changed_settings, field_facts
from dilocox_jax.data import tokenizers
from dilocox_jax.plan.model.adapters import Lora
from dilocox_jax.plan.model.presets import (
  MODEL_PRESETS,
  nano,
  register_model,
)
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.fragments import Fragments

EVERYTHING = {
  "seed": 3,
  "total_steps": 26,
  "data": {"source": "text_files", "glob": "*.txt", "batch_size": 6},
  "model": {"preset": "nano", "num_layers": 5, "qk_norm": True},
  "inner": {"optimizer": "sgd", "warmup_steps": 9, "accumulate_steps": 3},
  "sync": {
    **{"method": "streaming_diloco", "sync_interval": 8, "num_fragments": 4},
    **{"overlap_steps": 5, "mixing_alpha": 0.25},
    **{"warm_start_steps": 10, "fragment_order": "sequential"},
    "steps_per_dispatch": 6,
  },
  "exchange": {
    **{"codec": "low_rank(rank=3)+int(bits=8)", "feedback": 0.5},
    **{"collective": "reduce_scatter", "against": "mean"},
  },
  "outer": {"learning_rate": 1.0, "nesterov": False},
  "mesh": {"num_replicas": 4, "layout": "mesh"},
  "evaluation": {"interval_steps": 0},
  "checkpoint": {"keep": 5},
}


def section(path, value):
  name, _, field = path.rpartition(".")
  return {name: {field: value}} if name else {field: value}


def refusal(values):
  """The one line that a config is refused with."""
  with pytest.raises(ValueError) as caught:
    from_mapping(values)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def test_a_config_comes_back_from_its_own_mapping_and_cannot_be_changed():
  assert from_mapping({}) == RunConfig()
  built = from_mapping(EVERYTHING)
  assert from_mapping(built.to_mapping()) == built
  for name, values in EVERYTHING.items():
    kept = getattr(built, name)
    if isinstance(values, dict):
      assert values.items() <= dataclasses.asdict(kept).items()
      with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(kept, next(iter(values)), None)
    else:
      assert kept == values


def test_an_empty_section_sets_nothing_and_an_empty_value_is_refused():
  rate = {"inner.learning_rate": 0.5, "inner": {}, "data": {}}
  assert from_mapping(rate) == from_mapping({"inner": {"learning_rate": 0.5}})
  for values in ({"inner": {"learning_rate": {}}}, {"total_steps": {}}):
    with pytest.raises(ValueError, match="={} must be of type"):
      from_mapping(values)
  values = {"inner": 3, "inner.learning_rate": 0.5}
  with pytest.raises(ValueError, match="inner=3 must be a mapping of fields"):
    from_mapping(values)


def test_the_plan_of_a_run_follows_from_its_fields():
  built = from_mapping(EVERYTHING)
  method = methods.streaming_diloco(8, 4, 5, 0.25, "sequential")
  assert built.sync.named == method
  assert built.fragments == Fragments(4, 5, "sequential")
  assert built.tokens_per_replica_step == 6 * built.data.sequence_length
  sizes = dataclasses.replace(nano, num_layers=5, qk_norm=True)
  assert built.model.shape == sizes
  assert built.exchange.named_codec == LowRank(3, then=Int(8))
  plan = to_plan.run_plan(built)
  assert plan.method == method and plan.local_start == 10
  found = [(segment.phase, segment.num_steps) for segment in plan.segments()]
  warm = [("data_parallel", 6), ("data_parallel", 4)]
  assert found == [*warm, ("rounds", 8), ("rounds", 8)]
  divided = {"layout": "mesh", "num_stages": 2, "num_data_shards": 2}
  whole = from_mapping({"mesh": divided})
  assert whole.division.layers_on_stages and whole.mesh.is_divided
  streamed = {"mesh": divided, "sync": {"method": "streaming_diloco"}}
  assert not from_mapping(streamed).division.layers_on_stages


def test_a_resumed_run_may_be_evaluated_otherwise_but_not_trained_otherwise():
  for path in free_on_resume():
    check_path(RunConfig, path)
  values = {
    "seed": 1,
    "evaluation": {"interval_steps": 7, "num_sequences": 9},
    "checkpoint": {"keep": 9, "init_from": "elsewhere"},
  }
  old = RunConfig().to_mapping()
  new = from_mapping(values).to_mapping()
  changed = [
    line[: line.index(":")]
    for line in changed_fields(old, new, free_on_resume())
  ]
  assert changed == ["checkpoint.init_from", "evaluation.num_sequences", "seed"]


# A value at the limit of some fields, and one beyond it.
LIMITS = {
  "seed": (2**32 - 1, 2**32),
  "inner.learning_rate": (1e-9, 0.0),
  "inner.warmup_steps": (0, -1),
  "sync.sync_interval": (1, 0),
  "outer.optimizer": ("adam", "muon"),
}


def test_as_many_tokens_may_be_asked_for_as_a_tokenizer_makes():
  bpe = {"data.tokenizer": "bpe", "model.vocab_size": 2**24}
  from_mapping(bpe | {"data.vocab_size": tokenizers.MOST_TOKENS})
  with pytest.raises(ValueError, match="data.vocab_size=.* at most"):
    from_mapping(bpe | {"data.vocab_size": tokenizers.MOST_TOKENS + 1})


@pytest.mark.parametrize("path", LIMITS)
def test_a_field_is_taken_up_to_its_limit_and_named_beyond(path):
  allowed, wrong = LIMITS[path]
  from_mapping(section(path, allowed))
  assert f"{path}={wrong!r}" in refusal(section(path, wrong))


STAGES = {"mesh.layout": "mesh", "mesh.num_stages": 2}
WARM = {"sync.warm_start_steps": 5}
MAILBOX = {"exchange.collective": "mailbox"}
ABSENT = {"membership.absences": "0:2"}
REFUSED = [
  (STAGES | {"lora.rank": 2}, "lora.rank: .* mesh.num_stages=1"),
  (
    {"total_steps": 60, "sync.warm_start_steps": 60},
    "total_steps=60 must exceed sync.warm_start_steps=60",
  ),
  ({"total_steps": 30, "inner.warmup_steps": 30}, "less than total_steps=30"),
  ({"inner.warmup_steps": -1}, "warmup_steps=-1 must be at least 0"),
  ({"inner.weight_decay": math.inf}, "weight_decay=inf must be .* below inf"),
  ({"model.z_loss": math.inf}, "z_loss=inf must be .* below inf"),
  # A file of JSON could not hold it, so nothing could start from the run.
  ({"inner.clip_norm": math.inf}, "clip_norm=inf must be .* below inf"),
  ({"exchange.codec": "low_rank(rank=129)"}, "rank=129 exceeds .* at most 128"),
  (
    {"model.positions": "learned", "model.num_positions": 100},
    "data.sequence_length=128 .* most model.num_positions=100",
  ),
  (
    {"model.attention": "splash", "data.sequence_length": 100},
    "multiple of 128 tokens, not 100: change data.sequence_length",
  ),
  (  # Each alone would do.
    STAGES | {"mesh.num_data_shards": 4, "inner.accumulate_steps": 4},
    "data.batch_size=8 .*accumulate_steps=4 times mesh.num_data_shards=4",
  ),
  ({"mesh.num_stages": 2}, "set mesh.layout='mesh'"),
  (STAGES | {"mesh.pipeline": "zb_h1"}, "mesh.pipeline='zb_h1' must be one of"),
  (
    {"sync.method": "streaming_diloco", "sync.overlap_steps": 30},
    "sync.overlap_steps=30 .*sync_interval=30",
  ),
  ({"sync.overlap_steps": 3}, "sync.overlap_steps=3 .*'diloco'"),
  (WARM | {"sync.method": "allreduce"}, "already averages every step"),
  (MAILBOX | {"sync.method": "allreduce"}, "sync.method='allreduce': take"),
  (
    {"sync.method": "streaming_diloco", "sync.num_fragments": 9},
    "^model/sync: ",
  ),
  ({"exchange.codec": "int(bits=5)"}, "exchange.codec int: bits=5 must be one"),
  (
    {"exchange.codec": "int", "exchange.feedback": 1.0}
    | {"exchange.keep_unsent": True},
    "both make up",
  ),
  (
    {"sync.method": "streaming_diloco", "exchange.codec": "int"}
    | {"exchange.keep_unsent": True},
    "exchange.keep_unsent=True .*'mix'",
  ),
  (
    {"exchange.codec": "int", "exchange.collective": "all_reduce"},
    "exchange.collective='all_reduce'.*codes",
  ),
  (
    {"exchange.codec": "top_k+int", "exchange.collective": "reduce_scatter"},
    "'reduce_scatter'.*selects",
  ),
  (
    {"exchange.codec": "top_k+int", "adaptive.mode": "rank"},
    "adaptive.mode='rank' needs a rank",
  ),
  (
    {"exchange.codec": "low_rank", "adaptive.mode": "rank"}
    | {"sync.method": "allreduce"},
    "adaptive.mode='rank' follows rounds",
  ),
  (
    {"exchange.codec": "low_rank", "adaptive.mode": "rank_and_interval"}
    | {"sync.method": "streaming_diloco"},
    "take 'rank' instead",
  ),
  (ABSENT | {"sync.method": "allreduce"}, "sync.method='allreduce'"),
  (ABSENT | {"sync.method": "eager"}, "sync.rule='eager': take continue"),
  (ABSENT | {"mesh.outer_memory": "pinned_host"}, "take device"),
  (ABSENT | {"mesh.num_replicas": 1}, "leave no replica in round 2"),
  (ABSENT | {"sync.method": "dilocox"}, "'rank_and_interval': take rank"),
  (ABSENT | {"exchange.max_norm_ratio": 5.0}, "max_norm_ratio: drop it"),
]


@pytest.mark.parametrize(
  ("fields", "said"), REFUSED, ids=[said for _, said in REFUSED]
)
def test_values_that_clash_are_named_in_one_line(fields, said):
  values = {}
  for path, value in fields.items():
    for name, given in section(path, value).items():
      both = isinstance(given, dict)
      values[name] = values.get(name, {}) | given if both else given
  text = refusal(values)
  assert re.search(said, text), text


# What is left to the devices.

OPEN = (
  "model.attention",
  "model.compute_dtype",
  "model.loss_chunk_tokens",
  "model.remat",
  "model.scan_unroll",
  "mesh.stacked_by",
)


def chosen(platform, values):
  return list(vars(on_platform(from_mapping(values), platform)).values())


def test_what_was_chosen_is_named_and_nothing_else_changes():
  config = from_mapping({"model": {"compute_dtype": "float32"}})
  chosen = chosen_values(config, "gpu")
  assert set(chosen) == set(OPEN) - {"model.compute_dtype"}
  own = chosen_values(config, "gpu", has_own_model=True)
  assert own == {"mesh.stacked_by": "vmap"}
  divided = from_mapping({"mesh": {"layout": "mesh", "num_data_shards": 2}})
  assert "model.remat" not in chosen_values(divided, "gpu")


@pytest.mark.parametrize(
  ("platform", "values"),
  [
    ("gpu", {"model": {"compute_dtype": "float32"}}),
    ("gpu", {"data": {"document_masks": True}}),
    ("gpu", {"model": {"head_dim": 20}}),
    ("gpu", {"model": {"head_dim": 136}}),
    ("tpu", {"data": {"sequence_length": 100}}),
  ],
)
def test_a_kernel_that_does_not_fit_gives_way(platform, values):
  assert chosen(platform, values)[0] == "blockwise"


SIZES = {"num_layers": 3, "model_dim": 32, "num_heads": 2, "ff_dim": 48}


@pytest.mark.parametrize("value", [1.5, "x", None])
@pytest.mark.parametrize("field", ["seed", "total_steps"])
def test_a_whole_number_is_asked_of_python_too(field, value):
  with pytest.raises(ValueError, match=f"{field}=.* must be of type int"):
    RunConfig(**{field: value})


@pytest.mark.parametrize(
  ("section_class", "fields", "said"),
  [
    (sections.DataConfig, {"document_masks": "no"}, "must be of type bool"),
    (sections.DataConfig, {"source": 5}, "must be of type str"),
    (sections.DataConfig, {"batch_size": None}, "must be of type int"),
    (sections.ExchangeConfig, {"keep_unsent": "yes"}, "must be of type bool"),
    (sections.ModelConfig, {"preset": None}, "must be of type str"),
    (sections.OuterConfig, {"optimizer": 5}, "must be of type str"),
    (Lora, {"products": None}, "must be of type str"),
  ],
)
def test_a_section_is_asked_for_its_types_in_python_too(
  section_class, fields, said
):
  (field,) = fields
  name = section_class.__name__.removesuffix("Config").lower()
  with pytest.raises(ValueError, match=f"^{name}.{field}=.* {said}"):
    section_class(**fields)


@pytest.mark.parametrize("value", [{"batch_size": 4}, None, Lora()])
def test_a_section_is_asked_of_python_in_its_place(value):
  with pytest.raises(ValueError, match="^data=.* must be of type DataConfig"):
    RunConfig(data=value)


def test_a_preset_of_which_nothing_is_left_is_refused():
  message = (
    "^model.preset='nano' would be ignored, .*model.num_layers=3, .*: ch"
  )
  with pytest.raises(ValueError, match=message):
    from_mapping({"model": {"preset": "nano", **SIZES}})
  # What a preset says beside its sizes still counts.
  kept = from_mapping({"model": {"preset": "opt_1_3b", **SIZES}}).model.shape
  assert (kept.norm, kept.num_layers) == ("layer", 3)
  some = from_mapping({"model": {"preset": "nano", "num_layers": 3}})
  assert some.model.shape.model_dim == 16


def test_a_registered_preset_may_equal_the_default_one():
  with mock.patch.dict(MODEL_PRESETS):
    register_model("mine", dataclasses.replace(MODEL_PRESETS["tiny"]))
    assert from_mapping({"model": {"preset": "mine"}}).model.label == "mine"


@pytest.mark.parametrize(
  ("changes", "label"),
  [
    ({}, "tiny"),
    ({"preset": "nano", "scan_unroll": 1}, "nano"),
    ({"vocab_size": 300}, "tiny with 300 tokens"),
    (SIZES, "of own sizes"),
    ({"preset": "nano", "num_layers": 3}, "of own sizes"),
  ],
)
def test_a_model_has_the_name_of_a_preset_only_if_it_has_its_sizes(
  changes, label
):
  config = from_mapping({"model": changes})
  assert config.model.label == label
  assert f"model {label}, 2 replicas" in repr(config)


def test_settings_behind_a_methods_name_are_its_fields():
  text = "streaming_diloco(num_fragments=2, rule=mix, sync_interval=8)"
  with pytest.raises(ValueError, match="rule=mix is not a setting of method"):
    from_mapping({"sync.method": text})
  text = text.replace(" rule=mix,", "")
  fields = {"num_fragments": 2, "sync_interval": 8}
  config = from_mapping({"sync.method": text})
  assert config == from_mapping(
    {"sync": {"method": "streaming_diloco", **fields}}
  )
  same = from_mapping({"sync.method": text, "sync.sync_interval": 8})
  assert same == config
  message = "^sync.sync_interval=9 is set in sync.method='streaming.* too: drop"
  with pytest.raises(ValueError, match=message):
    from_mapping({"sync.method": text, "sync.sync_interval": 9})
  with pytest.raises(ValueError, match="sync_interval=0 must be at least 1"):
    from_mapping({"sync.method": "diloco(sync_interval=0)"})
  with pytest.raises(
    ValueError, match="sync.sync_interval='x' must be of type"
  ):
    from_mapping({"sync.method": "diloco(sync_interval=x)"})


@pytest.mark.parametrize(
  ("path", "name"),
  [
    ("inner.lr", "learning_rate"),
    ("sync.H", "sync_interval"),
    ("sync.tau", "overlap_steps"),
  ],
)
def test_names_of_papers_and_libraries_lead_to_ours(path, name):
  with pytest.raises(ValueError, match=f"did you mean '{name}'"):
    from_mapping({path: 1})


def test_what_a_field_leaves_to_the_device_has_a_value_on_every_platform():
  left = {
    path for path, facts in field_facts().items() if facts.is_left_to_device
  }
  # `mesh.gather` depends on the memory of the device, not on its kind.
  left.remove("mesh.gather")
  for platform in ("cpu", "gpu", "tpu", "other"):
    assert platforms.chosen_values(RunConfig(), platform).keys() == left


def test_what_differs_from_the_defaults_of_the_method_is_listed():
  built = from_mapping(
    {
      "total_steps": 40,
      "sync": {"method": "dilocox", "sync_interval": 10},
      "inner": {"learning_rate": 0.5},
    }
  )
  # The recipe of the method and what follows from the number of steps are no
  # changes.
  assert changed_settings(built.to_mapping()) == {
    "sync.method": ("dilocox", "diloco"),
    "total_steps": (40, 600),
    "sync.sync_interval": (10, None),
    "inner.learning_rate": (0.5, 2e-3),
  }
  assert not changed_settings(RunConfig().to_mapping())


def test_a_method_that_is_not_registered_is_compared_with_the_plain_defaults():
  values = RunConfig().to_mapping()
  values["sync"]["method"] = "of_somebody"
  assert changed_settings(values) == {"sync.method": ("of_somebody", "diloco")}
  assert not changed_settings({"of_a_newer_version": {"field": 3}})
