import json

import numpy as np
import pytest

from dilocox_jax.data import shards, sources, tokenizers
from dilocox_jax.data.documents import Document
from tests import runs

DOCUMENTS = [
  Document(f"{n}", f"document {n % 350} of many, größer\n".encode())
  for n in range(2400)
]
BYTES = tokenizers.byte_tokenizer()


@pytest.fixture(name="bpe")
def bpe_fixture(tmp_path, monkeypatch):
  monkeypatch.setenv("DILOCOX_JAX_CACHE", str(tmp_path / "cache"))
  return tokenizers.trained_bpe([d.content for d in DOCUMENTS[:100]], 300)


def write(folder, tokenizer=BYTES, documents=DOCUMENTS, fraction=0.1):
  return list(shards.write(folder, documents, tokenizer, fraction))


def texts(corpus, tokens):
  """The documents of a split, as text."""
  ends = np.flatnonzero(tokens == corpus.tokenizer.end_of_text)
  parts = np.split(np.asarray(tokens), ends + 1)[:-1]
  return [corpus.tokenizer.decode(part[:-1]) for part in parts]


def test_every_document_is_in_one_split_in_order(tmp_path, bpe):
  seen = write(tmp_path / "a", bpe)
  assert [p.documents for p in seen][-1] == 2400 and len(seen) == 3
  corpus = shards.map_corpus(str(tmp_path / "a"))
  train, held_out = (
    texts(corpus, corpus.train),
    texts(corpus, corpus.validation),
  )
  assert not set(train) & set(held_out)  # Copies are never in both.
  chosen = set(held_out)
  all_texts = [d.content.decode() for d in DOCUMENTS]
  assert held_out == [text for text in all_texts if text in chosen]
  assert train == [text for text in all_texts if text not in chosen]
  assert 0.03 < len(held_out) / 2400 < 0.2
  assert corpus.num_files == 2400 and corpus.vocab_size == bpe.vocab_size


def test_tokens_are_mapped_and_not_read(tmp_path, bpe):
  write(tmp_path, bpe)
  corpus = shards.map_corpus(str(tmp_path))
  assert isinstance(corpus.train, np.memmap)
  assert corpus.train.dtype == np.uint16
  assert not corpus.train.flags.writeable
  num_bytes = sum(len(t.encode()) + 1 for t in texts(corpus, corpus.validation))
  assert corpus.bytes_per_token == num_bytes / len(corpus.validation)


def test_bytes_need_no_tokenizer_file(tmp_path):
  write(tmp_path)
  assert sorted(p.name for p in tmp_path.iterdir()) == [
    "index.json",
    "train.bin",
    "validation.bin",
  ]
  corpus = sources.load_corpus("shards", glob=str(tmp_path))
  assert corpus.train.dtype == np.uint8 and corpus.bytes_per_token == 1.0


@pytest.mark.parametrize("num_batches", [1, 2])
def test_an_interrupted_write_goes_on_to_the_same_files(
  num_batches, tmp_path, bpe
):
  write(tmp_path / "whole", bpe)
  writing = shards.write(tmp_path / "cut", DOCUMENTS, bpe, 0.1)
  for _ in range(num_batches):
    next(writing)
  writing.close()
  with open(tmp_path / "cut/train.bin", "ab") as file:
    file.write(b"half of a batch")
  (progress, *_) = write(tmp_path / "cut", bpe)
  assert progress.documents == 2400
  for path in (tmp_path / "whole").iterdir():
    assert path.read_bytes() == (tmp_path / "cut" / path.name).read_bytes()


def test_a_folder_goes_on_with_its_own_documents_only(tmp_path):
  source = {"files": ["a.txt", "b.txt"]}
  folder = tmp_path / "cut"
  next(shards.write(folder, DOCUMENTS, BYTES, 0.1, source))
  other = shards.write(folder, DOCUMENTS, BYTES, 0.1, {"files": ["b.txt"]})
  assert "begun with other settings or documents" in refused(next, other)
  list(shards.write(folder, DOCUMENTS, BYTES, 0.1, source))
  assert shards.map_corpus(str(folder)).train.size


def changed(documents):
  """What 1000 documents may have become since they were written."""
  first, second, *others = documents
  yield documents[:999]
  yield []
  yield [second, *others]
  yield [second, first, *others]
  yield [first, second, second, *others]
  yield [first._replace(content=first.content[:-1]), second, *others]
  joined = second._replace(content=first.content + second.content)
  yield [first._replace(content=b""), joined, *others]
  yield [first._replace(part=1), second, *others]


def test_a_folder_goes_on_with_unchanged_documents_only(tmp_path):
  folder = tmp_path / "cut"
  next(shards.write(folder, DOCUMENTS, BYTES, 0.1))
  before = runs.files(folder)
  for documents in changed(DOCUMENTS):
    assert "have changed" in refused(write, folder, BYTES, documents)
    assert runs.files(folder) == before
  # Those that come next may have been mended meanwhile, and names are no text.
  mended = [d._replace(name=f"new {d.name}") for d in DOCUMENTS[:1001]]
  assert write(folder, BYTES, mended)[-1].documents == 1001


@pytest.mark.parametrize("name", ["train.bin", "validation.bin"])
def test_files_of_others_are_not_cut_to_nothing(name, tmp_path):
  (tmp_path / name).write_text("mine")
  assert "take another folder" in refused(write, tmp_path)
  assert runs.files(tmp_path) == {name: b"mine"}


def test_nothing_is_kept_of_a_call_that_wrote_no_document(tmp_path):
  with pytest.raises(ZeroDivisionError):
    write(tmp_path, BYTES, (1 / 0 for _ in "a"))
  write(tmp_path, fraction=0.2)


def test_the_digest_names_text_tokenizer_and_split(tmp_path, bpe):
  fewer = DOCUMENTS[:-1]
  cases = {
    "same": {},
    "bpe": {"tokenizer": bpe},
    "fewer": {"documents": fewer},
    "fraction": {"fraction": 0.2},
  }
  write(tmp_path / "first")
  digests = {shards.map_corpus(str(tmp_path / "first")).digest}
  for name, changed in cases.items():
    write(tmp_path / name, **changed)
    digests.add(shards.map_corpus(str(tmp_path / name)).digest)
  assert len(digests) == 4


def refused(function, *arguments):
  with pytest.raises(ValueError) as error:
    function(*arguments)
  assert "\n" not in str(error.value)
  return str(error.value)


def test_what_is_damaged_is_one_line(tmp_path, bpe):
  assert "holds no tokens" in refused(shards.map_corpus, str(tmp_path / "none"))
  folder = tmp_path / "a"
  writing = shards.write(folder, DOCUMENTS, BYTES, 0.1)
  next(writing)
  writing.close()
  assert "run the same command again" in refused(shards.map_corpus, str(folder))
  assert "other settings" in refused(write, folder, bpe)
  write(folder)
  assert "finished tokens already" in refused(write, folder)
  size = (folder / "train.bin").stat().st_size
  with open(folder / "train.bin", "r+b") as file:
    file.truncate(size - 1)
  said = refused(shards.map_corpus, str(folder))
  assert f"train.bin has {size - 1:,} bytes instead of {size:,}" in said
  index = json.loads((folder / "index.json").read_text())
  (folder / "index.json").write_text(json.dumps(index | {"format": 2}))
  assert "has format 2, not 1" in refused(shards.map_corpus, str(folder))
  for damage in ("", "{", "[]", "9" * 5000, "[" * 100_000):
    (folder / "index.json").write_text(damage)
    assert "index.json is damaged" in refused(shards.map_corpus, str(folder))
  for damage in ({"dtype": "uint16"}, {"tokens": {"train": 9}}, {"parts": 3}):
    (folder / "index.json").write_text(json.dumps(index | damage))
    assert "index.json is damaged" in refused(shards.map_corpus, str(folder))


def test_the_token_between_documents_is_kept(tmp_path, bpe):
  (tmp_path / "own.json").write_bytes(bpe.content.replace(b"endof", b"ofend"))
  tokenizer = tokenizers.from_file(f"{tmp_path}/own.json", "<|ofendtext|>")
  write(tmp_path / "a", tokenizer)
  mapped = shards.map_corpus(f"{tmp_path}/a").tokenizer
  assert mapped and mapped.digest == tokenizer.digest


def test_the_tokens_that_a_short_file_still_has_can_be_taken(tmp_path, bpe):
  write(tmp_path, bpe)
  whole = shards.map_corpus(str(tmp_path), "skip")
  size = (tmp_path / "train.bin").stat().st_size
  with open(tmp_path / "train.bin", "r+b") as file:
    file.truncate(size - 5)  # Two tokens and a half of 2 bytes each.
  short = shards.map_corpus(str(tmp_path), "skip")
  assert (whole.num_skipped, short.num_skipped) == (0, 3)
  np.testing.assert_array_equal(short.train, whole.train[:-3])
  assert short.digest != whole.digest
  (tmp_path / "train.bin").write_bytes(b"")
  assert "train.bin has 0 bytes" in refused(
    shards.map_corpus, str(tmp_path), "skip"
  )
  # Of a file that is too long nobody knows which tokens are its own.
  (tmp_path / "train.bin").write_bytes(bytes(size + 2))
  said = refused(shards.map_corpus, str(tmp_path), "skip")
  assert f"has {size + 2:,} bytes instead of {size:,}" in said
  assert "skip" not in said


def test_a_lost_end_of_a_file_is_noticed(tmp_path):
  writing = shards.write(tmp_path, DOCUMENTS, BYTES, 0.1)
  next(writing)
  writing.close()
  (tmp_path / "train.bin").write_bytes(b"")
  assert "shorter than" in refused(write, tmp_path)
  (tmp_path / "progress.json").write_text("{")
  assert "progress.json is damaged" in refused(write, tmp_path)


def test_a_split_without_text_is_refused(tmp_path):
  said = refused(write, tmp_path, BYTES, DOCUMENTS[:1])
  assert "has no validation text" in said or "has no train text" in said
