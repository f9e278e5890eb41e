import hashlib
import json
import math

import numpy as np
import pytest

from dilocox_jax.data import corpus, tokenizers

TEXTS = [
  b"the cat sat on the mat\n" * 20,
  "größer als ein Häuschen\n".encode() * 20,
  b"the mat sat on the cat\n" * 20,
]
FILES = {f"{n}.txt": TEXTS[n % 3] + str(n).encode() for n in range(40)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
  monkeypatch.setenv("DILOCOX_JAX_CACHE", str(tmp_path / "cache"))
  return tmp_path / "cache"


@pytest.fixture(name="sentence_piece")
def sentence_piece_fixture(tmp_path):
  import sentencepiece

  text = tmp_path / "text.txt"
  text.write_bytes(b"".join(TEXTS))
  sentencepiece.SentencePieceTrainer.train(
    input=str(text),
    model_prefix=str(tmp_path / "piece"),
    vocab_size=40,
    model_type="bpe",
    minloglevel=2,
  )
  return str(tmp_path / "piece.model")


def test_a_trained_vocabulary_gives_every_text_back():
  made = tokenizers.choose("bpe", 300)(TEXTS)
  # It has learnt whatever pairs there are to learn, and stops there.
  assert 257 < made.vocab_size <= 300 and made.dtype == np.uint16
  unseen = "\ufeffZwölf Boxkämpfer,\r\n\0 日本<|endoftext|>".encode()
  for text in (*TEXTS, unseen, b""):
    (tokens,) = made.encode([text])
    assert tokens.dtype == made.dtype
    assert made.decode(tokens) == text.decode()
    assert made.end_of_text not in tokens
  assert len(made.encode([TEXTS[0]])[0]) < len(TEXTS[0]) / 2


def test_a_vocabulary_is_trained_once_for_a_text(own_cache, monkeypatch):
  first = tokenizers.choose("bpe", 300)(TEXTS)
  (kept,) = (own_cache / "tokenizers").iterdir()
  monkeypatch.setattr(tokenizers, "_text", None)  # Training would need it.
  again = tokenizers.choose("bpe", 300)(TEXTS)
  assert again.digest == first.digest and len(first.digest) == 16
  monkeypatch.undo()
  monkeypatch.setenv("DILOCOX_JAX_CACHE", str(own_cache))
  other = tokenizers.choose("bpe", 280)(TEXTS)
  assert other.digest != first.digest
  from_file = tokenizers.choose(str(kept))([])
  assert from_file.digest == first.digest and from_file.name == str(kept)


@pytest.mark.parametrize("kept_bytes", [0, 2000])
def test_a_damaged_vocabulary_is_trained_again(kept_bytes, own_cache, caplog):
  first = tokenizers.choose("bpe", 300)(TEXTS)
  (kept,) = (own_cache / "tokenizers").iterdir()
  whole = kept.read_bytes()
  kept.write_bytes(whole[:kept_bytes])
  assert tokenizers.choose("bpe", 300)(TEXTS).digest == first.digest
  assert kept.read_bytes() == whole and str(kept) in caplog.text


def test_without_a_cache_nothing_is_written(own_cache, monkeypatch):
  monkeypatch.setenv("DILOCOX_JAX_CACHE", "")
  tokenizers.choose("bpe", 280)(TEXTS)
  assert not own_cache.exists()


def test_a_sentence_piece_model_makes_tokens(sentence_piece):
  made = tokenizers.choose(sentence_piece)([])
  (tokens,) = made.encode([b"the cat sat"])
  assert made.vocab_size == 40 and made.dtype == np.uint8
  assert made.decode(tokens) == "the cat sat"
  assert made.end_of_text == 2
  assert (
    tokenizers.choose(sentence_piece, end_of_text="<s>")([]).end_of_text == 1
  )


def test_documents_are_joined_by_the_end_of_a_text():
  made = tokenizers.choose("bpe", 280)(TEXTS)
  joined = tokenizers.join(made, TEXTS)
  parts = np.split(joined, np.flatnonzero(joined == made.end_of_text))
  texts = [made.decode(part[part != made.end_of_text]) for part in parts]
  assert texts == [text.decode() for text in TEXTS]
  plain = tokenizers.byte_tokenizer()
  assert tokenizers.join(plain, TEXTS).tobytes() == b"\n".join(TEXTS)


def test_a_corpus_knows_the_bytes_of_a_token():
  plain = corpus.from_files("t", FILES, 0.3)
  assert plain.bytes_per_token == 1.0
  made = corpus.from_files("t", FILES, 0.3, tokenizers.choose("bpe", 300))
  assert made.tokenizer and made.vocab_size == made.tokenizer.vocab_size
  assert made.bytes_per_token
  num_bytes = made.bytes_per_token * made.validation.size
  assert math.isclose(num_bytes, plain.validation.size)
  assert made.bytes_per_token > 2
  assert made.digest != plain.digest
  text = made.tokenizer.decode(made.train[made.train != 256])
  assert hashlib.sha256(text.encode()).digest()


def test_what_is_learnt_comes_from_the_training_text_alone():
  seen = []

  def spy(documents):
    seen.extend(documents)
    return tokenizers.byte_tokenizer()

  corpus.from_files("t", FILES, 0.3, spy)
  held_out = [p for p in FILES if corpus.is_held_out(p, 0.3)]
  assert seen and held_out
  assert not {FILES[path] for path in held_out} & set(seen)


def words(vocab, **options):
  """A tokenizer.json that knows whole words, and the end of a document."""
  described = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {
      "type": "WordLevel",
      "vocab": {"<|endoftext|>": 0} | vocab,
      "unk_token": "<|endoftext|>",
    },
  }
  return json.dumps(described | options)


def test_a_file_that_asks_for_texts_of_one_length_keeps_whole_documents(
  tmp_path,
):
  truncation = {
    "direction": "Right",
    "max_length": 4,
    "strategy": "LongestFirst",
    "stride": 0,
  }
  padding = {
    "strategy": {"Fixed": 8},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<|endoftext|>",
  }
  path = tmp_path / "short.json"
  path.write_text(words({"a": 1}, truncation=truncation, padding=padding))
  made = tokenizers.from_file(str(path))
  long, short = made.encode([b"a " * 16, b"a a"])
  assert (len(long), len(short)) == (16, 2)


@pytest.mark.parametrize("highest", [40, 300])
def test_numbers_of_tokens_may_have_gaps(tmp_path, highest):
  path = tmp_path / "gaps.json"
  path.write_text(words({"a": 1, "b": highest}))
  made = tokenizers.from_file(str(path))
  assert made.vocab_size == highest + 1
  assert made.encode([b"a b"])[0].tolist() == [1, highest]


def test_the_token_between_documents_can_be_named(tmp_path):
  path = tmp_path / "named.json"
  path.write_text(words({"a": 1, "<stop>": 2}))
  usual, named = (
    tokenizers.choose(str(path), end_of_text=name)([])
    for name in ("", "<stop>")
  )
  assert tokenizers.join(named, [b"a", b"a"]).tolist() == [1, 2, 1]
  assert usual.digest != named.digest and usual.end_of_text == 0
  with pytest.raises(ValueError, match="data.end_of_text='<end>' is no token"):
    tokenizers.choose(str(path), end_of_text="<end>")([])


@pytest.mark.parametrize("make", ["bpe", "words", "piece"])
def test_no_text_is_changed_in_silence(make, sentence_piece, tmp_path, caplog):
  path = tmp_path / "words.json"
  path.write_text(words({"cat": 1}))
  name = {"bpe": "bpe", "words": str(path), "piece": sentence_piece}[make]
  corpus.from_files("t", FILES, 0.3, tokenizers.choose(name, 300))
  assert ("documents back changed" in caplog.text) == (make != "bpe")
  with pytest.raises(ValueError, match="no text in UTF-8"):
    tokenizers.choose(name, 300)(TEXTS).encode(["größer".encode("latin-1")])


def test_a_tokenizer_that_cannot_be_kept_is_used_all_the_same(
  tmp_path, monkeypatch
):
  (tmp_path / "file").write_text("no folder")
  monkeypatch.setenv("DILOCOX_JAX_CACHE", str(tmp_path / "file"))
  assert tokenizers.choose("bpe", 300)(TEXTS).vocab_size <= 300


@pytest.mark.parametrize(
  ("name", "content", "said"),
  [
    ("nowhere.json", None, "no such file; give 'bytes', 'bpe'"),
    ("bad.json", "{}", "data.tokenizer="),
    ("binary.json", b"\xff\xfe", "binary.json: 'utf-8' codec can't decode"),
    ("bad.model", "no model", "data.tokenizer="),
    (
      "endless.json",
      json.dumps(
        {
          "version": "1.0",
          "truncation": None,
          "padding": None,
          "added_tokens": [],
          "normalizer": None,
          "pre_tokenizer": None,
          "post_processor": None,
          "decoder": None,
          "model": {
            "type": "WordLevel",
            "vocab": {"a": 0},
            "unk_token": "a",
          },
        }
      ),
      "name one of its tokens (none that are special) with data.end_of_text",
    ),
    ("empty.model", "", "empty.model is an empty file"),
  ],
)
def test_a_bad_tokenizer_is_one_line(name, content, said, tmp_path):
  path = tmp_path / name
  if isinstance(content, bytes):
    path.write_bytes(content)
  elif content is not None:
    path.write_text(content)
  with pytest.raises(ValueError, match="data.tokenizer") as error:
    tokenizers.choose(str(path))([])
  assert said in str(error.value) and "\n" not in str(error.value)
