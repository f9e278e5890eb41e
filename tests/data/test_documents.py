"""Documents in files: plain or lines of JSON, compressed or not."""

import ast
import bz2
import gzip
import io
import json
import lzma
import os
import random
import tarfile
import zipfile

import pytest
import zstandard

from dilocox_jax.data.compressed import open_unpacked
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
# Longer than what is unpacked together, and hard to compress.
TEXT = "".join(random.Random(0).choices("abcdefgh \n", k=200_000)).encode()
PACKERS = {
  ".gz": gzip.compress,
  ".bz2": bz2.compress,
  ".xz": lzma.compress,
  ".lzma": lambda content: lzma.compress(content, lzma.FORMAT_ALONE),
  ".zst": zstandard.ZstdCompressor().compress,
}


def documents(pattern, **options):
  return [
    document
    for name, path in matching_files(str(pattern))
    for document in read_documents(name, path, **options)
  ]


def refused(pattern):
  """The one line that files are refused with, which skipping them tells."""
  with pytest.raises(ValueError) as error:
    documents(pattern)
  told = []
  found = documents(pattern, on_damage=told.append)
  assert str(told[0]) == str(error.value) and "\n" not in str(error.value)
  return str(error.value), found, told


@pytest.mark.parametrize("kind", PACKERS)
def test_what_is_compressed_is_unpacked_whole(kind, tmp_path):
  packed, times = PACKERS[kind](TEXT), 1 if kind == ".lzma" else 2
  for name in (f"a.txt{kind}", f"a.TXT{kind.upper()}", "a.txt", "a"):
    (tmp_path / name).write_bytes(packed * times)
    with open_unpacked(tmp_path / name) as file:
      assert file.read() == TEXT * times
  for path in tmp_path.iterdir():
    path.unlink()
  for content in (packed[: len(packed) // 2], packed[:-2], b"", b"\0" * 99):
    (tmp_path / f"a.TXT{kind.upper()}").write_bytes(content)
    said, _, told = refused(tmp_path / "*")
    assert f"a.TXT{kind.upper()} " in said and len(told) == 1
  (tmp_path / f"a.JSONL{kind.upper()}").write_bytes(PACKERS[kind](JSON_LINES))
  assert len(documents(tmp_path / "*.J*")) == len(LINES)


def archive(kind):
  target = io.BytesIO()
  if kind == "zip":
    with zipfile.ZipFile(target, "w") as file:  # Nothing is compressed in it.
      file.writestr("a.txt", TEXT)
    return target.getvalue()
  with tarfile.open(fileobj=target, mode="w") as file:
    member = tarfile.TarInfo("a.txt")
    member.size = len(TEXT)
    file.addfile(member, io.BytesIO(TEXT))
  return PACKERS.get(kind, bytes)(target.getvalue())


DAMAGE = [
  *(("a.txt", archive(kind), ".tar file") for kind in ("", *PACKERS)),
  ("a.txt", archive("zip"), ".zip file"),
  ("a.ZIP", b"anything", ".zip file"),
  ("a.txt", b"\x04\x22\x4d\x18 text", ".lz4 file"),
  ("a.7z", b"", ".7z file"),
  ("a.txt", b"PAR1\x15\x04", "data.source=huggingface"),
  ("a.Arrow", b"", "data.source=huggingface"),
  ("a.jsonl", b'{"text": "a"}\n{"text', ", line 2 is no JSON"),
  ("a.jsonl", b'{"text": "a"}\n[1]\n', "line 2 has no text in the field"),
  ("a.jsonl", b'{"text": 3}\n', ", line 1 has no text"),
  ("a.jsonl", b'{"text": ' + b"[" * 100_000, ", line 1 is no JSON (maximum"),
  ("a.jsonl", b'{"n": ' + b"9" * 5000 + b"}", ", line 1 is no JSON (Exceeds"),
  ("a.jsonl", b'{"text": "caf\xe9"}', ", line 1 is no JSON ('utf-8' codec"),
  ("a.jsonl", b'{"text": "\\ud83d"}', "half of a surrogate pair"),
  ("a.json", b'[{"text": "a"}, 3]', ", item 2 has no text"),
  ("a.json", b'[{"text": "a"}, ', "a.json is no JSON"),
  ("a.txt", "caf\xe9 x".encode("latin-1"), "byte 0xe9 in position 3"),
  ("a.txt.gz", gzip.compress(b"ab\xff", mtime=0), "is no text in UTF-8"),
]


@pytest.mark.parametrize(("name", "content", "said"), DAMAGE)
def test_damage_is_named_and_can_be_left_out(name, content, said, tmp_path):
  (tmp_path / name).write_bytes(content)
  text, found, told = refused(tmp_path / "*")
  assert name in text and said in text and len(told) == 1
  assert {document.content for document in found} <= {b"a"}


def test_what_is_not_damaged_is_read_on(tmp_path):
  (tmp_path / "a.jsonl").write_bytes(JSON_LINES + b"{no json\n" + JSON_LINES)
  (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(JSON_LINES)[:-20])
  _, found, told = refused(tmp_path / "*")
  assert len([d for d in found if d.name.startswith("a.")]) == 60
  assert "a.jsonl, line 32 " in str(told[0]) and "cannot read" in str(told[1])


def as_array(lines):
  return json.dumps(list(map(json.loads, lines.split(b"\n")[:-2]))).encode()


@pytest.mark.parametrize(
  ("name", "pack"),
  [
    *((f"a.{kind}", bytes) for kind in ("jsonl", "NDJSON", "json")),
    ("a.json", lambda lines: b"\xef\xbb\xbf \n" + as_array(lines)),
  ],
)
def test_every_line_is_a_document_and_a_plain_file_is_one(name, pack, tmp_path):
  (tmp_path / name).write_bytes(pack(JSON_LINES))
  (tmp_path / "b.txt").write_bytes(JSON_LINES)
  *found, plain = documents(tmp_path / "*")
  assert [d.name for d in found] == [f"{name}:{n}" for n in range(1, 31)]
  assert [d.content.decode() for d in found] == [x["text"] for x in LINES]
  assert plain == Document("b.txt", JSON_LINES)


def test_the_field_of_the_text_has_a_name(tmp_path):
  (tmp_path / "a.jsonl").write_text(json.dumps({"body": "x", "text": "y"}))
  assert documents(tmp_path / "*", text_field="body")[0].content == b"x"


@pytest.mark.parametrize(
  "text",
  ["\ufeffa", "a\0b", "\r\n a \t", "\U0001f600", "PK is short", "BZh1 x", "%P"],
)
def test_whatever_is_utf_8_stays_as_it_is(text, tmp_path):
  (tmp_path / "a.txt").write_bytes(text.encode())
  (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
  assert [d.content.decode() for d in documents(tmp_path / "*")] == [text] * 2


def test_a_path_that_exists_is_taken_as_it_is(tmp_path):
  names = ["a[1].txt", "b[x]/a.txt", "a;b.txt", "*", "[!a].txt"]
  paths = [tmp_path / name for name in (*names, os.fsdecode(b"\xe9"))]
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


def test_sets_have_names_and_globs():
  assert named_globs("") == {}
  assert named_globs("a = x/*.txt; b=y=z;") == {"a": "x/*.txt", "b": "y=z"}
  for sets in ("a", "a=", "=b", "a=b;a=c"):
    with pytest.raises(ValueError, match="different names with a glob each"):
      named_globs(sets)


def test_names_of_files_begin_after_the_last_folder_that_is_given(tmp_path):
  for name in ("a/1.txt", "a/b/2.txt"):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("text")
  found = [name for name, _ in matching_files(f"{tmp_path}/a/**/*.txt")]
  assert found == ["1.txt", "b/2.txt"]
  for pattern in ("", f"{tmp_path}/none/*.txt"):
    with pytest.raises(ValueError, match="no file matches.* give a pattern"):
      matching_files(pattern)


def test_a_folder_is_answered_with_a_pattern_of_its_files(tmp_path):
  (tmp_path / "[a]").mkdir()
  (tmp_path / "[a]/b.txt").write_text("text")
  for pattern in (tmp_path, f"{tmp_path}/*", f"{tmp_path}/[a]"):
    with pytest.raises(ValueError, match="matches folders") as error:
      matching_files(str(pattern))
    example = str(error.value).rpartition("example ")[2]
    assert len(matching_files(ast.literal_eval(example))) == 1


def test_a_buffer_shuffles_as_far_as_it_reaches():
  def numbers(*options):
    all_documents = (Document(str(n), b"") for n in range(100))
    return [int(document.name) for document in sampled(all_documents, *options)]

  assert numbers() == list(range(100))
  drawn = numbers(10, 0, 3)
  assert sorted(drawn) == list(range(100)) != drawn
  # The k-th document is drawn from the first k + 11.
  assert all(n <= place + 10 for place, n in enumerate(drawn))
  assert drawn == numbers(10, 0, 3) != numbers(10, 0, 4)
  assert numbers(10, 7, 3) == drawn[:7]
  endless = iter(lambda: Document("again", b""), None)
  assert len(list(sampled(endless, 5, 20))) == 20
