import pytest

from dilocox_jax.config import from_mapping

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
SGD = {"inner": {"optimizer": "sgd"}}
# A field, a run that ignores it, what the refusal says, and one that reads it.
CASES = [
  ("data.glob", "*.txt", {}, "reads no files: set data.source=text_f", FILES),
  ("data.mix", "own", {}, "stdlib reads no files", SHARDS),
  ("data.text_field", "body", {}, "stdlib reads no JSON", FILES),
  ("data.tokenizer", "bpe", SHARDS, "shards has tokens already", {}),
  ("data.validation_fraction", 0.1, SHARDS, "is divided already", {}),
  ("data.judge_fraction", 0.1, SHARDS, "no documents to divide", {}),
  (
    *("data.end_of_text", "</s>", {}, "bytes and bpe have their own"),
    {"data": {"tokenizer": "t.json"}},
  ),
  (
    *("data.vocab_size", 500, {}, "only data.tokenizer=bpe is trained"),
    {"data": {"tokenizer": "bpe"}},
  ),
  ("model.rope_base", 1e6, {"model": LEARNED}, "learned rotates nothing", {}),
  ("model.remat", "full", STAGES, "set mesh.remat", {}),
  ("inner.momentum", 0.9, {}, "adamw has no momentum", SGD),
  ("inner.b1", 0.8, SGD, "sgd has no b1", {}),
  ("inner.b2", 0.8, SGD, "sgd has no b2", {"inner": {"optimizer": "lars"}}),
  (
    *("inner.weight_decay", 0.0, {"inner": {"optimizer": "adam"}}),
    *("adam has no weight_decay", {}),
  ),
  (
    *("inner.final_fraction", 0.5, {"inner": {"schedule": "constant"}}),
    *("never decays", {"inner": {"schedule": "wsd"}}),
  ),
  ("outer.momentum", 0.9, {"outer": {"optimizer": "adam"}}, "momentum", {}),
  ("outer.nesterov", False, {"outer": {"optimizer": "lion"}}, "nesterov", {}),
  ("outer.learning_rate", 1.0, GRADIENTS, "averages gradients", {}),
  ("outer.optimizer", "adam", GRADIENTS, "averages gradients", {}),
  ("exchange.feedback", 0.9, {}, "float32 loses nothing", LOSSY),
  ("exchange.keep_unsent", True, {}, "float32 loses nothing", LOSSY),
  ("exchange.against", "mean", LOSSY, "set exchange.feedback=1", FEEDBACK),
  ("adaptive.energy", 0.9, LOSSY, "int has no rank", ADAPTS),
  ("adaptive.window_rounds", 3, LOSSY, "adaptive.mode=off", ADAPTS),
  ("mesh.pipeline", "gpipe", {}, "set mesh.num_stages", STAGES),
  ("mesh.remat", "full", {}, "set mesh.num_stages", STAGES),
  ("mesh.boundary", "int8", {}, "set mesh.num_stages", STAGES),
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
