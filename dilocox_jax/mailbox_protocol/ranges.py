"""Reads a range of an object's content, and verifies it without the rest.

Example: a message has 100 MB, and one of eight replicas averages the second
eighth of each message. It asks for the tags (3.1 kB) and for the blocks that
hold the bytes 12,500,000 to 25,000,000. Both requests are made at the same
time. `signer.py` describes the format.
"""

from typing import Any

from dilocox_jax.mailbox_protocol.buffers import Buffer
from dilocox_jax.mailbox_protocol.signer import (
  BLOCK_BYTES,
  TAG_BYTES,
  Signer,
  head_bytes,
)


class SignedRanges:
  """Ranges of one signed object."""

  def __init__(
    self,
    store: Any,
    signer: Signer,
    path: str,
    num_bytes: int,
    digest: str = "",
  ):
    """Makes no request yet.

    Args:
      store: A `RetryingStore` store.
      signer: The signer of the run.
      path: Path of the object.
      num_bytes: Bytes of the object's content.
      digest: Tag of the object in hexadecimal digits, as a manifest lists it.
        Another object at the path, also one of the same replica, then counts
        as missing. "": any signed object will do.
    """
    self._store = store
    self._signer = signer
    self._path = path
    self._num_bytes = num_bytes
    self._digest = digest
    self._tags: bytes | None = None

  def read(self, start: int, stop: int) -> memoryview | None:
    """Returns bytes of the content; None if missing, damaged or too short.

    Args:
      start: First byte, counted from the beginning of the content.
      stop: End of the range, at most `num_bytes`.

    Raises:
      ValueError: If the content has no such range.
    """
    if not 0 <= start < stop <= self._num_bytes:
      raise ValueError(
        f"bytes {start} to {stop} of {self._path} are not within its"
        f" {self._num_bytes} bytes"
      )
    first = start // BLOCK_BYTES
    blocks_start = first * BLOCK_BYTES
    blocks_stop = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, self._num_bytes)
    blocks = self._read_blocks(blocks_start, blocks_stop)
    if blocks is None or self._tags is None:
      return None
    if len(blocks) != blocks_stop - blocks_start:
      return None
    is_ours = self._signer.verify_blocks(
      self._path, blocks, first, self._tags, self._num_bytes
    )
    if not is_ours:
      return None
    return memoryview(blocks)[start - blocks_start : stop - blocks_start]

  def _read_blocks(self, start: int, stop: int) -> Buffer | None:
    """Reads bytes of the content, and the tags if they are not known yet."""
    head = head_bytes(self._num_bytes)

    def read_content() -> Buffer | None:
      return self._store.get_range(self._path, head + start, head + stop)

    def read_head() -> Buffer | None:
      return self._store.get_range(self._path, 0, head)

    if self._tags is not None:
      return read_content()
    content, found_head = self._store.at_once([read_content, read_head])
    self._tags = self._verified_tags(found_head)
    return content

  def _verified_tags(self, head: Buffer | None) -> bytes | None:
    """Returns the tags of the blocks; None if they are not those asked for."""
    if head is None:
      return None
    if self._digest and bytes(head[:TAG_BYTES]).hex() != self._digest:
      return None
    return self._signer.block_tags(self._path, head, self._num_bytes)
