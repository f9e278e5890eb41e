import json

import pytest

from dilocox_jax.checks import flat
from dilocox_jax.config import from_mapping
from dilocox_jax.config.recipes import DEFAULTS, RECIPES, register_recipe
from dilocox_jax.plan.schedule.methods import METHODS
from experiments.configs import default

# What the papers state for each method, beside its schedule.
PUBLISHED = {
  "cocktail_sgd": (
    "random_mask(fraction=0.1)+top_k(fraction=0.2,indices=bitmap)+int(bits=4)",
    {"exchange.feedback": 1.0},
  ),
  "open_diloco": (
    "float16",
    {"outer.learning_rate": 0.7, "outer.momentum": 0.9},
  ),
  "sparse_loco": (
    "top_k(fraction=0.015625,block_size=4096)+int(bits=2,scale=tensor)",
    {"exchange.feedback": 0.95}
    | {"outer.learning_rate": 1.0, "outer.momentum": 0.0},
  ),
  "muloco": (
    "int(bits=2)",
    {"exchange.feedback": 0.95, "inner.optimizer": "muon"},
  ),
  "streaming_diloco": ("e3m0", {}),
  "dilocox": (
    "low_rank(rank=16)+int(bits=4)",
    {"exchange.feedback": 1.0, "adaptive.mode": "rank_and_interval"},
  ),
  "overlap_loco": (
    "int(bits=1)",
    {"exchange.feedback": 1.0, "inner.optimizer": "muon"}
    | {"outer.learning_rate": 1.0, "outer.momentum": 0.0},
  ),
}


def fields(values):
  """All fields of the run that a nested mapping describes."""
  return flat(from_mapping(values).to_mapping())


DEFAULT = fields({})


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_name_alone_brings_its_recipe(name):
  codec, others = PUBLISHED.get(name, ("float32", {}))
  expected = DEFAULT | {"exchange.codec": codec} | others
  assert fields({"sync": {"method": name}}) == expected | {"sync.method": name}
  assert DEFAULT.items() >= DEFAULTS.items()


@pytest.mark.parametrize("name", ["muloco", "dilocox", "cocktail_sgd"])
def test_a_methods_name_in_a_config_is_its_recipe_and_outlives_json(name):
  values = default.get_config()
  values.update_from_flattened_dict({"sync.method": name})
  config = from_mapping(values.to_dict())
  assert from_mapping(json.loads(json.dumps(config.to_mapping()))) == config
  assert flat(config.to_mapping()) == fields({"sync": {"method": name}})


@pytest.mark.parametrize("name", RECIPES)
def test_an_explicit_value_wins_also_where_others_have_it_by_default(name):
  for path, value in DEFAULTS.items():
    section, _, field = path.partition(".")
    if name == "cocktail_sgd" and section == "outer":
      continue  # It has no outer optimizer.
    given = {"sync": {"method": name}, section: {field: value}}
    assert fields(given)[path] == value


def test_what_nothing_would_read_is_left_out_of_a_recipe():
  dilocox = {"sync": {"method": "dilocox"}}
  plain = fields(dilocox | {"exchange": {"codec": "float32"}})
  assert plain == DEFAULT | {"sync.method": "dilocox"}
  coded = fields(dilocox | {"exchange": {"codec": "int"}})
  assert coded["adaptive.mode"] == "off" and coded["exchange.feedback"] == 1.0
  adam = {"sync": {"method": "sparse_loco"}, "outer": {"optimizer": "adam"}}
  found = fields(adam)
  assert found["outer.momentum"] == DEFAULT["outer.momentum"]
  assert found["outer.learning_rate"] == 1.0


def test_recipes_are_of_known_methods_and_fields():
  for method, path in (("none", "outer.momentum"), ("eager", "data.glob")):
    with pytest.raises(ValueError, match="none" if method == "none" else path):
      register_recipe(method, {path: 1})


@pytest.mark.parametrize(
  ("total_steps", "warmup_steps"),
  [(1, 0), (40, 10), (199, 49), (200, 50), (9000, 50)],
)
def test_the_warm_up_follows_the_run(total_steps, warmup_steps):
  config = fields({"total_steps": total_steps})
  assert config["inner.warmup_steps"] == warmup_steps
