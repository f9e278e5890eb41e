import pytest

from dilocox_jax.checks import flat
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.config.unread import unread_fields

LOSSY = {"exchange": {"codec": "int"}}
FEEDBACK = {"exchange": {"codec": "int", "feedback": 1.0}}
ADAPTS = {
  "exchange": {"codec": "low_rank(rank=8)+int"},
  "adaptive": {"mode": "rank"},
}
STAGES = {"mesh": {"layout": "mesh", "num_stages": 2}}
LEARNED = {"positions": "learned", "num_positions": 128}
GRADIENTS = {"sync": {"method": "allreduce"}}

# A field, a run that ignores it, what the refusal says, and one that reads it.
CASES = [
  ("data.glob", "*.txt", {}, "stdlib reads no files: set data.source=text_fil"),
  ("data.mix", "own", {}, "stdlib reads no files"),
  ("data.text_field", "body", {}, "stdlib reads no JSON"),
  ("data.split", "test", {}, "only data.source=huggingface reads it"),
  ("data.max_documents", 9, {}, "only data.source=huggingface reads it"),
  ("data.shuffle_buffer", 9, {}, "only data.source=huggingface reads it"),
  (
    "data.shuffle_buffer",
    9,
    {"data": {"source": "huggingface"}},
    "all documents are read: set data.max_documents",
  ),
  ("data.damaged", "skip", {}, "stdlib reads no files that may be damaged"),
  (
    "data.tokenizer",
    "bpe",
    {"data": {"source": "shards"}},
    "shards has tokens already",
  ),
  (
    "data.validation_fraction",
    0.1,
    {"data": {"source": "shards"}},
    "shards is divided already",
  ),
  ("data.end_of_text", "</s>", {}, "bytes and bpe have their own"),
  ("data.vocab_size", 500, {}, "only data.tokenizer=bpe is trained"),
  ("model.rope_base", 1e6, {"model": LEARNED}, "learned rotates nothing"),
  ("model.balance_loss", 0.1, {}, "one MLP a layer"),
  ("model.remat", "full", STAGES, "set mesh.remat"),
  ("inner.momentum", 0.9, {}, "adamw has no momentum"),
  ("inner.b1", 0.8, {"inner": {"optimizer": "sgd"}}, "sgd has no b1"),
  ("inner.b2", 0.8, {"inner": {"optimizer": "sgd"}}, "sgd has no b2"),
  (
    "inner.weight_decay",
    0.0,
    {"inner": {"optimizer": "adam"}},
    "adam has no weight_decay",
  ),
  ("inner.final_fraction", 0.5, {"inner": {"schedule": "constant"}}, "cosine"),
  ("outer.momentum", 0.9, {"outer": {"optimizer": "adam"}}, "no momentum"),
  ("outer.nesterov", False, {"outer": {"optimizer": "lion"}}, "no nesterov"),
  ("outer.learning_rate", 1.0, GRADIENTS, "allreduce averages gradients"),
  ("outer.optimizer", "adam", GRADIENTS, "allreduce averages gradients"),
  ("exchange.feedback", 0.9, {}, "float32 loses nothing"),
  ("exchange.keep_unsent", True, {}, "float32 loses nothing"),
  ("exchange.against", "mean", LOSSY, "set exchange.feedback=1"),
  ("exchange.residual_dtype", "int8", LOSSY, "set exchange.feedback=1"),
  ("adaptive.energy", 0.9, LOSSY, "int has no rank"),
  ("adaptive.window_rounds", 3, LOSSY, "adaptive.mode=off"),
  ("mesh.pipeline", "gpipe", {}, "set mesh.num_stages"),
  ("mesh.remat", "full", {}, "set mesh.num_stages"),
  ("mesh.boundary", "int8", {}, "set mesh.num_stages"),
]
READERS = {
  "data.glob": {"data": {"source": "text_files"}},
  "data.text_field": {"data": {"source": "text_files"}},
  "data.mix": {"data": {"source": "shards"}},
  "data.split": {"data": {"source": "huggingface"}},
  "data.max_documents": {"data": {"source": "huggingface"}},
  "data.shuffle_buffer": {
    "data": {"source": "huggingface", "max_documents": 5}
  },
  "data.damaged": {"data": {"source": "text_files"}},
  "data.vocab_size": {"data": {"tokenizer": "bpe"}},
  "data.end_of_text": {"data": {"tokenizer": "t.json"}},
  "model.balance_loss": {"model": {"num_experts": 4}},
  "inner.momentum": {"inner": {"optimizer": "sgd"}},
  "exchange.feedback": LOSSY,
  "exchange.keep_unsent": LOSSY | {"sync": {"method": "diloco"}},
  "exchange.against": FEEDBACK,
  "exchange.residual_dtype": FEEDBACK,
  "adaptive.energy": ADAPTS,
  "adaptive.window_rounds": ADAPTS,
  "mesh.pipeline": STAGES,
  "mesh.remat": STAGES,
  "mesh.boundary": STAGES,
}


def with_field(values, path, value):
  section, _, name = path.partition(".")
  return values | {section: values.get(section, {}) | {name: value}}


@pytest.mark.parametrize(("path", "value", "values", "part"), CASES)
def test_a_field_that_would_be_ignored_is_refused_in_one_line(
  path, value, values, part
):
  from_mapping(values)
  with pytest.raises(ValueError) as caught:
    from_mapping(with_field(values, path, value))
  message = str(caught.value)
  assert message.startswith(f"{path}={value!r} would be ignored")
  assert part in message and "\n" not in message


@pytest.mark.parametrize(("path", "value", "values", "part"), CASES)
def test_the_same_field_is_taken_where_something_reads_it(
  path, value, values, part
):
  reader = READERS.get(path, {})
  built = from_mapping(with_field(reader, path, value))
  section, _, name = path.partition(".")
  assert getattr(getattr(built, section), name) == value


def test_an_optimizer_that_is_not_in_the_table_may_have_any_option():
  built = from_mapping({"inner": {"optimizer": "lars", "momentum": 0.8}})
  assert built.inner.momentum == 0.8


def test_only_fields_with_a_default_are_looked_at():
  values = flat(RunConfig().to_mapping()) | {"data.glob": "*.txt"}
  assert list(unread_fields(values, {"data.glob": ""})) == ["data.glob"]
  assert not unread_fields(values, {"data.glob": "*.txt"})
  assert not unread_fields(values, {})
