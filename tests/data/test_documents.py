import gzip
import json

import pytest
import zstandard

from dilocox_jax.data import corpus, sources
from dilocox_jax.data.documents import (
  Document,
  matching_files,
  named_globs,
  read_documents,
  sampled,
)

LINES = [{"text": f"document {n} ü\n", "other": n} for n in range(30)]
JSON_LINES = "\n".join(map(json.dumps, LINES)).encode() + b"\n\n"


def documents(pattern, **options):
  return [
    document
    for name, path in matching_files(str(pattern))
    for document in read_documents(name, path, **options)
  ]


@pytest.mark.parametrize(
  ("name", "compress"),
  [
    ("a.jsonl", bytes),
    ("a.ndjson", bytes),
    ("a.jsonl.gz", gzip.compress),
    ("a.jsonl.zst", zstandard.ZstdCompressor().compress),
  ],
)
def test_every_line_is_a_document(name, compress, tmp_path):
  (tmp_path / name).write_bytes(compress(JSON_LINES))
  found = documents(tmp_path / "*")
  assert [d.name for d in found] == [f"{name}:{n}" for n in range(1, 31)]
  assert [d.content.decode() for d in found] == [x["text"] for x in LINES]


@pytest.mark.parametrize(
  ("name", "compress"),
  [
    ("a.txt", bytes),
    ("a.txt.gz", gzip.compress),
    ("a.txt.zst", zstandard.ZstdCompressor().compress),
  ],
)
def test_a_plain_file_is_one_document(name, compress, tmp_path):
  (tmp_path / name).write_bytes(compress(JSON_LINES))
  assert documents(tmp_path / "*") == [Document(name, JSON_LINES)]


def test_a_single_file_of_lines_is_divided(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_bytes(JSON_LINES)
  loaded = sources.load_corpus(
    "text_files", glob=str(path), validation_fraction=0.3
  )
  assert loaded.num_files == 30
  held_out = [
    n for n in range(1, 31) if corpus.is_held_out(f"a.jsonl:{n}", 0.3)
  ]
  assert held_out
  in_order = sorted(held_out, key=str)
  text = "\n".join(LINES[n - 1]["text"] for n in in_order)
  assert loaded.validation.tobytes().decode() == text


def test_the_field_of_the_text_has_a_name(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text(json.dumps({"body": "x", "text": "y"}))
  (found,) = documents(path, text_field="body")
  assert found.content == b"x"


@pytest.mark.parametrize(
  ("content", "said"),
  [
    (b'{"text": "a"}\n{"text', "line 2 is no JSON"),
    (b'{"text": "a"}\n[1]\n', "line 2 has no text in the field 'text'"),
    (b'{"text": 3}\n', "line 1 has no text"),
  ],
)
def test_a_damaged_line_is_named(content, said, tmp_path):
  (tmp_path / "a.jsonl").write_bytes(content)
  with pytest.raises(ValueError, match="a.jsonl, ") as error:
    documents(tmp_path / "*.jsonl")
  assert said in str(error.value) and "\n" not in str(error.value)


def test_a_cut_archive_is_one_line(tmp_path):
  (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(JSON_LINES)[:-20])
  with pytest.raises(ValueError, match=r"cannot read .*a.jsonl.gz \(") as error:
    documents(tmp_path / "*")
  assert "\n" not in str(error.value)


def test_damage_can_be_told_and_left_out(tmp_path):
  (tmp_path / "a.jsonl").write_bytes(JSON_LINES + b"{no json\n" + JSON_LINES)
  (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(JSON_LINES)[:-20])
  told = []
  found = documents(tmp_path / "*", on_damage=told.append)
  assert len([d for d in found if d.name.startswith("a.")]) == 60
  assert "a.jsonl, line 32 is no JSON" in str(told[0])
  assert "cannot read" in str(told[1]) and len(told) == 2


NUMBERS = [Document(str(n), b"") for n in range(100)]


def numbers(*options):
  return [int(document.name) for document in sampled(NUMBERS, *options)]


def test_a_buffer_shuffles_as_far_as_it_reaches():
  assert numbers() == list(range(100))
  drawn = numbers(10, 0, 3)
  assert sorted(drawn) == list(range(100)) != drawn
  # The k-th document is drawn from the first k + 11.
  assert all(n <= place + 10 for place, n in enumerate(drawn))
  assert drawn == numbers(10, 0, 3) != numbers(10, 0, 4)
  assert numbers(10, 7, 3) == drawn[:7]


def test_no_more_is_read_than_is_taken():
  endless = iter(lambda: Document("again", b""), None)
  assert len(list(sampled(endless, 5, 20))) == 20


def test_sets_have_names_and_globs():
  assert named_globs("") == {}
  assert named_globs("a = x/*.txt; b=y=z;") == {"a": "x/*.txt", "b": "y=z"}


@pytest.mark.parametrize("sets", ["a", "a=", "=b", "a=b;a=c"])
def test_sets_of_another_form_are_refused(sets):
  with pytest.raises(ValueError, match="different names with a glob each"):
    named_globs(sets)
