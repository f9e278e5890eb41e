"""Documents in files: plain or lines of JSON, compressed or not."""

import ast
import bz2
import glob
import gzip
import io
import json
import lzma
import os
import random
import tarfile
import zipfile

import pytest
from backports import zstd

from dilocox_jax.data.documents import (
  Document,
  matching_files,
  read_globs,
  split_globs,
)
from tests import damage

LINES = [{"text": f"document {n} ü\n", "other": n} for n in range(30)]
JSON_LINES = "\n".join(map(json.dumps, LINES)).encode() + b"\n\n"
# Longer than what is unpacked together, and hard to compress.
TEXT = "".join(random.Random(0).choices("abcdefgh \n", k=200_000)).encode()
PACKERS = {
  ".gz": gzip.compress,
  ".bz2": bz2.compress,
  ".xz": lzma.compress,
  ".zst": zstd.compress,
}


def documents(globs, **options):
  found = read_globs(str(globs), **options)
  return [document for _, read in found for document in read]


def refused(globs, said):
  with pytest.raises(ValueError) as error:
    documents(globs)
  assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", PACKERS)
def test_what_is_compressed_is_unpacked_whole(kind, tmp_path):
  packed = PACKERS[kind](TEXT)
  for name in (f"a.txt{kind}", f"a.TXT{kind.upper()}"):
    (tmp_path / name).write_bytes(packed * 2)
    assert [d.content for d in documents(tmp_path / name)] == [TEXT * 2]
    for content in (packed[: len(packed) // 2], packed[:-2], b"\0" * 99):
      (tmp_path / name).write_bytes(content)
      refused(tmp_path / name, f"{name} (")
  (tmp_path / f"a.JSONL{kind.upper()}").write_bytes(PACKERS[kind](JSON_LINES))
  assert len(documents(tmp_path / "*.J*")) == len(LINES)


def archive(kind):
  target = io.BytesIO()
  if kind == "zip":
    with zipfile.ZipFile(target, "w") as file:  # Nothing is compressed in it.
      file.writestr("a.txt", "text")
  else:
    with tarfile.open(fileobj=target, mode="w") as file:
      file.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
  return target.getvalue()


@pytest.mark.parametrize(
  ("name", "content", "said"),
  [
    ("a.txt", archive("tar"), "it has zero bytes"),
    ("a.tar.gz", gzip.compress(archive("tar"), mtime=0), "it has zero bytes"),
    ("a.zip", archive("zip"), "is no text in UTF-8"),
    ("a.txt", gzip.compress(b"text", mtime=0), "is no text in UTF-8"),
    ("a.txt", "caf\xe9 x".encode("latin-1"), "byte 0xe9 in position 3"),
    ("a.jsonl", b'{"text": "a"}\n{"text', ", line 2 is no JSON"),
    ("a.jsonl", b'{"text": "a"}\n\n[1]\n', ", line 3 is no JSON object"),
    ("a.jsonl", b'{"text": 3}\n', ", line 1 has no text in the field"),
    ("a.jsonl", b'{"text": ' + b"[" * 100_000, ", line 1 is no JSON"),
    ("a.jsonl", b'{"text": "caf\xe9"}', ", line 1 is no JSON"),
    ("a.jsonl", b'{"text": "\\ud83d"}', "half of a surrogate pair"),
    ("a.jsonl", b'{"text": "a\\u0000b"}', ", line 1 is no text in UTF-8 (it h"),
    *((f"a.txt{kind}", b"", "it is empty, as no comp") for kind in PACKERS),
    ("a\nb.txt", b"\xff", r"a\nb.txt is no text in UTF-8"),
    ("a\x1b[2J.txt.gz", b"\xff", r"a\x1b[2J.txt.gz ("),
  ],
)
def test_damage_is_one_line_that_names_its_place(name, content, said, tmp_path):
  (tmp_path / name).write_bytes(content)
  refused(tmp_path / "*", said)


@pytest.mark.parametrize("kind", ["", *PACKERS])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_damaged_text_is_one_line_or_read(name, kind, tmp_path):
  """What is compressed says so, if it has a check sum, as all but zstd have."""
  path = tmp_path / f"{name}{kind}"
  content = PACKERS.get(kind, bytes)(JSON_LINES[:600])
  path.write_bytes(content)
  whole = documents(path) if name == "a.txt" else []
  for what, damaged in damage.in_bytes(content):
    path.write_bytes(damaged)
    found = damage.outcome(what, lambda: documents(path))
    if found and whole and kind in (".bz2", ".xz") and what != "twice":
      assert found == whole, what


def test_what_only_python_reads_may_stand_beside_a_text(tmp_path):
  line = b'{"score": NaN, "id": 1, "id": 2, "text": "a"}\n'
  (tmp_path / "a.jsonl").write_bytes(line)
  assert [each.content for each in documents(tmp_path / "*")] == [b"a"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.NDJSON", "a.json"])
def test_every_line_is_a_document_and_a_plain_file_is_one(name, tmp_path):
  (tmp_path / name).write_bytes(JSON_LINES)
  (tmp_path / "b.txt").write_bytes(JSON_LINES)
  *found, plain = documents(tmp_path / "*")
  assert [d.name for d in found] == [f"{name}:{n}" for n in range(1, 31)]
  assert [d.content.decode() for d in found] == [x["text"] for x in LINES]
  assert plain == Document("b.txt", JSON_LINES)
  (tmp_path / name).write_text(json.dumps({"body": "x", "text": "y"}))
  assert documents(tmp_path / name, text_field="body")[0].content == b"x"


def test_globs_are_parts_and_names_are_told_apart(tmp_path):
  for name in "ab":
    (tmp_path / name).mkdir()
    (tmp_path / name / "1.txt").write_text(name)
  found = documents(f" {tmp_path}/a/* ;;\t{tmp_path}/b/*")
  assert found == [Document("1.txt", b"a"), Document("1/1.txt", b"b", 1)]
  assert split_globs("") == [""]
  (tmp_path / "a;b.txt").write_text("x")
  assert split_globs(f"{tmp_path}/a;b.txt;c") == [f"{tmp_path}/a;b.txt", "c"]
  refused(f"{tmp_path}/a/*;{tmp_path}/none/*", "no file matches the glob")


def test_a_path_that_exists_is_taken_as_it_is(tmp_path):
  names = ("a[1].txt", "b[x]/a.txt", "b[x]/c/d.txt", "*", "[!a].txt")
  paths = [tmp_path / name for name in (*names, os.fsdecode(b"\xe9"))]
  for path in paths:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("text")
  assert [matching_files(str(path))[0][1] for path in paths] == paths
  found = [n for n, _ in matching_files(f"{tmp_path}/b[x]/**/*.txt")]
  assert found == ["a.txt", "c/d.txt"]  # Names begin after what is given.


def test_a_folder_is_answered_with_a_pattern_of_its_files(tmp_path):
  (tmp_path / "[a]").mkdir()
  (tmp_path / "[a]/b.txt").write_text("text")
  for pattern in (tmp_path, f"{tmp_path}/*", f"{tmp_path}/[a]"):
    with pytest.raises(ValueError, match="matches folders") as error:
      matching_files(str(pattern))
    example = str(error.value).rpartition("example ")[2]
    assert len(matching_files(ast.literal_eval(example))) == 1


def named(pattern):
  return [name for name, _ in matching_files(str(pattern))]


def tree(root, *paths):
  for path in paths:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"text of {path}")


def test_a_folder_that_contains_itself_gives_its_files_once(tmp_path):
  texts = tmp_path / "texts"
  tree(texts, "a.txt", "b/c.txt", "b/d/e.txt")
  for number in range(3):  # With one alone `glob` would find 41 times as many.
    (texts / f"a_link_{number}").symlink_to(".")
    (texts / "b" / f"up_{number}").symlink_to("..")
  (texts / "b" / "loop").symlink_to("loop")
  expected = ["a.txt", "b/c.txt", "b/d/e.txt"]
  assert named(texts / "**/*.txt") == expected
  assert named(texts / "**") == expected
  assert named(texts / "**/**/*.txt") == expected
  assert named(texts / "**/c.txt") == ["b/c.txt"]
  assert [d.content for d in documents(texts / "**/*.txt")] == [
    f"text of {name}".encode() for name in expected
  ]
  (tmp_path / "own_name").symlink_to("texts")
  assert named(tmp_path / "own_name/**/*.txt") == expected


def test_links_to_files_and_folders_elsewhere_are_followed_once(tmp_path):
  texts = tmp_path / "texts"
  blobs = tmp_path / "blobs"
  tree(tmp_path, "blobs/1", "blobs/2", "other/x.txt", "texts/z.txt")
  # As in a snapshot of Hugging Face: all names lead elsewhere.
  (texts / "first.txt").symlink_to(blobs / "1")
  (texts / "second.txt").symlink_to(blobs / "2")
  (texts / "second_again.txt").symlink_to(blobs / "2")
  # A file has its own name, also if that of a link comes before.
  (texts / "a.txt").symlink_to("z.txt")
  (texts / "other").symlink_to(tmp_path / "other")
  (texts / "other_again").symlink_to(tmp_path / "other")
  os.link(texts / "z.txt", texts / "zz.txt")
  (texts / "nothing.txt").symlink_to("nowhere")
  expected = ["first.txt", "other/x.txt", "second.txt", "z.txt"]
  assert named(texts / "**/*.txt") == expected
  assert named(texts / "*/*.txt") == ["other/x.txt"]
  assert named(texts / "a.txt") == ["a.txt"]


def test_patterns_match_what_glob_matches(tmp_path):
  tree(
    tmp_path,
    *("a.txt", "b.md", ".hidden.txt", "f/a.txt", "f/g/a.txt", "f/g/b.txt"),
    *(".h/a.txt", "f/.h/a.txt", "k[1]/a.txt", "f2/g/a.txt"),
  )
  os.mkfifo(tmp_path / "pipe.txt")
  for pattern in (
    *("*.txt", "**/*.txt", "**", "f*/**/a.txt", "f/**/g/*", "*/g/*.txt"),
    *("**/g/**", "**/g/**/*.txt", ".hidden*", ".h/*", "f/.h/*", "[f]/*"),
    *("k[[]1]/*.txt", "f**/a.txt", "**/f", "?.*"),
  ):
    found = glob.glob(pattern, root_dir=tmp_path, recursive=True)
    files = {each for each in found if os.path.isfile(tmp_path / each)}
    if not files:
      refused(tmp_path / pattern, "matches folders, and no file")
      continue
    # Names are relative to the folder before the first wildcard.
    whole = [str(path) for _, path in matching_files(str(tmp_path / pattern))]
    assert whole == sorted(f"{tmp_path}/{each}" for each in files)
