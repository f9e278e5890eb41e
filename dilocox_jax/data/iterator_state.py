"""The state of somebody's iterator as JSON, and back as it was.

JSON has no tuples, bytes, sets or arrays, turns keys into text, and knows one
kind of number. A loader that gets a list for its tuple, or "3" for 3, may go on
with other data without a word. So a value that is not one of JSON's own is a
dict of its kind and its content, and so is every dict:

    3               3
    (3, None)       {"kind": "tuple", "value": [3, null]}
    {1: b"a"}       {"kind": "dict", "value": [[1, {"kind": "bytes", "value":
                      "61"}]]}
    np.int16(3)     {"kind": "number", "value": {"dtype": "<i2", "shape": [],
                      "hex": "0300"}}

Types are compared exactly, since a value of a subclass would come back as one
of its base. A value of any other type is refused, and the message says where it
stands. Nothing is pickled, because to load such a file is to execute it.
"""

import collections
import math
import struct
import textwrap
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from dilocox_jax.checks import require

# Every reader of JSON takes whole numbers of so many bits.
_INT_BITS = 53


class _UnknownTypeError(Exception):
  """A value of a type that cannot be saved, with its path in the state."""

  def __init__(self, what: str, path: str = ""):
    super().__init__(what)
    self.what = what
    self.path = path


def encoded(state: Any, owner: str) -> Any:
  """Returns a state as values of JSON, which share no object with it.

  Args:
    state: What an iterator returns as its state.
    owner: Name of the iterator's type, for the message.

  Raises:
    ValueError: One line, if some value would not come back as it was.
  """
  try:
    return _encoded(state)
  except _UnknownTypeError as error:
    raise ValueError(
      f"the state of {owner} cannot be saved: state{error.path} is "
      f"{error.what}; use numbers, text, bytes, arrays of numpy, and lists, "
      "tuples, sets and dicts of these"
    ) from None
  except RecursionError:
    raise ValueError(
      f"the state of {owner} cannot be saved: it is nested too deeply, or "
      "contains itself"
    ) from None


def decoded(value: Any) -> Any:
  """Returns the state of which `encoded` made a value.

  Args:
    value: Values of JSON.

  Raises:
    ValueError: If another version of the package has made it.
  """
  if type(value) is list:
    return [decoded(each) for each in value]
  if type(value) is not dict:
    return value
  kind = str(value.get("kind"))
  require(
    kind in _DECODERS,
    f"the saved state of the iterator has a {kind!r}, which this version of "
    "dilocox_jax does not know: take the version that saved it",
  )
  return _DECODERS[kind](value["value"])


def _encoded(value: Any) -> Any:
  kind = type(value)
  if value is None or kind in (bool, str):
    return value
  if kind is int and value.bit_length() <= _INT_BITS:
    return value
  if kind is float and math.isfinite(value):
    return value
  if kind is list:
    return _encoded_items(value)
  if kind in _ENCODERS:
    name, encode = _ENCODERS[kind]
    return {"kind": name, "value": encode(value)}
  if isinstance(value, np.generic):
    return {"kind": "number", "value": _encoded_number(value)}
  raise _UnknownTypeError(f"a {kind.__module__}.{kind.__qualname__}")


def _encoded_items(values: Sequence[Any]) -> list[Any]:
  return [_at(f"[{n}]", value) for n, value in enumerate(values)]


def _encoded_pairs(values: Mapping[Any, Any]) -> list[list[Any]]:
  pairs = []
  for key, value in values.items():
    name = _in_short(key)
    pairs.append([_at(f" (the key {name})", key), _at(f"[{name}]", value)])
  return pairs


def _encoded_set(values: Set[Any]) -> list[Any]:
  return [_at(f" (the element {_in_short(each)})", each) for each in values]


def _in_short(value: Any) -> str:
  return textwrap.shorten(repr(value), 40, placeholder=" ...")


def _at(path: str, value: Any) -> Any:
  """Encodes a part of a state; an error then says where the part stands."""
  try:
    return _encoded(value)
  except _UnknownTypeError as error:
    raise _UnknownTypeError(error.what, path + error.path) from None


def _encoded_array(array: np.ndarray) -> dict[str, Any]:
  names = [array.dtype.str, array.dtype.name]
  name = next((name for name in names if _has_name(array.dtype, name)), None)
  if name is None or array.dtype.hasobject:
    raise _UnknownTypeError(f"an array of {array.dtype}")
  shape = list(array.shape)
  raw = array.tobytes()
  return {"dtype": name, "shape": shape, "hex": raw.hex()}


def _has_name(dtype: np.dtype, name: str) -> bool:
  """Whether numpy finds a type by its name, e.g. "<i4" or "bfloat16"."""
  try:
    return np.dtype(name) == dtype
  except TypeError:
    return False


def _decoded_array(saved: Mapping[str, Any]) -> np.ndarray:
  # A bytearray, so that the loader may write into the array.
  raw = bytearray.fromhex(saved["hex"])
  dtype = np.dtype(saved["dtype"])
  shape = tuple(saved["shape"])
  return np.ndarray(shape, dtype, buffer=raw or None)


def _encoded_number(number: np.generic) -> dict[str, Any]:
  saved = _encoded_array(np.asarray(number))
  # Some machines have two types of one size, e.g. np.int64 and np.longlong.
  if type(_decoded_number(saved)) is not type(number):
    raise _UnknownTypeError(f"a numpy.{type(number).__name__}")
  return saved


def _decoded_number(saved: Mapping[str, Any]) -> np.generic:
  return np.asarray(_decoded_array(saved)).reshape(-1)[0]


def _decoded_pairs(pairs: Sequence[Any]) -> dict[Any, Any]:
  return {decoded(key): decoded(value) for key, value in pairs}


def _bits(number: float) -> str:
  return struct.pack(">d", number).hex()


def _from_bits(text: str) -> float:
  (number,) = struct.unpack(">d", bytes.fromhex(text))
  return number


_ENCODERS: Mapping[type, tuple[str, Callable[[Any], Any]]] = {
  int: ("int", hex),
  float: ("float", _bits),
  complex: ("complex", lambda x: [_bits(x.real), _bits(x.imag)]),
  bytes: ("bytes", bytes.hex),
  bytearray: ("bytearray", bytearray.hex),
  tuple: ("tuple", _encoded_items),
  set: ("set", _encoded_set),
  frozenset: ("frozenset", _encoded_set),
  dict: ("dict", _encoded_pairs),
  collections.OrderedDict: ("ordered dict", _encoded_pairs),
  np.ndarray: ("array", _encoded_array),
}
_DECODERS: Mapping[str, Callable[[Any], Any]] = {
  "int": lambda text: int(text, 16),
  "float": _from_bits,
  "complex": lambda parts: complex(*map(_from_bits, parts)),
  "bytes": bytes.fromhex,
  "bytearray": bytearray.fromhex,
  "tuple": lambda values: tuple(map(decoded, values)),
  "set": lambda values: set(map(decoded, values)),
  "frozenset": lambda values: frozenset(map(decoded, values)),
  "dict": _decoded_pairs,
  "ordered dict": lambda pairs: collections.OrderedDict(_decoded_pairs(pairs)),
  "array": _decoded_array,
  "number": _decoded_number,
}
