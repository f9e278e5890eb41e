"""Opens a file whose content may be compressed, under whatever name.

The first bytes of a file say what it is, because names are often wrong: a .txt
may hold gzip, and the ending of a copy may be in capitals. Of a file that is
cut reading raises an EOFError. What is compressed or packed in a way that is
not read here is refused, because its bytes would be trained on as if they were
text.
"""

import bz2
import gzip
import io
import lzma
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from dilocox_jax.checks import extra_package, require

_CHUNK = 2**14  # Bytes of a .zst that are unpacked together.
_HEAD = 512  # Bytes that tell one format from another.
# How files begin that are packed in a way that is not read, by their ending.
_UNREAD = {
  ".zip": rb"PK(\x03\x04|\x05\x06)",
  ".tar": rb"(?s).{257}ustar",
  ".7z": rb"7z\xbc\xaf\x27\x1c",
  ".rar": rb"Rar!\x1a",
  ".lz4": rb"\x04\x22\x4d\x18",
  ".parquet": rb"PAR1\x15",
  ".arrow": rb"ARROW1\0",
  ".pdf": rb"%PDF-\d",
}
_DATA_SETS = (".parquet", ".arrow")


def open_unpacked(path: pathlib.Path) -> io.BufferedReader:
  """Opens a file for reading what it holds unpacked.

  Args:
    path: Plain, or compressed by gzip, bzip2, xz or zstd.

  Raises:
    ValueError: If it is packed in another way, or zstd is not installed.
    OSError: If it cannot be opened.
  """
  ending = path.suffix.lower()
  with path.open("rb") as file:
    head = file.read(_HEAD)
  _refuse(path, ending, head)
  by_content = [e for e, (begin, _) in _PACKED.items() if re.match(begin, head)]
  if not by_content and ending not in _PACKED:
    return path.open("rb")
  require(
    bool(head), f"{path} is empty, which no {ending} file is: copy it again"
  )
  _, open_packed = _PACKED[by_content[0] if by_content else ending]
  file = io.BufferedReader(open_packed(path))
  try:
    _refuse(path, "", file.peek(_HEAD)[:_HEAD])
  except BaseException:
    file.close()
    raise
  return file


def plain_suffix(path: pathlib.Path) -> str:
  """Returns the ending of a file without that of its compression."""
  is_packed = path.suffix.lower() in _PACKED
  return (pathlib.Path(path.stem) if is_packed else path).suffix.lower()


def _refuse(path: pathlib.Path, ending: str, head: bytes) -> None:
  for kind, begin in _UNREAD.items():
    if ending == kind or re.match(begin, head):
      remedy = "unpack it, or narrow the glob"
      if kind in _DATA_SETS:
        remedy = "read it with data.source=huggingface"
      raise ValueError(f"{path} is a {kind} file, which is not read: {remedy}")


class _Unzstd(io.RawIOBase):
  """Reads a .zst, and raises EOFError where one that is cut ends.

  The reader of the package takes a file that is cut for one that is shorter.
  """

  def __init__(self, path: pathlib.Path):
    library = extra_package("zstandard", str(path))
    self._file = path.open("rb")
    self._chunks = _unzstd(library, self._file)
    self._left = memoryview(b"")

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    self._left = self._left or memoryview(next(self._chunks, b""))
    count = min(len(buffer), len(self._left))
    buffer[:count] = self._left[:count]
    self._left = self._left[count:]
    return count

  def close(self) -> None:
    self._file.close()
    super().close()


def _unzstd(library: Any, file: io.BufferedReader) -> Iterator[bytes]:
  frame = library.ZstdDecompressor().decompressobj()
  while packed := file.read(_CHUNK):
    while packed:
      if frame.eof:
        frame = library.ZstdDecompressor().decompressobj()
      try:
        plain = frame.decompress(packed)
      except library.ZstdError as error:
        raise OSError(str(error)) from error
      if plain:
        yield plain
      packed = frame.unused_data
  if not frame.eof:
    raise EOFError("it ends in the middle of a frame")


# How compressed files begin, and what opens them, by their ending.
_PACKED: dict[str, tuple[bytes, Callable[..., Any]]] = {
  ".gz": (rb"\x1f\x8b", gzip.open),
  ".bz2": (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", bz2.open),
  ".xz": (rb"\xfd7zXZ\0", lzma.open),
  ".lzma": (rb"(?s)\x5d\0\0.{2}\xff{8}", lzma.open),
  ".zst": (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", _Unzstd),
}
