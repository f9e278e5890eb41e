import pytest

from dilocox_jax.checks import flat
from dilocox_jax.config import from_mapping
from dilocox_jax.config.recipes import DEFAULTS, RECIPES, register_recipe
from dilocox_jax.plan.schedule.methods import METHODS


def fields(values):
  """All fields of the run that a nested mapping describes."""
  return flat(from_mapping(values).to_mapping())


DEFAULT = fields({})


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_name_alone_brings_its_recipe(name):
  expected = DEFAULT | RECIPES.get(name, {}) | {"sync.method": name}
  assert fields({"sync": {"method": name}}) == expected
  assert DEFAULT.items() >= DEFAULTS.items()


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
