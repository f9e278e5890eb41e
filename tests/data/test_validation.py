import json

import numpy as np
import pytest

from dilocox_jax.data import shards, tokenizers
from dilocox_jax.data.documents import Document
from dilocox_jax.data.validation import (
  held_out_batches,
  load_validation_set,
  validation_batches,
)
from tests.data.test_streams import LENGTH, NUM_SEQUENCES, TOKENS, sequence_ids


def validation(batch_size=4, max_sequences=20, tokens: np.ndarray = TOKENS):
  return validation_batches(
    tokens,
    batch_size=batch_size,
    sequence_length=LENGTH,
    max_sequences=max_sequences,
  )


def test_validation_sequences_are_evenly_spaced_over_the_text():
  batches = validation(max_sequences=48)
  assert batches.shape == (12, 4, LENGTH + 1)
  assert batches.dtype == np.int32
  gaps = np.diff(sequence_ids(batches).ravel())
  assert set(gaps.tolist()) == {NUM_SEQUENCES // 48, NUM_SEQUENCES // 48 + 1}


def test_validation_takes_whole_batches_of_different_sequences():
  ids = sequence_ids(validation(max_sequences=1000)).ravel()
  assert len(ids) == len(set(ids)) == NUM_SEQUENCES // 4 * 4
  assert len(sequence_ids(validation(max_sequences=11)).ravel()) == 8


def test_bytes_of_validation_become_token_ids():
  # What is above 127 must not turn negative on the way.
  tokens = np.full(NUM_SEQUENCES * (LENGTH + 1), 200, np.uint8)
  assert (validation(tokens=tokens) == 200).all()


@pytest.mark.parametrize(
  ("tokens", "max_sequences", "text"),
  [
    (TOKENS[:19], 20, "19 validation tokens make 3 sequences .* needs 4"),
    (TOKENS, 3, "max_sequences is 3, but one batch needs 4"),
  ],
)
def test_no_whole_validation_batch_is_an_error(tokens, max_sequences, text):
  with pytest.raises(ValueError, match=text):
    validation(tokens=tokens, max_sequences=max_sequences)


@pytest.mark.parametrize("num_tokens", [2, 5, 6, 7, 41, 42, 44, 1000])
def test_a_whole_pass_predicts_every_token_but_the_first_once(num_tokens):
  parts = held_out_batches(
    TOKENS[:num_tokens], batch_size=3, sequence_length=LENGTH, max_sequences=0
  )
  predicted = [token for part in parts for token in part[..., 1:].ravel()]
  assert predicted == list(range(1, num_tokens))
  for part in parts:
    np.testing.assert_array_equal(part[..., 1:], part[..., :-1] + 1)
    assert part.dtype == np.int32 and part.shape[1] <= 3


def test_one_token_is_no_validation_text():
  with pytest.raises(ValueError, match="leave none to predict"):
    held_out_batches(
      TOKENS[:1], batch_size=3, sequence_length=LENGTH, max_sequences=0
    )


BYTES = tokenizers.byte_tokenizer()


def test_a_set_is_all_of_its_files(tmp_path):
  (tmp_path / "a.txt").write_text("one")
  lines = [json.dumps({"body": text}) for text in ("two", "")]
  (tmp_path / "b.jsonl").write_text("\n".join(lines))
  found = load_validation_set(f"{tmp_path}/*", BYTES, "body")
  assert found.tokens.tobytes() == b"one\ntwo"
  assert found.bytes_per_token == 1.0
  (tmp_path / "a.txt").write_text("One")
  again = load_validation_set(f"{tmp_path}/*", BYTES, "body")
  assert again.digest != found.digest


def test_a_set_may_be_shards_of_the_same_tokens(tmp_path):
  texts = [Document(str(n), f"text {n}".encode()) for n in range(200)]
  for _ in shards.write(tmp_path, texts, BYTES, 0.3):
    pass
  found = load_validation_set(str(tmp_path), BYTES)
  assert found.tokens.tobytes() == (tmp_path / "validation.bin").read_bytes()
  bpe = tokenizers.trained_bpe([text.content for text in texts], 260)
  with pytest.raises(ValueError, match="another tokenizer than the training"):
    load_validation_set(str(tmp_path), bpe)


def test_a_set_that_cannot_be_read_is_one_line(tmp_path):
  (tmp_path / "a.txt").write_text("")
  for glob, tokenizer, said in (
    (f"{tmp_path}/*", BYTES, "are empty"),
    (f"{tmp_path}/*.md", BYTES, "no file matches"),
    (f"{tmp_path}/*", None, "has no tokenizer"),
  ):
    with pytest.raises(ValueError, match=said) as error:
      load_validation_set(glob, tokenizer)
    assert "\n" not in str(error.value)
