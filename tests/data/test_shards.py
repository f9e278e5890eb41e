"""Tokens that are mapped from files."""

import dataclasses
import hashlib
import json
import os
import shutil

import numpy as np
import pytest

from dilocox_jax import files
from dilocox_jax.checks import dataclass_from
from dilocox_jax.data import shards, sources, tokenizers
from dilocox_jax.data.documents import Document
from tests import damage, runs

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
  for name in ("train.bin", "validation.bin", "tokenizer.json", "index.json"):
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


def signed(index):
  """An index whose digests fit its fields, whatever they are."""
  found = dataclass_from(shards.Index, index)
  found.digest = found.text_digest()
  found.index_digest = found.own_digest()
  return dataclasses.asdict(found)


def test_what_is_damaged_is_one_line(tmp_path, bpe):
  refused("holds no tokens", mapped, tmp_path / "none")
  write(tmp_path, bpe)
  path = tmp_path / "index.json"
  index = json.loads(path.read_text())
  assert mapped(tmp_path)
  path.write_text(json.dumps(index | {"format": 1}))
  refused("has format 1, not 4", mapped, tmp_path)
  for text in ("", "{", "[]"):
    path.write_text(text)
    refused("index.json is damaged", mapped, tmp_path)
  for change, said in (
    ({"tokens": {"train": 9}}, "tokens lacks a split"),
    ({"parts": ["a"]}, "parts='a' must be of type int"),
    ({"parts": [5, 5]}, "parts do not add up"),
    ({"vocab_size": 10**30}, "vocab_size=1000000.* at most 4294967296"),
    ({"files": {}}, "does not name all files"),
    ({"documents": -3}, "documents=-3 must be at least 1"),
  ):
    path.write_text(json.dumps(index | change))
    refused("fields are not those that were written", mapped, tmp_path)
    path.write_text(json.dumps(signed(index | change)))
    refused(said, mapped, tmp_path)
  path.write_text(json.dumps(index))
  content = (tmp_path / "train.bin").read_bytes()
  for found in (b"", content[:-5], content + b"ab"):
    (tmp_path / "train.bin").write_bytes(found)
    said = f"has {len(found):,} bytes instead of {len(content):,}"
    refused(said, mapped, tmp_path)


@pytest.mark.parametrize("name", ["train.bin", "validation.bin"])
@pytest.mark.parametrize("wrong", ["a flipped bit", "a token beyond"])
def test_a_changed_token_is_noticed(tmp_path, bpe, name, wrong):
  """Whether or not the folder was read before."""
  write(tmp_path, bpe)
  file = tmp_path / name
  content = file.read_bytes()
  tokens = np.frombuffer(content, np.uint16).copy()
  middle = len(tokens) // 2
  tokens[middle] = tokens[middle] ^ 4 if wrong == "a flipped bit" else 65_535
  said = f"{name} is damaged .it is not what index.json"
  file.write_bytes(tokens.tobytes())
  refused(said, mapped, tmp_path)
  file.write_bytes(content)
  assert mapped(tmp_path)
  file.write_bytes(tokens.tobytes())
  refused(said, mapped, tmp_path)
  # Neither is what a program of somebody else has written with its digest.
  index = json.loads((tmp_path / "index.json").read_text())
  index["files"][name] = hashlib.sha256(tokens.tobytes()).hexdigest()
  (tmp_path / "index.json").write_text(json.dumps(signed(index)))
  if wrong == "a token beyond":
    refused("has the token 65,535, but a vocabulary of 3", mapped, tmp_path)


def test_a_folder_is_read_once_and_a_copy_of_it_again(
  tmp_path, bpe, monkeypatch
):
  folder = tmp_path / "tokens"
  read = []
  write(folder, bpe)
  check = shards._check_file

  def spy(path, *arguments):
    read.append(path.name)
    check(path, *arguments)

  monkeypatch.setattr(shards, "_check_file", spy)
  names = ["tokenizer.json", "train.bin", "validation.bin"]
  for _ in range(3):
    mapped(folder)
  assert sorted(read) == names
  shutil.copytree(folder, tmp_path / "copy")  # It keeps times and markers.
  mapped(tmp_path / "copy")
  assert sorted(read[3:]) == names
  markers = [path for path in (tmp_path / "copy").glob(".checked.*")]
  assert len(markers) == 1 and not markers[0].read_bytes()
  # What somebody else has put there under that name is no marker.
  markers[0].unlink()
  markers[0].symlink_to(tmp_path / "elsewhere")
  mapped(tmp_path / "copy")
  assert len(read) == 9 and not (tmp_path / "elsewhere").exists()


def test_every_file_of_a_folder_may_be_damaged(tmp_path, bpe):
  write(tmp_path, bpe, DOCUMENTS[:60])
  stamp = tmp_path / "made_by.json"
  stamp.write_text('{"program": "prepare_data"}')
  before = mapped(tmp_path)
  for name in sorted(path.name for path in tmp_path.iterdir()):
    if name.startswith("."):
      continue
    file = tmp_path / name
    content = file.read_bytes()
    for what, damaged in damage.in_bytes(content):
      file.write_bytes(damaged)
      after = damage.outcome(f"{name}: {what}", lambda: mapped(tmp_path))
      if after:  # Blanks of JSON.
        assert damaged.split() == content.split() and name.endswith(".json")
        assert after.digest == before.digest
    file.write_bytes(content)
  assert mapped(tmp_path).digest == before.digest


def test_a_wrong_field_is_one_line_even_if_its_digest_is_right(tmp_path, bpe):
  write(tmp_path, bpe, DOCUMENTS[:60])
  path = tmp_path / "index.json"
  index = json.loads(path.read_text())
  size = len(mapped(tmp_path).train)

  def read(text):
    try:
      path.write_text(json.dumps(signed(json.loads(text))))
    except (ValueError, TypeError):
      path.write_text(text)
    return mapped(tmp_path)

  for what, text in damage.in_fields(index):
    corpus = damage.outcome(what, lambda text=text: read(text))
    assert corpus is None or len(corpus.train) == size, what


def test_what_a_killed_write_left_is_removed_by_the_next(tmp_path):
  for name in (".train.bin.123.partial", ".prepare.lock", "notes.partial"):
    (tmp_path / name).write_text("x")
  files.remove_partial(tmp_path)
  assert sorted(os.listdir(tmp_path)) == [".prepare.lock", "notes.partial"]
