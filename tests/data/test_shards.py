"""Tokens that are mapped from files, and texts that only evaluate."""

import json

import numpy as np
import pytest

from dilocox_jax.data import shards, sources, tokenizers
from dilocox_jax.data.documents import Document
from dilocox_jax.data.validation import load_validation_set
from tests import runs

DOCUMENTS = [
  Document(f"{n}", f"document {n % 350} of many, größer\n".encode())
  for n in range(2400)
]
BYTES = tokenizers.byte_tokenizer()


@pytest.fixture(scope="module", name="bpe")
def bpe_fixture(tmp_path_factory):
  cache = str(tmp_path_factory.mktemp("cache"))
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("DILOCOX_JAX_CACHE", cache)
    return tokenizers.trained_bpe([d.content for d in DOCUMENTS[:100]], 300)


def write(folder, tokenizer=BYTES, documents=DOCUMENTS, fraction=0.1, **source):
  return list(shards.write(folder, documents, tokenizer, fraction, source))


def begin(folder, tokenizer=BYTES, num_batches=1, **source):
  writing = shards.write(folder, DOCUMENTS, tokenizer, 0.1, source)
  for _ in range(num_batches):
    next(writing)
  writing.close()


def mapped(folder, *options):
  return shards.map_corpus(str(folder), *options)


def refused(text, function, *arguments, **options):
  with pytest.raises(ValueError, match=text) as error:
    function(*arguments, **options)
  assert "\n" not in str(error.value)
  return str(error.value)


def texts(corpus, tokens):
  """The documents of a split, as text."""
  ends = np.flatnonzero(tokens == corpus.tokenizer.end_of_text)
  parts = np.split(np.asarray(tokens), ends + 1)[:-1]
  return [corpus.tokenizer.decode(part[:-1]) for part in parts]


def test_every_document_is_in_one_split_in_order_and_mapped(tmp_path, bpe):
  seen = write(tmp_path, bpe)
  assert [p.documents for p in seen][-1] == 2400 and len(seen) == 3
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
  assert isinstance(corpus.train, np.memmap) and corpus.train.dtype == np.uint16
  assert not corpus.train.flags.writeable
  num_bytes = sum(len(t.encode()) + 1 for t in held_out)
  assert corpus.bytes_per_token == num_bytes / len(corpus.validation)
  assert corpus.parts == (len(corpus.train),)


@pytest.mark.parametrize("num_batches", [1, 2])
def test_an_interrupted_write_goes_on_to_the_same_files(
  num_batches, tmp_path, bpe
):
  write(tmp_path / "whole", bpe)
  begin(tmp_path / "cut", bpe, num_batches)
  with open(tmp_path / "cut/train.bin", "ab") as file:
    file.write(b"half of a batch")
  (progress, *_) = write(tmp_path / "cut", bpe)
  assert progress.documents == 2400
  assert runs.files(tmp_path / "whole") == runs.files(tmp_path / "cut")


def changed(documents):
  """What 1000 documents may have become since they were written."""
  first, second, *others = documents
  yield documents[:999]
  yield [second, first, *others]
  yield [first, second, second, *others]
  yield [first._replace(content=first.content[:-1]), second, *others]
  joined = second._replace(content=first.content + second.content)
  yield [first._replace(content=b""), joined, *others]
  yield [first._replace(part=1), second, *others]


def test_a_folder_goes_on_with_its_own_documents_and_settings(tmp_path, bpe):
  begin(tmp_path, files="a.txt")
  refused("not finished.*run the same command again", mapped, tmp_path)
  before = runs.files(tmp_path)
  refused("other settings", write, tmp_path, bpe, files="a.txt")
  refused("other settings or documents", write, tmp_path, files="b.txt")
  for documents in changed(DOCUMENTS):
    options = {"documents": documents, "files": "a.txt"}
    refused("have changed", write, tmp_path, **options)
    assert runs.files(tmp_path) == before
  # Those that come next may have been mended meanwhile, and names are no text.
  mended = [d._replace(name=f"new {d.name}") for d in DOCUMENTS[:1001]]
  found = write(tmp_path, documents=mended, files="a.txt")
  assert found[-1].documents == 1001
  refused("finished tokens already", write, tmp_path)


def test_nothing_of_others_is_lost_or_taken_for_own(tmp_path):
  for name in ("train.bin", "validation.bin"):
    (tmp_path / name).write_text("mine")
    refused("take another folder", write, tmp_path)
    assert runs.files(tmp_path) == {name: b"mine"}
    (tmp_path / name).unlink()
  # Nothing is kept of a call that wrote no document.
  with pytest.raises(ZeroDivisionError):
    write(tmp_path, BYTES, (1 / 0 for _ in "a"))
  write(tmp_path, fraction=0.2)
  refused("has no (validation|train) text", write, tmp_path / "a", BYTES, [])
  begin(tmp_path / "b")
  (tmp_path / "b/train.bin").write_bytes(b"")
  refused("shorter than", write, tmp_path / "b")
  (tmp_path / "b/progress.json").write_text("{")
  refused("progress.json is damaged", write, tmp_path / "b")


def test_the_digest_names_text_tokenizer_and_split(tmp_path, bpe):
  write(tmp_path / "first")
  digests = [mapped(tmp_path / "first").digest]
  fewer = DOCUMENTS[:-1]
  cases = (BYTES, DOCUMENTS, 0.1), (bpe, DOCUMENTS, 0.1), (BYTES, fewer, 0.1)
  for number, options in enumerate((*cases, (BYTES, DOCUMENTS, 0.2))):
    write(tmp_path / str(number), *options)
    digests.append(mapped(tmp_path / str(number)).digest)
  assert digests[0] == digests[1] and len(set(digests)) == 4
  corpus = sources.load_corpus("shards", glob=str(tmp_path / "first"))
  assert corpus.train.dtype == np.uint8 and corpus.bytes_per_token == 1.0


def test_an_index_that_is_damaged_is_one_line(tmp_path):
  refused("holds no tokens", mapped, tmp_path / "none")
  write(tmp_path)
  path = tmp_path / "index.json"
  index = json.loads(path.read_text())
  path.write_text(json.dumps(index | {"format": 1}))
  refused("has format 1, not 2", mapped, tmp_path)
  settings = index["settings"] | {"dtype": "uint16"}
  damages = {"settings": settings}, {"tokens": {"train": 9}}, {"parts": ["a"]}
  damages = [json.dumps(index | damage) for damage in damages]
  for damage in ("", "{", "[]", "9" * 5000, "[" * 100_000, *damages):
    path.write_text(damage)
    refused("index.json is damaged", mapped, tmp_path)


def test_the_tokens_that_a_short_file_still_has_can_be_taken(tmp_path, bpe):
  write(tmp_path, bpe)
  whole = mapped(tmp_path, "skip")
  path = tmp_path / "train.bin"
  size = path.stat().st_size
  with open(path, "r+b") as file:
    file.truncate(size - 5)  # Two tokens and a half of 2 bytes each.
  said = f"train.bin has {size - 5:,} bytes instead of {size:,}.*skip"
  refused(said, mapped, tmp_path)
  short = mapped(tmp_path, "skip")
  assert (whole.num_skipped, short.num_skipped) == (0, 3)
  np.testing.assert_array_equal(short.train, whole.train[:-3])
  assert short.digest != whole.digest
  assert short.parts == (len(short.train),)
  # Of a file that is too long nobody knows which tokens are its own.
  for found in (0, size + 2):
    path.write_bytes(bytes(found))
    said = refused(f"has {found:,} bytes instead", mapped, tmp_path, "skip")
    assert "skip" not in said


def test_the_token_between_documents_is_kept(tmp_path, bpe):
  (tmp_path / "own.json").write_bytes(bpe.content.replace(b"endof", b"ofend"))
  tokenizer = tokenizers.from_file(f"{tmp_path}/own.json", "<|ofendtext|>")
  write(tmp_path / "a", tokenizer)
  made = mapped(tmp_path / "a").tokenizer
  assert made and made.digest == tokenizer.digest


def test_a_set_to_evaluate_on_is_all_of_its_files_or_held_out_shards(
  tmp_path, bpe
):
  (tmp_path / "a.txt").write_text("one")
  rows = [json.dumps({"body": text}) for text in ("two", "")]
  (tmp_path / "b.jsonl").write_text("\n".join(rows))
  found = load_validation_set(f"{tmp_path}/*", BYTES, "body")
  assert found.tokens.tobytes() == b"one\ntwo" and found.bytes_per_token == 1.0
  (tmp_path / "a.txt").write_text("One")
  again = load_validation_set(f"{tmp_path}/*", BYTES, "body")
  assert again.digest != found.digest
  longer = load_validation_set(f"{tmp_path}/*", bpe, "body")
  assert longer.bytes_per_token == 7 / len(longer.tokens)
  write(tmp_path / "shards")
  held = load_validation_set(str(tmp_path / "shards"), BYTES)
  content = (tmp_path / "shards/validation.bin").read_bytes()
  assert held.tokens.tobytes() == content and held.bytes_per_token == 1.0
  refused("another tokenizer", load_validation_set, f"{tmp_path}/shards", bpe)
  (tmp_path / "a.txt").write_text("")
  for glob, tokenizer, said in (
    ("a.txt", BYTES, "are empty"),
    ("*.md", BYTES, "no file matches"),
    ("a.txt", None, "has no tokenizer"),
  ):
    refused(said, load_validation_set, f"{tmp_path}/{glob}", tokenizer)
