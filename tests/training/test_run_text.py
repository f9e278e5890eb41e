import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.data.corpus import Corpus
from dilocox_jax.data.token_checks import TokenError
from dilocox_jax.training import build, run_text
from dilocox_jax.training.parts import Parts
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
  parts = Parts(model=runs.programs(runs.settings()).model)
  with pytest.raises(ValueError, match="a model that is handed in"):
    run_text._end_of_text(config, run_text.corpus(config), parts)


@pytest.mark.parametrize(
  ("tokens", "vocab_size", "message"),
  [
    (np.arange(5000) % 300, 300, "has 300 different tokens, but the model"),
    (np.arange(5000) % 97 - 5, 97, "go from -5 to 91, but vocab_size=97"),
    (np.arange(5000) % 97, 50, "to 96, but vocab_size=50 allows 0 to 49"),
    (np.arange(5000) % 97 + 0.5, 98, "are float64: pass integers"),
  ],
)
def test_tokens_that_are_handed_in_must_fit(tokens, vocab_size, message):
  whole = np.zeros(5000, np.int64)
  text = Corpus("own", whole, whole[:500], "0" * 16, vocab_size, 0)
  # Tests check types when a corpus is made; a user's program does not.
  object.__setattr__(text, "train", tokens)
  with pytest.raises(ValueError, match=message):
    run_text.corpus(runs.settings(), Parts(data=text))


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
  data = run_text.run_data(runs.settings(), Parts(data=text))
  with pytest.raises(TokenError, match="batch go from 0 to 98, but vocab_size"):
    data.streams.take(74)  # An epoch.
