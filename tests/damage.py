"""Damages files and JSON in the ways that a disk, a copy or a hand would.

What reads them must then raise a ValueError of one line, or return what the
undamaged file has. Another error, silence about other values, and waiting for
ever are faults.
"""

import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

# What a field may hold instead of its value. Two are no JSON, but Python reads
# them: NaN, and a number that is out of range.
_TOO_LARGE = "<too large>"
VALUES = (
  None,
  True,
  0,
  -1,
  2.5,
  10**9,
  10**30,
  "",
  "text",
  "line\nbreak",
  [],
  {},
  [[[]]],
  {"a": {"b": None}},
  float("nan"),
  _TOO_LARGE,
)


def in_bytes(
  content: bytes, seed: int = 0, flips: int = 30
) -> Iterator[tuple[str, bytes]]:
  """Yields what is wrong, and a content with flipped bits, cut or grown.

  Args:
    content: The content of a file.
    seed: Seed of the places.
    flips: How many flipped bits to try.
  """
  draw = random.Random(seed)
  for _ in range(flips):
    place = draw.randrange(len(content))
    bit = draw.randrange(8)
    flipped = bytearray(content)
    flipped[place] ^= 1 << bit
    yield f"bit {bit} of byte {place} flipped", bytes(flipped)
  size = len(content)
  for end in (0, 1, size // 4, size // 2, size - 1):
    yield f"cut to {end} bytes", content[:end]
  yield "one byte more", content + b"\0"
  yield "twice", content + content
  yield "zeros in its place", bytes(size)
  yield "brackets in its place", b"[" * 100_000


def _places(value: Any, path: tuple = ()) -> Iterator[tuple]:
  """Yields the path of every field and of every item."""
  if isinstance(value, dict):
    items = value.items()
  elif isinstance(value, list):
    items = enumerate(value)
  else:
    return
  for key, inner in items:
    yield (*path, key)
    yield from _places(inner, (*path, key))


def in_fields(
  value: Any, values: tuple = VALUES, skip: tuple = ()
) -> Iterator[tuple[str, str]]:
  """Yields what is wrong, and JSON in which one field is another or missing.

  Args:
    value: What the undamaged file holds.
    values: What fields may hold instead.
    skip: Keys whose fields stay as they are.
  """
  for path in _places(value):
    if path[-1] in skip:
      continue
    for other in itertools.chain(values, [KeyError]):
      damaged = copy.deepcopy(value)
      holder = damaged
      for key in path[:-1]:
        holder = holder[key]
      name = ".".join(map(str, path))
      if other is KeyError:
        del holder[path[-1]]
        yield f"{name} is missing", json.dumps(damaged)
      else:
        holder[path[-1]] = other
        text = json.dumps(damaged).replace(f'"{_TOO_LARGE}"', "1e999")
        yield f"{name} = {other!r}", text


def outcome(what: str, read: Callable[[], Any]) -> Any:
  """Returns what reading comes to; a ValueError of one line counts as None.

  Args:
    what: What is wrong, for the message of a test that fails.
    read: Reads the damaged file.
  """
  try:
    return read()
  except ValueError as error:
    assert "\n" not in str(error), f"{what}: {error}"
    assert len(str(error)) < 1500, f"{what}: {error}"
    return None
  except Exception as error:
    raise AssertionError(f"{what}: {error!r}") from error
