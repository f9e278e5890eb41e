import pytest

from dilocox_jax.checks import flat
from dilocox_jax.config import from_mapping
from dilocox_jax.config.recipes import DEFAULTS, RECIPES
from dilocox_jax.plan.schedule.methods import METHODS
from experiments.configs import methods, overlap_loco


def fields(values):
  """All fields of the run that a nested mapping describes."""
  return flat(from_mapping(values).to_mapping())


DEFAULT = fields({})


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_name_alone_brings_its_recipe(name):
  expected = DEFAULT | RECIPES.get(name, {}) | {"sync.method": name}  # pyright: ignore
  assert fields({"sync": {"method": name}}) == expected
  assert DEFAULT.items() >= DEFAULTS.items()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_a_config_that_runs_it(name):
  own = name == "overlap_loco"  # It has a file of its own.
  config = overlap_loco.get_config() if own else methods.get_config(name)
  assert from_mapping(config.to_dict()).sync.method == name


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


@pytest.mark.parametrize(
  ("total_steps", "warmup_steps"),
  [(1, 0), (40, 10), (199, 49), (200, 50), (9000, 50)],
)
def test_the_warm_up_follows_the_run(total_steps, warmup_steps):
  config = fields({"total_steps": total_steps})
  assert config["inner.warmup_steps"] == warmup_steps


@pytest.mark.parametrize(
  ("total_steps", "evaluation", "checkpoint", "segment"),
  [
    (1, 1, 1, 1),
    (12, 2, 3, 2),
    (128, 13, 32, 13),
    (599, 60, 150, 50),
    (2000, 150, 150, 50),
  ],
)
def test_a_short_run_is_evaluated_and_saved_a_few_times(
  total_steps, evaluation, checkpoint, segment
):
  config = fields({"total_steps": total_steps})
  assert config["evaluation.interval_steps"] == evaluation
  assert config["checkpoint.interval_steps"] == checkpoint
  assert config["sync.steps_per_dispatch"] == segment


def test_an_interval_that_is_set_stays():
  values = {"total_steps": 20, "evaluation.interval_steps": 0}
  assert fields(values)["evaluation.interval_steps"] == 0


# Fields that a run would ignore.

LOSSY = {"exchange": {"codec": "int"}}
FEEDBACK = {"exchange": {"codec": "int", "feedback": 1.0}}
ADAPTS = {
  "exchange": {"codec": "low_rank(rank=8)+int"},
  "adaptive": {"mode": "rank"},
}
STAGES = {"mesh": {"layout": "mesh", "num_stages": 2}}
LEARNED = {"positions": "learned", "num_positions": 128}
GRADIENTS = {"sync": {"method": "allreduce"}}

SHARDS = {"data": {"source": "shards"}}
FILES = {"data": {"source": "text_files"}}
TOKENIZER = {"data": {"tokenizer": "t.json"}}
BPE = {"data": {"tokenizer": "bpe"}}
ADAM = {"inner": {"optimizer": "adam"}}
CONSTANT = {"inner": {"schedule": "constant"}}
WSD = {"inner": {"schedule": "wsd"}}
SGD = {"inner": {"optimizer": "sgd"}}
# A field, a run that ignores it, the field to blame, and a run that reads it.
CASES = [
  ("data.glob", "*.txt", {}, "data.source", FILES),
  ("data.mix", "own", {}, "data.source", SHARDS),
  ("data.text_field", "body", {}, "data.source", FILES),
  ("data.tokenizer", "bpe", SHARDS, "data.source", {}),
  ("data.validation_fraction", 0.1, SHARDS, "data.source", {}),
  ("data.judge_fraction", 0.1, SHARDS, "data.source", {}),
  ("data.end_of_text", "</s>", {}, "data.tokenizer", TOKENIZER),
  ("data.vocab_size", 500, {}, "data.tokenizer", BPE),
  ("model.rope_base", 1e6, {"model": LEARNED}, "model.positions", {}),
  ("model.rope_factor", 8.0, {"model": LEARNED}, "model.positions", {}),
  ("model.remat", "full", STAGES, "mesh.num_stages", {}),
  ("inner.momentum", 0.9, {}, "inner.optimizer", SGD),
  ("inner.b1", 0.8, SGD, "inner.optimizer", {}),
  ("inner.b2", 0.8, SGD, "inner.optimizer", {"inner": {"optimizer": "lars"}}),
  ("inner.weight_decay", 0.0, ADAM, "inner.optimizer", {}),
  ("inner.final_fraction", 0.5, CONSTANT, "inner.schedule", WSD),
  ("outer.momentum", 0.9, {"outer": {"optimizer": "adam"}}, "optimizer", {}),
  ("outer.nesterov", False, {"outer": {"optimizer": "lion"}}, "optimizer", {}),
  ("outer.learning_rate", 1.0, GRADIENTS, "sync.method", {}),
  ("outer.optimizer", "adam", GRADIENTS, "sync.method", {}),
  ("exchange.feedback", 0.9, {}, "exchange.codec", LOSSY),
  ("exchange.keep_unsent", True, {}, "exchange.codec", LOSSY),
  ("exchange.against", "mean", LOSSY, "exchange.feedback", FEEDBACK),
  ("adaptive.energy", 0.9, LOSSY, "exchange.codec", ADAPTS),
  ("adaptive.window_rounds", 3, LOSSY, "adaptive.mode", ADAPTS),
  ("mesh.pipeline", "gpipe", {}, "mesh.num_stages", STAGES),
  ("mesh.remat", "full", {}, "mesh.num_stages", STAGES),
]


def with_field(values, path, value):
  section, _, name = path.partition(".")
  return values | {section: values.get(section, {}) | {name: value}}


@pytest.mark.parametrize(("path", "value", "values", "part", "reader"), CASES)
def test_a_field_is_taken_where_it_is_read_and_refused_where_it_is_not(
  path, value, values, part, reader
):
  from_mapping(values)
  with pytest.raises(ValueError, match=part) as caught:
    from_mapping(with_field(values, path, value))
  message = str(caught.value)
  assert message.startswith(f"{path}={value!r} would be ignored")
  assert "\n" not in message
  built = from_mapping(with_field(reader, path, value))
  section, _, name = path.partition(".")
  assert getattr(getattr(built, section), name) == value
