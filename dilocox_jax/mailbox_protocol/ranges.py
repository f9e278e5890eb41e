"""Reads a range of an object's content, and verifies it without the rest.

Example: an object has 100 MB, and the caller needs the bytes 12,500,000 to
25,000,000. The tags (authentication codes of the content's blocks, 3.1 kB) are
read, and the blocks of 1 MiB that hold these bytes. `signer.py` describes the
format.
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
  """Reads and verifies ranges of one signed object."""

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
      store: The folder or bucket, as a `RetryingStore`.
      signer: Signs and verifies the objects of the run.
      path: Path of the object.
      num_bytes: Bytes of the object's content.
      digest: First 32 bytes of the wanted object as hexadecimal digits, as in a
        manifest (list of messages); "": any object signed for this path.
    """
    self._store = store
    self._signer = signer
    self._path = path
    self._num_bytes = num_bytes
    self._digest = digest
    self._tags: bytes | None = None

  def read(self, start: int, stop: int) -> memoryview | None:
    """Reads the bytes `start` to `stop` - 1 of the content.

    Returns:
      The bytes; None if the object is missing, too short, not signed, or has
      another digest than the wanted object.

    Raises:
      ValueError: If the range is empty or not within the content.
    """
    if not 0 <= start < stop <= self._num_bytes:
      raise ValueError(
        f"bytes {start} to {stop} of {self._path} are not within its"
        f" {self._num_bytes} bytes"
      )
    # Only whole blocks can be verified.
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
    """Reads bytes of the content and, if they are not known yet, the tags.

    Tags are the authentication codes of the content's blocks. The returned
    bytes are not verified; None: the object is missing or too short.
    """
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
    """Verifies the bytes before the content, and returns the blocks' tags.

    Returns:
      The tags (authentication codes), 32 bytes a block; None if the head is
      missing, not signed, or of another object than the wanted one.
    """
    if head is None:
      return None
    if self._digest and bytes(head[:TAG_BYTES]).hex() != self._digest:
      return None
    return self._signer.block_tags(self._path, head, self._num_bytes)
