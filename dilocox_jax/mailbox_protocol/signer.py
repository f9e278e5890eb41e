"""Signs objects, so that only replicas with the secret can write them.

A signed object has message authentication codes (HMAC-SHA256), here called
*tags*. They depend on the run, the path and the content. So an object that was
changed, cut, renamed or taken from another run counts as missing. There are
three formats.

In the first format, e.g. of a share, the *content* of an object is raw bytes,
in blocks of 1 MiB:

    tag of the object      32 bytes, over the tags of all blocks
    tags of the blocks     32 bytes a block
    content                block 0, block 1, ...; the last one may be shorter

The key of these tags is derived from the secret, the run, the path and the
number of bytes of the content. The tag of a block also depends on the block's
number. A range of the content can be verified without the other blocks
(`ranges.py`).

The second format is for messages that are cut into slices. The object has a
*section* for each slice. Each section can be verified without the others:

    digest    32 bytes, over the hashes of all sections
    seal      32 bytes, over the digest, the section's number and its hash
    content   of the section

The third format, e.g. of a list of messages, is JSON that anybody can read:
`{"mac":"<64 hexadecimal digits>","is":{...}}`.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from dilocox_jax.mailbox_protocol.buffers import Buffer, num_bytes_of
from dilocox_jax.threads import in_thread

TAG_BYTES = hashlib.sha256().digest_size
BLOCK_BYTES = 2**20
# Largest number of bytes of a JSON object, except for the index of a snapshot.
JSON_BYTES = 2**20
# The same for an index. It has about 30 bytes for each leaf, so this is enough
# for 500,000 leaves.
INDEX_BYTES = 2**24
# With fewer blocks for each thread, starting the threads takes longer than they
# save.
_LEAST_BLOCKS_A_THREAD = 8
_MOST_THREADS = 8
# The input of a tag begins with a number of 8 bytes. For a block or a section
# it is its number. For the tag over the tags of all blocks, or over the hashes
# of all sections, it is this number.
_ALL_BLOCKS = 2**64 - 1
# For the seal of a section it is this number plus the number of the section.
_FIRST_SEAL = 2**63
SECTION_HEAD_BYTES = 2 * TAG_BYTES  # Bytes before the content of a section.
_KEY_OF_SECTIONS = b"sections"
# A key must not equal the tag of some JSON. JSON begins with "{".
_KEY_OF_BLOCKS = b"blocks"
# The text of signed JSON before the tag, between tag and content, and after the
# content.
_BEFORE = b'{"mac":"'
_BETWEEN = b'","is":'
_AFTER = b"}\n"


def num_blocks(num_bytes: int) -> int:
  """Returns the number of blocks of 1 MiB in `num_bytes` bytes, at least 1."""
  return max(1, -(-num_bytes // BLOCK_BYTES))


def head_bytes(num_bytes: int) -> int:
  """Returns how many bytes a signed object has before its content.

  They are authentication codes of the object and of each block of 1 MiB. The
  content has `num_bytes` bytes.
  """
  return TAG_BYTES * (1 + num_blocks(num_bytes))


def signed_bytes(num_bytes: int) -> int:
  """Returns the size in bytes of a signed object.

  It has authentication codes, and then `num_bytes` bytes of content.
  """
  return head_bytes(num_bytes) + num_bytes


def content_bytes(num_signed: int) -> int:
  """Returns the size in bytes of a signed object's content.

  `num_signed` is the size of the object. So the function inverts
  `signed_bytes`. If no signed object can have this size, the result is
  negative, or `signed_bytes` of the result is not `num_signed`.
  """
  without_tag = max(num_signed - TAG_BYTES, 0)
  blocks = max(1, -(-without_tag // (BLOCK_BYTES + TAG_BYTES)))
  return without_tag - TAG_BYTES * blocks


class Signer:
  """Signs and verifies the objects of one run."""

  def __init__(self, secret: bytes, run: str):
    """Keeps the secret and the identifier of the run.

    Args:
      secret: The secret that all replicas of the run share.
      run: Identifier of the run, unlike that of any other run; "" for
        `run.json`, which says what the identifier is.
    """
    self._secret = secret
    self._run = run

  def sign(self, path: str, *content: Buffer) -> list[Buffer]:
    """Returns the signed object to write at a path.

    Args:
      path: Path of the object.
      *content: The parts of the content, which follow each other. They are not
        copied.

    Returns:
      The authentication codes, and then the parts of the content.
    """
    key = self._key(path, num_bytes_of(list(content)))
    tags = _block_tags(key, content)
    return [_tag(key, _ALL_BLOCKS, [tags]) + tags, *content]

  def verify(self, path: str, data: Buffer | None) -> memoryview | None:
    """Verifies an object that `sign` made, and returns its content.

    Args:
      path: Path of the object.
      data: The bytes that were read there; None: the object is missing.

    Returns:
      The content, without a copy; None if the object is missing or not signed
      for this run and path.
    """
    if data is None:
      return None
    num_bytes = content_bytes(len(data))
    if num_bytes < 0 or signed_bytes(num_bytes) != len(data):
      return None
    start = head_bytes(num_bytes)
    content = memoryview(data)[start:]
    tags = self.block_tags(path, data[:start], num_bytes)
    if tags is None:
      return None
    expected = _block_tags(self._key(path, num_bytes), [content])
    return content if hmac.compare_digest(tags, expected) else None

  def block_tags(
    self, path: str, head: Buffer | None, num_bytes: int
  ) -> bytes | None:
    """Verifies the head of a signed object, and returns its blocks' tags.

    A tag is an authentication code. The head is all tags before the content.

    Args:
      path: Path of the object.
      head: The first `head_bytes(num_bytes)` bytes of the object; None: the
        object is missing.
      num_bytes: Bytes of the object's content.

    Returns:
      The tags of the blocks in order, 32 bytes a block. None if the head is
      missing, has another length, or is not signed for this run, path and
      `num_bytes`.
    """
    if head is None or len(head) != head_bytes(num_bytes):
      return None
    tags = bytes(head[TAG_BYTES:])
    expected = _tag(self._key(path, num_bytes), _ALL_BLOCKS, [tags])
    is_ours = hmac.compare_digest(bytes(head[:TAG_BYTES]), expected)
    return tags if is_ours else None

  def verify_blocks(
    self, path: str, blocks: Buffer, first: int, tags: bytes, num_bytes: int
  ) -> bool:
    """Returns whether consecutive blocks of an object match their tags.

    A tag is the authentication code of a block of 1 MiB.

    Args:
      path: Path of the object.
      blocks: The bytes of the blocks. Only the object's last block may be
        shorter.
      first: Number, within the object, of the first block in `blocks`.
      tags: The tags of all blocks of the object (`block_tags`).
      num_bytes: Bytes of the object's content.
    """
    key = self._key(path, num_bytes)
    actual = _block_tags(key, [blocks], first)
    start = first * TAG_BYTES
    return hmac.compare_digest(tags[start : start + len(actual)], actual)

  def sign_sections(
    self, path: str, sections: Sequence[Sequence[Buffer]]
  ) -> list[Buffer]:
    """Returns an object whose sections can each be verified alone.

    Args:
      path: Path of the object.
      sections: For each section, the buffers that are its content, one after
        the other. They are not copied.

    Returns:
      The buffers of the object: for each section, the object's digest, a seal
      (authentication code) and the content.
    """
    key = self._key_of_sections(path, len(sections))
    size = sum(num_bytes_of(list(section)) for section in sections)
    # Each section is hashed with its number. For few bytes, threads cost more
    # time than they save.
    if size < _LEAST_BLOCKS_A_THREAD * BLOCK_BYTES:
      hashes = [_tag(key, *each) for each in enumerate(sections)]
    else:
      futures = [in_thread(_tag, key, *each) for each in enumerate(sections)]
      hashes = [future.result() for future in futures]
    digest = _tag(key, _ALL_BLOCKS, hashes)
    parts: list[Buffer] = []
    for number, section in enumerate(sections):
      seal = _tag(key, _FIRST_SEAL + number, [digest, hashes[number]])
      parts += [digest + seal, *section]
    return parts

  def verify_section(
    self, path: str, number: int, num_sections: int, data: Buffer | None
  ) -> memoryview | None:
    """Verifies one section of an object that `sign_sections` made.

    Args:
      path: Path of the object.
      number: Number of the section, from 0.
      num_sections: Number of sections of the object.
      data: The bytes of the section, with digest and seal; None: it is missing.

    Returns:
      The content of the section, without a copy. None if the section is
      missing, or not signed for this run, path, number and `num_sections`.
    """
    if data is None or len(data) < SECTION_HEAD_BYTES:
      return None
    view = memoryview(data)
    digest = view[:TAG_BYTES]
    seal = view[TAG_BYTES:SECTION_HEAD_BYTES]
    content = view[SECTION_HEAD_BYTES:]
    key = self._key_of_sections(path, num_sections)
    content_hash = _tag(key, number, [content])
    expected = _tag(key, _FIRST_SEAL + number, [digest, content_hash])
    if not hmac.compare_digest(seal, expected):
      return None
    return content

  def sign_json(self, path: str, value: dict[str, Any]) -> bytes:
    """Returns an object of signed JSON, to write at a path.

    Raises:
      ValueError: If a value is NaN or infinite.
    """
    content = json.dumps(value, sort_keys=True, allow_nan=False).encode()
    tag = self._tag_of_path(path, content).hex().encode()
    return _BEFORE + tag + _BETWEEN + content + _AFTER

  def verify_json(
    self, path: str, data: Buffer | None
  ) -> dict[str, Any] | None:
    """Verifies an object that `sign_json` made, and returns its value.

    Args:
      path: Path of the object.
      data: The bytes that were read there; None: the object is missing.

    Returns:
      The value; None if the object is missing, larger than 16 MiB
      (`INDEX_BYTES`), or not signed for this run and path.
    """
    if data is None or len(data) > INDEX_BYTES:
      return None
    text = bytes(data)
    if not text.endswith(_AFTER):
      return None
    start = len(_BEFORE) + 2 * TAG_BYTES
    content = text[start + len(_BETWEEN) : -len(_AFTER)]
    tag = self._tag_of_path(path, content).hex().encode()
    expected = _BEFORE + tag + _BETWEEN
    if not hmac.compare_digest(text[: len(expected)], expected):
      return None
    return json.loads(content)

  def _key(self, path: str, num_bytes: int) -> bytes:
    """Returns the key for the codes of an object's blocks, 32 bytes.

    `num_bytes` is the size of the object's content.
    """
    length = num_bytes.to_bytes(8, "little")
    return self._tag_of_path(path, _KEY_OF_BLOCKS + length)

  def _key_of_sections(self, path: str, num_sections: int) -> bytes:
    """Returns the key for the codes of an object's sections, 32 bytes."""
    number = num_sections.to_bytes(8, "little")
    return self._tag_of_path(path, _KEY_OF_SECTIONS + number)

  def _tag_of_path(self, path: str, content: bytes) -> bytes:
    """Returns the HMAC of the run, a path and some bytes, 32 bytes."""
    digest = hmac.new(self._secret, digestmod="sha256")
    for part in (self._run.encode(), path.encode()):
      digest.update(len(part).to_bytes(8, "little") + part)
    digest.update(content)
    return digest.digest()


def _tag(key: bytes, number: int, parts: Sequence[Buffer]) -> bytes:
  """Returns the HMAC of a number below 2^64 and some buffers, 32 bytes."""
  digest = hmac.new(key, number.to_bytes(8, "little"), "sha256")
  for part in parts:
    digest.update(part)
  return digest.digest()


def _blocks(content: Sequence[Buffer]) -> Iterator[list[Buffer]]:
  """Divides a content into blocks of 1 MiB, without a copy.

  Yields:
    For each block, the pieces of buffers that it consists of. The last block
    may be shorter. An empty content has no block here.
  """
  block: list[Buffer] = []
  missing = BLOCK_BYTES
  for part in content:
    view = memoryview(part)
    while len(view):
      piece = view[:missing]
      block.append(piece)
      missing -= len(piece)
      view = view[len(piece) :]
      if not missing:
        yield block
        block = []
        missing = BLOCK_BYTES
  if block:
    yield block


def _block_tags(key: bytes, content: Sequence[Buffer], first: int = 0) -> bytes:
  """Returns the authentication codes of blocks of 1 MiB, 32 bytes a block.

  `first` is the number, within the object, of the first block in `content`.
  """
  # An empty content has one empty block.
  blocks = list(_blocks(content)) or [[]]
  num_threads = min(
    len(blocks) // _LEAST_BLOCKS_A_THREAD, os.cpu_count() or 1, _MOST_THREADS
  )
  blocks_per_thread = -(-len(blocks) // max(num_threads, 1))

  def tags_from(start: int) -> bytes:
    return b"".join(
      _tag(key, first + number, blocks[number])
      for number in range(start, min(start + blocks_per_thread, len(blocks)))
    )

  # Hashing a large buffer releases the interpreter's lock.
  others = [
    in_thread(tags_from, start)
    for start in range(blocks_per_thread, len(blocks), blocks_per_thread)
  ]
  return b"".join([tags_from(0), *(other.result() for other in others)])
