import ast
import bz2
import gzip
import json
import lzma
import os

import pytest
import zstandard

from dilocox_jax.data import corpus, sources
from dilocox_jax.data.documents import (
  Document,
  matching_files,
  named_globs,
  read_documents,
  sampled,
  split_globs,
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
    ("a.NDJSON", bytes),
    ("a.json", bytes),
    ("a.json", lambda lines: json.dumps(LINES, indent=1).encode("utf-8-sig")),
    ("a.jsonl.gz", gzip.compress),
    ("a.JSONL.Bz2", bz2.compress),
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
  ("name", "content", "said"),
  [
    ("a.jsonl", b'{"text": "a"}\n{"text', ", line 2 is no JSON"),
    ("a.jsonl", b'{"text": "a"}\n[1]\n', "line 2 has no text in the field"),
    ("a.jsonl", b'{"text": 3}\n', ", line 1 has no text"),
    ("a.jsonl", b'{"text": ' + b"[" * 100_000, ", line 1 is no JSON (maximum"),
    ("a.jsonl", b'{"n": ' + b"9" * 5000 + b"}", ", line 1 is no JSON (Exceeds"),
    ("a.jsonl", b'{"text": "caf\xe9"}', ", line 1 is no JSON ('utf-8' codec"),
    ("a.jsonl", b'{"text": "\\ud83d"}', "line 1 has half of a surrogate pair"),
    ("a.jsonl", b'{"text": "\xed\xa0\x80"}', "half of a surrogate pair"),
    ("a.json", b'[{"text": "a"}, 3]', ", item 2 has no text"),
    ("a.json", b'[{"text": "a"}, ', "a.json is no JSON"),
    ("a.txt", "caf\xe9 x".encode("latin-1"), "byte 0xe9 in position 3"),
    ("a.txt", "caf\xe9 x".encode("utf-16"), "is no text in UTF-8"),
    ("a.txt.gz", gzip.compress(b"ab\xff", mtime=0), "is no text in UTF-8"),
    ("a.tar", b"", "is a .tar file, which is not read"),
  ],
)
def test_damage_is_named_and_can_be_left_out(name, content, said, tmp_path):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=name) as error:
    documents(tmp_path / "*")
  assert said in str(error.value) and "\n" not in str(error.value)
  told = []
  found = documents(tmp_path / "*", on_damage=told.append)
  assert {d.content for d in found} <= {b"a"}
  assert str(told[0]) == str(error.value) and len(told) == 1


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
def test_a_cut_archive_is_one_line(kind, tmp_path):
  compress = {
    **{"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress},
    "zst": zstandard.ZstdCompressor().compress,
  }[kind]
  path = tmp_path / f"a.jsonl.{kind}"
  for content in (compress(JSON_LINES)[:-6], b"\0" * 99, b""):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"a.jsonl.{kind} ") as error:
      documents(tmp_path / "*")
    assert "\n" not in str(error.value)
    told = []
    documents(tmp_path / "*", on_damage=told.append)
    assert len(told) == 1


@pytest.mark.parametrize(
  "text", ["\ufeffa", "a\0b", "\r\n a \t", "\U0001f600", "a<|endoftext|>b"]
)
def test_whatever_is_utf_8_stays_as_it_is(text, tmp_path):
  (tmp_path / "a.txt").write_bytes(text.encode())
  (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
  assert [d.content.decode() for d in documents(tmp_path / "*")] == [text] * 2


NAMES = ["a[1].txt", "b[x]/a.txt", "a;b.txt", "*", "[!a].txt"]


def test_a_path_that_exists_is_taken_as_it_is(tmp_path):
  names = [*NAMES, os.fsdecode(b"\xe9")]
  paths = [tmp_path / name for name in names]
  for path in paths:
    path.parent.mkdir(exist_ok=True)
    path.write_text("text")
  assert [matching_files(str(path))[0][1] for path in paths] == paths
  assert [n for n, _ in matching_files(f"{tmp_path}/b[x]/*.txt")] == ["a.txt"]
  texts = [str(path) for path in paths]
  assert split_globs(" ;\t".join([*texts, ""])) == texts
  assert split_globs("x/*; y") == ["x/*", "y"] and split_globs("") == [""]
  sets = ";".join(f"{n} = {text}" for n, text in enumerate(texts))
  assert list(named_globs(sets).values()) == texts


def test_a_folder_is_answered_with_a_pattern_of_its_files(tmp_path):
  (tmp_path / "[a]").mkdir()
  (tmp_path / "[a]/b.txt").write_text("text")
  for pattern in (tmp_path, f"{tmp_path}/*", f"{tmp_path}/[a]"):
    with pytest.raises(ValueError, match="matches folders") as error:
      matching_files(str(pattern))
    example = str(error.value).rpartition("example ")[2]
    assert len(matching_files(ast.literal_eval(example))) == 1


def test_damage_can_be_told_and_left_out(tmp_path):
  (tmp_path / "a.jsonl").write_bytes(JSON_LINES + b"{no json\n" + JSON_LINES)
  (tmp_path / "b.jsonl.gz").write_bytes(
    gzip.compress(JSON_LINES, mtime=0)[:-20]
  )
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
