import json
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dilocox_jax.data.corpus import Corpus
from dilocox_jax.data.feeds import as_feed
from dilocox_jax.models.custom import as_loss_model
from dilocox_jax.token_ids import TokenError
from dilocox_jax.training import build, run_text
from dilocox_jax.training.overrides import Overrides
from tests import runs


def _texts(tmp_path, **data):
  lines = (json.dumps({"text": f"some words {n}"}) for n in range(300))
  (tmp_path / "a.jsonl").write_text("\n".join(lines))
  given = {"source": "text_files", "glob": f"{tmp_path}/*.jsonl", **data}
  return runs.settings(
    model={"vocab_size": 300, "z_loss": 0.0},
    data={"document_masks": True, **given},
  )


def test_document_masks_reach_training_and_evaluation(tmp_path):
  config = _texts(tmp_path, tokenizer="bpe", vocab_size=300)
  text = run_text.corpus(config)
  end = run_text._end_of_text(config, text)
  assert text.tokenizer and end == text.tokenizer.end_of_text
  made, plain = (build.programs(config, end_of_text=e) for e in (end, None))
  params = jax.jit(made.model.init)(jax.random.key(0))
  params = jax.tree.map(lambda x: 3 * x, params)
  batch = jnp.asarray(run_text.streams(config, text).take(1)[0, 0])
  masked, _ = jax.jit(made.steps.gradient)(params, batch)
  loss, joined = (jax.jit(p.model.loss)(params, batch) for p in (made, plain))
  np.testing.assert_allclose(loss, masked, rtol=1e-6)
  assert abs(joined - masked) > 1e-4
  assert run_text._end_of_text(runs.settings(), text) is None


def test_where_no_token_ends_a_document_masks_are_refused(tmp_path):
  for config in (
    _texts(tmp_path),
    runs.settings(data={"document_masks": True}),
  ):
    with pytest.raises(ValueError, match="needs a token that ends") as error:
      runs.train(config, tmp_path / "run")
    assert "\n" not in str(error.value)
  config = _texts(tmp_path, tokenizer="bpe", vocab_size=300)
  overrides = Overrides(model=runs.programs(runs.settings()).model)
  with pytest.raises(ValueError, match="a model that is passed in"):
    run_text._end_of_text(config, run_text.corpus(config), overrides)


@pytest.mark.parametrize(
  ("tokens", "vocab_size", "message"),
  [
    (np.arange(5000) % 300, 300, "has 300 different tokens, but the model"),
    (np.arange(5000) % 97 - 5, 97, "go from -5 to 91, but vocab_size=97"),
    (np.arange(5000) % 97, 50, "to 96, but vocab_size=50 allows 0 to 49"),
    (np.arange(5000) % 97 + 0.5, 98, "are float64: pass integers"),
  ],
)
def test_tokens_that_are_passed_in_must_fit(tokens, vocab_size, message):
  whole = np.zeros(5000, np.int64)
  text = Corpus("own", whole, whole[:500], "0" * 16, vocab_size, 0)
  # Tests check types when a corpus is made; a user's program does not.
  object.__setattr__(text, "train", tokens)
  with pytest.raises(ValueError, match=message):
    run_text.corpus(runs.settings(), Overrides(data=text))


def test_a_run_is_judged_on_text_that_it_does_not_train_on():
  validation = np.arange(128, 256, dtype=np.uint8).repeat(5)
  train = np.arange(128, dtype=np.uint8).repeat(50)
  text = Corpus("halves", train, validation, "digest", 256, 2)
  config = runs.settings(evaluation={"num_sequences": 8})
  (batches,) = run_text.held_out(config, text.validation)
  assert batches.min() >= 128
  # Two replicas of two sequences a step: 94 steps read all 376 windows.
  seen = np.unique(run_text.streams(config, text).take(94))
  np.testing.assert_array_equal(seen, np.arange(128))


def test_a_mapped_text_is_checked_batch_by_batch(tmp_path):
  path = tmp_path / "tokens.bin"
  tokens = (np.arange(5000) % 97).astype(np.uint8)
  tokens[4000:] = 98
  tokens.tofile(path)
  mapped = np.memmap(path, np.uint8, "r")
  text = Corpus("mapped", mapped, mapped[:500], "0" * 16, 97, 0)
  data = run_text.run_data(runs.settings(), Overrides(data=text))
  with pytest.raises(TokenError, match="batch go from 0 to 98, but vocab_size"):
    data.streams.take(74)  # An epoch.


def test_held_out_tokens_of_a_mapped_text_are_checked_when_they_are_read(
  tmp_path,
):
  path = tmp_path / "tokens.bin"
  tokens = (np.arange(5000) % 97).astype(np.uint8)
  tokens[4900:] = 98
  tokens.tofile(path)
  mapped = np.memmap(path, np.uint8, "r")
  text = Corpus("mapped", mapped, mapped[-1000:], "0" * 16, 97, 0)
  config = runs.settings(evaluation={"num_sequences": 0})  # All of it.
  data = run_text.run_data(config, Overrides(data=text))
  with pytest.raises(TokenError, match="a validation batch go from .* to 98"):
    list(data.validation)


# Rows of token ids that a model of 16 tokens can read.
FINE = np.arange(40, dtype=np.int32).reshape(8, 5) % 16
# What no model of 16 tokens can read, and the message about it.
BAD: dict[str, tuple[Any, str]] = {
  "negative": (FINE - 1, r"go from -1 to \d+, but .* allows 0 to 15"),
  "beyond": (FINE + 10, r"go from 1\d to \d+, but .* allows 0 to 15"),
  "huge": (FINE.astype(np.int64) + 2**32, "int32, which ends at 2147483647"),
  "floats": (FINE.astype(np.float32), r"is float32\[.*, 5\]: without loss="),
  "booleans": (FINE > 3, r"is bool\[.*, 5\]: without loss="),
  "pictures": (FINE[..., None], r"is int32\[.*, 5, 1\]: without loss="),
  "one token": (FINE[:, :1], "has rows of one token"),
  "a dict": ({"tokens": FINE}, "has tokens and no input_ids"),
}


class Loader:
  """Gives a batch again and again."""

  def __init__(self, batch):
    self.batch = batch

  def __iter__(self):
    return iter([self.batch] * 9)


def _rows_of(tree, ids):
  return jax.tree.map(lambda leaf: leaf[ids], tree)


# Functions from rows to each kind of data that gives them.
DOORS = {
  "rows": lambda tree: tree,
  "function": lambda tree: lambda replica, step: _rows_of(tree, slice(2)),
  "iterator": lambda tree: iter([_rows_of(tree, slice(2))] * 9),
  "loader": lambda tree: Loader(_rows_of(tree, slice(2))),
  "grain": lambda tree: (
    grain.MapDataset.range(8).map(lambda i: _rows_of(tree, i)).batch(2)
  ),
}


class Words(nnx.Module):
  """A module that knows 16 tokens."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(16, 4, rngs=rngs)

  def __call__(self, tokens):
    return self.embed.attend(self.embed(tokens))


def _data_of(train, held_out, model=None, **sections):
  """The data of a run whose model, a module or the config's, has 16 tokens."""
  config = runs.settings(
    num_replicas=1,
    model={"vocab_size": 16},
    evaluation={"num_sequences": 2},
    **sections,
  )
  loss_model = None if model is None else as_loss_model(model)
  feed = as_feed((train, held_out), reads_tokens=True, batch_size=2)
  return run_text.run_data(config, Overrides(model=loss_model, data=feed))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("model", [None, Words], ids=["config", "module"])
def test_every_door_refuses_tokens_that_no_model_reads(door, bad, model):
  data, line = BAD[bad]
  way = DOORS[door]
  for train, held_out in ((data, data), (FINE, data), (data, FINE)):
    with pytest.raises(ValueError, match=line) as error:
      _data_of(way(train), way(held_out), model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("model", [None, Words], ids=["config", "module"])
def test_every_door_takes_tokens_that_the_model_reads(door, model):
  way = DOORS[door]
  # Sequences of evaluations may be shorter, and their integers smaller.
  data = _data_of(way(FINE), way(FINE[:, :4].astype(np.uint8)), model)
  assert data.step_tokens == 2 * 4
  assert data.streams.take(1).shape == (1, 1, 2, 5)


def test_validation_batches_with_names_are_refused_in_one_line():
  feed = as_feed((FINE, {"tokens": FINE}))  # As for a loss of one's own.
  with pytest.raises(ValueError, match="^a validation batch is a dict of"):
    run_text.run_data(runs.settings(num_replicas=1), Overrides(data=feed))


@pytest.mark.parametrize("bad", ["negative", "beyond"])
def test_a_later_batch_is_checked_when_it_is_drawn(bad):
  wrong, _ = BAD[bad]

  def batch(replica, step):
    return (wrong if step == 3 else FINE)[:2]

  data = _data_of(batch, FINE)
  data.streams.take(3)
  with pytest.raises(TokenError, match="tokens of a training batch go from"):
    data.streams.take(2)


@pytest.mark.parametrize("bad", ["floats", "booleans", "pictures", "one token"])
@pytest.mark.parametrize("door", ["function", "iterator"])
def test_a_later_batch_of_another_form_is_refused_when_it_is_drawn(door, bad):
  wrong, _ = BAD[bad]
  batches = [FINE[:2]] * 3 + [wrong[:2]] * 2
  doors = {
    "function": lambda replica, step: batches[step],
    "iterator": iter(batches),
  }
  data = _data_of(doors[door], FINE)
  data.streams.take(3)
  with pytest.raises(ValueError, match="batch 3 of .*: all need one shape"):
    data.streams.take(2)


@pytest.mark.parametrize("door", ["function", "iterator", "loader"])
def test_batches_without_rows_are_refused(door):
  way = DOORS[door]
  for train, held_out in ((FINE[:0], FINE), (FINE, FINE[:0])):
    with pytest.raises(ValueError, match="batch 0 of replica 0 has no rows"):
      _data_of(way(train), way(held_out))


def test_a_loss_of_ones_own_may_read_anything():
  def loss(model, batch):
    return model(jnp.maximum(batch, 0)).mean()

  config = runs.settings(num_replicas=1, evaluation={"num_sequences": 2})
  model = as_loss_model(Words, loss)
  overrides = Overrides(model=model, data=as_feed((FINE - 1, FINE - 100)))
  data = run_text.run_data(config, overrides)
  assert data.streams.take(4).min() == -1


def test_arrays_are_checked_as_a_whole_before_the_run():
  wrong = np.concatenate([FINE, FINE[:1] - 1])
  with pytest.raises(TokenError, match="^tokens of training go from -1 to 15"):
    _data_of(wrong, FINE)


LEARNED = {"positions": "learned", "num_positions": 16, "norm": "layer"}
LONG = np.zeros((8, 18), np.int32)


@pytest.mark.parametrize(
  ("train", "held_out", "line"),
  [
    (LONG, FINE, "a training batch has"),
    (FINE, LONG, "a validation batch has"),
  ],
)
def test_sequences_are_no_longer_than_learned_positions(train, held_out, line):
  config = runs.settings(num_replicas=1, model=LEARNED)
  overrides = Overrides(data=as_feed((train, held_out)))
  with pytest.raises(ValueError, match=f"{line} .* 17 .* learned positions"):
    run_text.run_data(config, overrides)
  fits = Overrides(data=as_feed((LONG[:, :17], LONG[:, :17])))
  run_text.run_data(config, fits)


@pytest.mark.parametrize(
  ("sections", "line"),
  [
    ({"inner": {"accumulate_steps": 2}}, "inner.accumulate_steps=2"),
    (
      {"layout": "mesh", "mesh": {"num_data_shards": 2}},
      "mesh.num_data_shards=2",
    ),
  ],
)
def test_batches_of_any_door_are_divided_evenly(sections, line):
  config = runs.settings(num_replicas=1, **sections)
  data = as_feed((lambda replica, step: FINE[:3], FINE))
  with pytest.raises(ValueError, match=f"batches of 3 cannot be .*{line}"):
    run_text.run_data(config, Overrides(data=data))


def _loss_of_names(model, batch):
  return model(batch["x"]).mean()


def test_every_array_of_a_batch_is_divided_evenly():
  def batch(replica, step):
    return {"x": FINE[:2], "y": FINE[:3]}

  overrides = Overrides(
    model=as_loss_model(Words, _loss_of_names), data=as_feed((batch, batch))
  )
  evaluation = {"num_sequences": 2}
  whole = runs.settings(num_replicas=1, evaluation=evaluation)
  run_text.run_data(whole, overrides)
  divided = runs.settings(
    num_replicas=1, evaluation=evaluation, inner={"accumulate_steps": 2}
  )
  with pytest.raises(ValueError, match="batches of 3 cannot be divided by"):
    run_text.run_data(divided, overrides)


@pytest.mark.parametrize(
  ("held_out", "line"),
  [
    ({"x": FINE}, "validation data have nothing at y, but"),
    ({"x": FINE, "y": FINE[:, 0]}, "integers with 0 axes in an example at y"),
    ({"x": FINE, "y": FINE * 1.0}, "floats with 1 axis in an example at y"),
    (FINE, "validation data have nothing at x"),
  ],
)
def test_validation_data_have_the_form_of_training_data(held_out, line):
  model = as_loss_model(Words, _loss_of_names)
  overrides = Overrides(
    model=model, data=as_feed(({"x": FINE, "y": FINE}, held_out))
  )
  with pytest.raises(ValueError, match=line) as error:
    run_text.run_data(runs.settings(num_replicas=1), overrides)
  assert "\n" not in str(error.value)


def test_numbers_of_validation_data_may_have_another_width():
  model = as_loss_model(Words, _loss_of_names)
  train = {"x": FINE, "y": FINE.astype(np.float32)}
  held_out = {"x": FINE.astype(np.uint8), "y": FINE.astype(np.float16)}
  overrides = Overrides(model=model, data=as_feed((train, held_out)))
  run_text.run_data(runs.settings(num_replicas=1), overrides)
