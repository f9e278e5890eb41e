"""Tokens that are mapped from files."""

import json

import numpy as np
import pytest

from dilocox_jax.data import shards, sources, tokenizers
from dilocox_jax.data.documents import Document
from tests import runs

DOCUMENTS = [
  Document(f"{n}", f"document {n % 350} of many, größer\n".encode(), n // 2000)
  for n in range(2400)
]
BYTES = tokenizers.byte_tokenizer()


@pytest.fixture(scope="module", name="bpe")
def bpe_fixture(tmp_path_factory):
  """Has another end of a text than those that are known."""
  made = tokenizers.trained_bpe([d.content for d in DOCUMENTS[:100]], 300)
  path = tmp_path_factory.mktemp("bpe") / "own.json"
  path.write_bytes(made.content.replace(b"endof", b"ofend"))
  return tokenizers.from_file(str(path), "<|ofendtext|>")


def write(folder, tokenizer=BYTES, documents=DOCUMENTS, fraction=0.1):
  seen = shards.write(folder, documents, tokenizer, fraction)
  return [index.documents for index in seen]


def mapped(folder):
  return shards.map_corpus(str(folder))


def refused(text, function, *arguments):
  with pytest.raises(ValueError, match=text) as error:
    function(*arguments)
  assert "\n" not in str(error.value)


def texts(corpus, tokens):
  """The documents of a split, as text."""
  ends = np.flatnonzero(tokens == corpus.tokenizer.end_of_text)
  parts = np.split(np.asarray(tokens), ends + 1)[:-1]
  return [corpus.tokenizer.decode(part[:-1]) for part in parts]


def test_every_document_is_in_one_split_in_order_and_mapped(tmp_path, bpe):
  assert write(tmp_path, bpe) == [1000, 2000, 2400]
  corpus = mapped(tmp_path)
  train = texts(corpus, corpus.train)
  held_out = texts(corpus, corpus.validation)
  chosen = set(held_out)
  assert not set(train) & chosen  # Copies are never in both.
  all_texts = [d.content.decode() for d in DOCUMENTS]
  assert held_out == [text for text in all_texts if text in chosen]
  assert train == [text for text in all_texts if text not in chosen]
  assert 0.03 < len(held_out) / 2400 < 0.2
  assert corpus.num_files == 2400 and corpus.vocab_size == bpe.vocab_size
  assert isinstance(corpus.train, np.memmap) and corpus.train.mode == "r"
  assert corpus.train.dtype == np.uint16 != shards.Index(256, "").dtype
  num_bytes = sum(len(t.encode()) + 1 for t in held_out)
  assert corpus.bytes_per_token == num_bytes / len(corpus.validation)
  assert corpus.tokenizer and corpus.tokenizer.digest == bpe.digest
  first, second = corpus.parts
  of_part = [text for text in all_texts[:2000] if text not in chosen]
  assert texts(corpus, corpus.train[:first]) == of_part
  assert first + second == len(corpus.train)


def test_what_was_interrupted_is_no_folder_and_begins_anew(tmp_path):
  writing = shards.write(tmp_path / "cut", DOCUMENTS, BYTES, 0.1)
  next(writing)
  refused("holds no tokens", mapped, tmp_path / "cut")
  writing.close()
  assert not runs.files(tmp_path / "cut")
  write(tmp_path / "cut")
  write(tmp_path / "whole")
  assert runs.files(tmp_path / "whole") == runs.files(tmp_path / "cut")


def test_nothing_of_others_is_lost_or_taken_for_own(tmp_path):
  for name in ("train.bin", "validation.bin", "index.json"):
    (tmp_path / name).write_text("mine")
    refused("is there already.*or take another", write, tmp_path)
    assert runs.files(tmp_path) == {name: b"mine"}
    (tmp_path / name).unlink()
  for fraction in (1e-9, 1 - 1e-9):
    few = tmp_path, BYTES, DOCUMENTS[:9], fraction
    refused("has no (validation|train) text", write, *few)
    assert not runs.files(tmp_path)


def test_the_digest_names_text_tokenizer_and_split(tmp_path, bpe):
  cases = (
    (BYTES, DOCUMENTS, 0.1),
    (BYTES, DOCUMENTS, 0.1),
    (bpe, DOCUMENTS, 0.1),
    (BYTES, DOCUMENTS[:-1], 0.1),
    (BYTES, DOCUMENTS, 0.2),
  )
  digests = []
  for number, options in enumerate(cases):
    write(tmp_path / str(number), *options)
    loaded = sources.load_corpus("shards", glob=str(tmp_path / str(number)))
    digests.append(loaded.digest)
  assert digests[0] == digests[1] and len(set(digests)) == 4


def test_what_is_damaged_is_one_line(tmp_path, bpe):
  refused("holds no tokens", mapped, tmp_path / "none")
  write(tmp_path, bpe)
  path = tmp_path / "index.json"
  index = json.loads(path.read_text())
  assert mapped(tmp_path)
  path.write_text(json.dumps(index | {"format": 1}))
  refused("has format 1, not 3", mapped, tmp_path)
  damages = {"tokens": {"train": 9}}, {"parts": ["a"]}, {"vocab_size": "9"}
  damages = [json.dumps(index | damage) for damage in damages]
  for damage in ("", "{", "[]", *damages):
    path.write_text(damage)
    refused("index.json is damaged", mapped, tmp_path)
  path.write_text(json.dumps(index))
  content = (tmp_path / "train.bin").read_bytes()
  for found in (b"", content[:-5], content + b"ab"):
    (tmp_path / "train.bin").write_bytes(found)
    said = f"has {len(found):,} bytes instead of {len(content):,}"
    refused(said, mapped, tmp_path)
