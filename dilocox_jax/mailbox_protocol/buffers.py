"""The bytes of a stored object, as one buffer or as a list of buffers.

For example, the arrays of a message are separate buffers. As a list of buffers,
the message can be written without copying all bytes into one buffer.
"""

from collections.abc import Sequence

Buffer = bytes | memoryview
Data = Buffer | list[Buffer]


def parts_of(data: Data) -> Sequence[Buffer]:
  """Returns the buffers of an object; one buffer becomes a list of one."""
  if isinstance(data, list):
    return data
  return [data]


def num_bytes_of(data: Data) -> int:
  """Returns the number of bytes of an object."""
  return sum(len(part) for part in parts_of(data))


def is_equal(stored: Buffer, data: Data) -> bool:
  """Returns whether `stored` and the parts of `data` have the same bytes."""
  if len(stored) != num_bytes_of(data):
    return False
  view = memoryview(stored)
  start = 0
  for part in parts_of(data):
    stop = start + len(part)
    if view[start:stop] != part:
      return False
    start = stop
  return True
