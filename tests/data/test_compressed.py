import bz2
import gzip
import io
import lzma
import random
import tarfile
import zipfile

import pytest
import zstandard

from dilocox_jax.data.compressed import open_unpacked, plain_suffix

# Longer than what is unpacked together, and hard to compress.
TEXT = "".join(random.Random(0).choices("abcdefgh \n", k=200_000)).encode()


def lzma_alone(content):
  return lzma.compress(content, lzma.FORMAT_ALONE)


PACKERS = {
  ".gz": gzip.compress,
  ".bz2": bz2.compress,
  ".xz": lzma.compress,
  ".lzma": lzma_alone,
  ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("kind", PACKERS)
def test_what_is_compressed_is_unpacked_whole(kind, tmp_path):
  packed = PACKERS[kind](TEXT)
  twice = packed + packed if kind != ".lzma" else packed
  path = tmp_path / "a"
  for name in (f"a.txt{kind}", f"a.TXT{kind.upper()}", "a.txt", "a"):
    path = tmp_path / name
    path.write_bytes(twice)
    with open_unpacked(path) as file:
      assert file.read() == TEXT * (len(twice) // len(packed))
  assert plain_suffix(tmp_path / f"a.JSONL{kind.upper()}") == ".jsonl"


@pytest.mark.parametrize("kind", PACKERS)
def test_what_is_cut_or_no_such_thing_is_an_error(kind, tmp_path):
  packed = PACKERS[kind](TEXT)
  path = tmp_path / f"a{kind}"
  for content in (packed[: len(packed) // 2], packed[:-2], b"", b"no such"):
    path.write_bytes(content)
    with (
      pytest.raises((OSError, EOFError, ValueError, lzma.LZMAError)),
      open_unpacked(path) as file,
    ):
      file.read()


def tar(kind):
  target = io.BytesIO()
  with tarfile.open(fileobj=target, mode="w") as file:
    member = tarfile.TarInfo("a.txt")
    member.size = len(TEXT)
    file.addfile(member, io.BytesIO(TEXT))
  return PACKERS.get(kind, bytes)(target.getvalue())


def zipped():
  target = io.BytesIO()
  with zipfile.ZipFile(target, "w") as file:  # Nothing is compressed in it.
    file.writestr("a.txt", TEXT)
  return target.getvalue()


@pytest.mark.parametrize(
  ("name", "content", "said"),
  [
    *(("a.txt", tar(kind), "is a .tar file") for kind in ("", *PACKERS)),
    ("a.txt", zipped(), "is a .zip file"),
    ("a.ZIP", b"anything", "is a .zip file"),
    ("a.txt", b"\x04\x22\x4d\x18 text", "is a .lz4 file"),
    ("a.7z", b"", "is a .7z file"),
    ("a.txt", b"PAR1\x15\x04", "read it with data.source=huggingface"),
    ("a.Arrow", b"", "read it with data.source=huggingface"),
  ],
)
def test_what_is_packed_in_another_way_is_refused(
  name, content, said, tmp_path
):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=name) as error:
    open_unpacked(tmp_path / name)
  assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", [b"", b"PK is short", b"BZh1 as text", b"%P"])
def test_plain_text_stays_what_it_is(text, tmp_path):
  (tmp_path / "a.txt").write_bytes(text)
  with open_unpacked(tmp_path / "a.txt") as file:
    assert file.read() == text
