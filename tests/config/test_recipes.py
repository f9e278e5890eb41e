import importlib
import json

import pytest

from dilocox_jax.checks import check_path, flat
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.config.recipes import DEFAULTS, RECIPES
from dilocox_jax.plan.schedule.methods import METHODS

# The default run as it was before methods had recipes: old runs depend on it.
DEFAULT = {
  **{"seed": 0, "total_steps": 600},
  **{"data.source": "stdlib", "data.glob": "", "data.text_field": "text"},
  **{"data.split": "train", "data.max_documents": 0},
  **{"data.shuffle_buffer": 0, "data.damaged": "error"},
  **{"data.tokenizer": "bytes", "data.vocab_size": 1024},
  **{"data.end_of_text": ""},
  "data.document_masks": False,
  **{"data.validation_fraction": 0.05, "data.judge_fraction": 0.0},
  "data.mix": "",
  **{"data.num_workers": 0, "data.batch_size": 8},
  **{"data.sequence_length": 128, "model.preset": "tiny"},
  **{"model.num_layers": None, "model.model_dim": None},
  **{"model.num_heads": None, "model.ff_dim": None},
  **{"model.activation": None, "model.qk_norm": None},
  **{"model.num_kv_heads": None, "model.vocab_size": None},
  **{"model.tied_head": None, "model.head_dim": None},
  **{"model.positions": None, "model.num_positions": None},
  **{"model.rope_base": None, "model.norm": None},
  **{"model.norm_epsilon": None, "model.biases": None},
  **{"model.num_experts": None, "model.experts_per_token": None},
  "model.balance_loss": None,
  **{"model.compute_dtype": "auto", "model.scan_unroll": None},
  **{"model.attention": "auto", "model.remat": "auto"},
  "model.loss_chunk_tokens": None,
  **{"model.z_loss": 0.0, "inner.optimizer": "adamw"},
  **{"inner.learning_rate": 0.002, "inner.schedule": "cosine"},
  **{"inner.warmup_steps": 50, "inner.final_fraction": 0.05},
  **{"inner.clip_norm": 1.0, "inner.accumulate_steps": 1},
  **{"inner.b1": 0.9, "inner.b2": 0.95, "inner.weight_decay": 0.1},
  **{"inner.momentum": 0.0, "sync.method": "diloco"},
  **{"sync.sync_interval": None, "sync.num_fragments": None},
  **{"sync.overlap_steps": None, "sync.rule": None},
  **{"sync.mixing_alpha": None, "sync.fragment_order": None},
  **{"sync.warm_start": "none", "sync.warm_start_steps": 0},
  **{"sync.steps_per_dispatch": 50, "exchange.codec": "float32"},
  **{"exchange.collective": "auto", "exchange.feedback": 0.0},
  **{"exchange.keep_unsent": False, "exchange.against": "own"},
  **{"exchange.residual_dtype": "float32", "exchange.kind": "mean"},
  **{"adaptive.mode": "off"},
  **{"adaptive.window_rounds": 5, "adaptive.energy": 0.95},
  **{"outer.optimizer": "sgd", "outer.learning_rate": 0.7},
  **{"outer.momentum": 0.6, "outer.nesterov": True},
  "outer.average_power": 0.0,
  **{"mesh.num_replicas": 2, "mesh.layout": "stacked"},
  **{"mesh.stacked_by": "auto", "mesh.num_data_shards": 1},
  **{"mesh.num_stages": 1, "mesh.pipeline": "1f1b"},
  **{"mesh.chunks_per_stage": 1, "mesh.remat": "dots"},
  **{"mesh.boundary": "none", "mesh.outer_memory": "device"},
  "mesh.exchange_dispatch": "auto",
  **{"membership.absences": "", "membership.absence_rate": 0.0},
  **{"membership.inner_steps": ""},
  **{"evaluation.interval_steps": 150, "evaluation.num_sequences": 128},
  "evaluation.sets": "",
  **{"checkpoint.interval_steps": 150, "checkpoint.keep": 2},
  "checkpoint.init_from": "",
}
COCKTAIL = (
  "random_mask(fraction=0.1)+top_k(fraction=0.2,indices=bitmap)+int(bits=4)"
)
# What each method's config file stood for then, beyond the default run.
CONFIGS = {
  "default": {},
  "allreduce": {"sync.method": "allreduce"},
  "diloco": {"sync.sync_interval": 30},
  "eager": {"sync.method": "eager", "sync.sync_interval": 30},
  "delayed": {
    "sync.method": "delayed",
    "sync.sync_interval": 30,
    "sync.overlap_steps": 4,
    "sync.rule": "continue",
  },
  "cocktail_sgd": {
    "sync.method": "cocktail_sgd",
    "exchange.codec": COCKTAIL,
    "exchange.feedback": 1.0,
  },
  "cocktail_params": {
    "sync.method": "delayed",
    "sync.sync_interval": 1,
    "sync.overlap_steps": 1,
    "sync.rule": "continue",
    "exchange.codec": COCKTAIL,
    "exchange.keep_unsent": True,
    "outer.learning_rate": 1.0,
    "outer.momentum": 0.0,
  },
  "open_diloco": {
    "sync.method": "open_diloco",
    "sync.sync_interval": 30,
    "exchange.codec": "float16",
    "outer.momentum": 0.9,
  },
  "sparse_loco": {
    "sync.method": "sparse_loco",
    "sync.sync_interval": 30,
    "exchange.codec": "top_k(fraction=0.015625,block_size=4096)"
    "+int(bits=2,scale=tensor)",
    "exchange.feedback": 0.95,
    "outer.learning_rate": 1.0,
    "outer.momentum": 0.0,
  },
  "muloco": {
    "inner.optimizer": "muon",
    "sync.method": "muloco",
    "sync.sync_interval": 30,
    "exchange.codec": "int(bits=2)",
    "exchange.feedback": 0.95,
  },
  "streaming_diloco": {
    "sync.method": "streaming_diloco",
    "sync.sync_interval": 30,
    "sync.num_fragments": 3,
    "sync.overlap_steps": 4,
    "sync.mixing_alpha": 0.5,
    "exchange.codec": "e3m0",
  },
  "dilocox": {
    "sync.method": "dilocox",
    "sync.sync_interval": 30,
    "sync.rule": "continue",
    "exchange.codec": "low_rank(rank=16)+int(bits=4)",
    "exchange.feedback": 1.0,
    "adaptive.mode": "rank_and_interval",
  },
}
# Methods that came after the recipes.
LATER = {
  "overlap_loco": {
    "inner.optimizer": "muon",
    "exchange.codec": "int(bits=1)",
    "exchange.feedback": 1.0,
    "outer.learning_rate": 1.0,
    "outer.momentum": 0.0,
  },
}
# A field that experiments set for themselves: the papers have other values.
OWN = ("sync_interval", "num_fragments", "overlap_steps", "mixing_alpha")


def fields(values):
  """All fields of the run that a nested mapping describes."""
  return flat(from_mapping(values).to_mapping())


def section(path, value):
  name, _, field = path.partition(".")
  return {name: {field: value}}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_file_means_what_it_meant_before_there_were_recipes(name):
  module = importlib.import_module(f"experiments.configs.{name}")
  config = from_mapping(module.get_config().to_dict())
  expected = DEFAULT | CONFIGS[name]
  # As text, since 1 and 1.0 and True are other bytes in a config.json.
  assert json.dumps(flat(config.to_mapping())) == json.dumps(expected)
  assert from_mapping(json.loads(json.dumps(config.to_mapping()))) == config


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_name_alone_brings_its_recipe(name):
  config = fields({"sync": {"method": name}})
  whole = {
    path: value
    for path, value in (CONFIGS | LATER)[name].items()
    if path.rpartition(".")[2] not in (*OWN, "rule")
  }
  assert config == DEFAULT | whole | {"sync.method": name}


def test_recipes_are_of_known_methods_and_fields():
  assert RECIPES.keys() <= METHODS.keys()
  for path in {path for recipe in RECIPES.values() for path in recipe}:
    check_path(RunConfig, path)
    assert path in DEFAULTS


@pytest.mark.parametrize(("path", "value"), DEFAULTS.items())
@pytest.mark.parametrize("name", RECIPES)
def test_an_explicit_value_wins_also_where_others_have_it_by_default(
  name, path, value
):
  set_by_hand = {"sync": {"method": name}} | section(path, value)
  if name == "cocktail_sgd" and path.startswith("outer."):
    pytest.skip("it has no outer optimizer")
  assert fields(set_by_hand)[path] == value


def test_a_codec_that_is_named_keeps_the_methods_feedback():
  named = fields({"sync": {"method": "muloco"}, "exchange": {"codec": "int"}})
  assert named["exchange.codec"] == "int"
  assert named["exchange.feedback"] == 0.95


def test_what_nothing_would_read_is_left_out_of_a_recipe():
  dilocox = {"sync": {"method": "dilocox"}}
  plain = fields(dilocox | {"exchange": {"codec": "float32"}})
  assert plain == DEFAULT | {"sync.method": "dilocox"}
  coded = fields(dilocox | {"exchange": {"codec": "int"}})
  assert coded["adaptive.mode"] == "off" and coded["exchange.feedback"] == 1.0
  adam = fields(
    {"sync": {"method": "sparse_loco"}, "outer": {"optimizer": "adam"}}
  )
  assert adam["outer.momentum"] == 0.6 and adam["outer.learning_rate"] == 1.0


@pytest.mark.parametrize(
  ("total_steps", "warmup_steps"),
  [(1, 0), (40, 10), (199, 49), (200, 50), (600, 50), (9000, 50)],
)
def test_the_warm_up_follows_the_run(total_steps, warmup_steps):
  config = fields({"total_steps": total_steps})
  assert config["inner.warmup_steps"] == warmup_steps
