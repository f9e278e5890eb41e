"""Sends bytes between the processes of a run, without the devices.

A channel uses the key-value store of JAX's coordinator, which is in process 0.
The messages of a sender are numbered. For example, these keys belong to message
7 of a sender to the processes 1 and 2:

  sender     sets 7/content, waits for 7/read/1 and 7/read/2, deletes all keys
  receivers  wait for 7/content, and set 7/read/1 and 7/read/2
"""

import collections
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from dilocox_jax.distributed import coordinator_store

# Largest piece of an array. The store holds only one piece of it at a time.
PIECE_BYTES = 4 * 2**20
MAIN = 0  # Number of the main process.
_channels = itertools.count()


class Channel:
  """Sends and receives messages between the processes of a run.

  A process must send all its messages to the same receivers. Each receiver must
  receive all of them, because both sides count the messages. In each process
  only one thread at a time may send or receive.

  Attributes:
    others: Numbers of all other processes.
  """

  def __init__(self):
    """Opens a channel. All processes must open channels in the same order.

    `jax.distributed` must be initialized.
    """
    self._store = coordinator_store.key_value_store()
    self._folder = f"{coordinator_store.FOLDER}/channel{next(_channels)}"
    self._counts: collections.Counter[int] = collections.Counter()
    self._process = jax.process_index()
    self.others = [
      process
      for process in range(jax.process_count())
      if process != self._process
    ]

  def _next_key(self, sender: int) -> str:
    """Returns the key of a process's next message, and counts the message."""
    number = self._counts[sender]
    self._counts[sender] += 1
    return f"{self._folder}/{sender}/{number}"

  def send(
    self, content: bytes, receivers: Sequence[int], *, waits: bool = True
  ) -> None:
    """Sends a message, and by default waits until all receivers have read it.

    Args:
      content: Content of the message, at least one byte.
      receivers: Numbers of the processes that call `receive`.
      waits: Whether to wait, and then to delete the message. If not, the
        message stays in the store until the run ends.
    """
    key = self._next_key(self._process)
    self._store.key_value_set_bytes(f"{key}/content", content)
    if not waits:
      return
    for process in receivers:
      self._store.blocking_key_value_get_bytes(
        f"{key}/read/{process}", coordinator_store.WAIT_MS
      )
    self._store.key_value_delete(key)

  def receive(self, sender: int) -> bytes:
    """Waits for the next message of a process, and returns its content."""
    key = self._next_key(sender)
    content = self._store.blocking_key_value_get_bytes(
      f"{key}/content", coordinator_store.WAIT_MS
    )
    self._store.key_value_set_bytes(f"{key}/read/{self._process}", b"1")
    return content

  def send_array(self, array: np.ndarray, receivers: Sequence[int]) -> None:
    """Sends the values of an array in pieces, and waits until they are read.

    Args:
      array: The array. Its shape and dtype are not sent.
      receivers: Numbers of the processes that call `receive_array`.
    """
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, len(content), PIECE_BYTES):
      piece = content[start : start + PIECE_BYTES]
      self.send(piece.tobytes(), receivers)

  def receive_array(
    self, sender: int, shape: Sequence[int], dtype: np.dtype
  ) -> np.ndarray:
    """Waits for an array that process `sender` sends by `send_array`.

    Raises:
      ValueError: If a piece has another size than shape and dtype imply.
    """
    array = np.empty(shape, dtype)
    content = array.reshape(-1).view(np.uint8)
    for start in range(0, len(content), PIECE_BYTES):
      piece = np.frombuffer(self.receive(sender), np.uint8)
      expected = content[start : start + PIECE_BYTES]
      # NumPy would spread a piece of one byte over all of them.
      if piece.shape != expected.shape:
        raise ValueError(
          f"process {sender} sent {len(piece)} bytes instead of {len(expected)}"
        )
      expected[:] = piece
    return array

  def mark(self, name: str) -> None:
    """Sets a mark of this name that all processes can see (`is_marked`)."""
    self._store.key_value_set_bytes(
      f"{self._folder}/{name}", b"1", allow_overwrite=True
    )

  def is_marked(self, name: str) -> bool:
    """Returns whether any process has set the mark of this name."""
    try:
      self._store.key_value_try_get_bytes(f"{self._folder}/{name}")
    except jax.errors.JaxRuntimeError as error:
      # Only the text of the store's error says that the key is not set.
      if "NOT_FOUND" in str(error):
        return False
      raise
    return True
