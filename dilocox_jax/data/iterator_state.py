"""Writes the state of a user's iterator as JSON, and restores it unchanged.

JSON has no tuples, bytes, sets or arrays, and turns keys into text. So a value
that JSON would change or cannot hold, and every dict, is written as an object
with its kind and its content:

    3               3
    (3, None)       {"kind": "tuple", "value": [3, null]}
    {1: b"a"}       {"kind": "dict", "value": [[1, {"kind": "bytes", "value":
                      "61"}]]}
    np.int16(3)     {"kind": "number", "value": {"dtype": "<i2", "shape": [],
                      "hex": "0300"}}

A value of an unknown type is refused, also if a known type is its base class.
Nothing is pickled, because loading a pickled file may execute code in it.
"""

import collections
import math
import struct
import textwrap
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from dilocox_jax.checks import require

# Integers of at most this many bits are written as JSON numbers. Readers of
# JSON with only double precision keep them exactly.
_INT_BITS = 53


class _UnknownTypeError(Exception):
  """Raised if a value of a state cannot be saved.

  Args:
    what: Words for the value, e.g. "a array.array".
    path: Path of the value in the state, e.g. "[3]"; "" for the state itself.
  """

  def __init__(self, what: str, path: str = ""):
    super().__init__(what)
    self.what = what
    self.path = path


def encoded(state: Any, owner: str) -> Any:
  """Converts the state of an iterator to values of JSON, for `decoded`.

  The result shares no mutable object with the state.

  Args:
    state: State that an iterator returned.
    owner: Name of the iterator's type, for the message.

  Raises:
    ValueError: If the state has a value that cannot be restored exactly, is
      nested too deeply, or contains itself.
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
  """Restores the state of an iterator. It reverses `encoded`.

  Args:
    value: Value that `encoded` returned, or a copy of it read from JSON.

  Raises:
    ValueError: If a part has a kind that this version of the package does not
      know.
  """
  if type(value) is list:
    return [decoded(item) for item in value]
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
  """Converts a part of a state to values of JSON.

  Raises `_UnknownTypeError` if the part has a value that cannot be restored.
  """
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
  """Returns the items of a list or a tuple as a list of values of JSON."""
  return [_at(f"[{index}]", value) for index, value in enumerate(values)]


def _encoded_pairs(values: Mapping[Any, Any]) -> list[list[Any]]:
  """Returns the pairs [key, value] of a dict as values of JSON, in order."""
  pairs = []
  for key, value in values.items():
    name = _in_short(key)
    pairs.append([_at(f" (the key {name})", key), _at(f"[{name}]", value)])
  return pairs


def _encoded_set(values: Set[Any]) -> list[Any]:
  """Returns the elements of a set as a list of values of JSON."""
  return [
    _at(f" (the element {_in_short(element)})", element) for element in values
  ]


def _in_short(value: Any) -> str:
  """Returns the `repr` of a value, shortened to at most 40 characters."""
  return textwrap.shorten(repr(value), 40, placeholder=" ...")


def _at(path: str, value: Any) -> Any:
  """Converts a part of a state, as `_encoded` does.

  If that fails, `path` (e.g. "[3]") is put in front of the path in the error.
  """
  try:
    return _encoded(value)
  except _UnknownTypeError as error:
    raise _UnknownTypeError(error.what, path + error.path) from None


def _encoded_array(array: np.ndarray) -> dict[str, Any]:
  """Returns dtype, shape and bytes of an array, as values of JSON.

  Raises `_UnknownTypeError` if the array has Python objects, or a dtype that
  numpy does not find by its name.
  """
  # The first name has the byte order, e.g. "<i4". A type of another library
  # has only the second name, e.g. "bfloat16".
  names = [array.dtype.str, array.dtype.name]
  name = next((name for name in names if _has_name(array.dtype, name)), None)
  if name is None or array.dtype.hasobject:
    raise _UnknownTypeError(f"an array of {array.dtype}")
  shape = list(array.shape)
  raw = array.tobytes()
  return {"dtype": name, "shape": shape, "hex": raw.hex()}


def _has_name(dtype: np.dtype, name: str) -> bool:
  """Returns whether numpy finds a dtype by a name, e.g. "<i4" or "bfloat16"."""
  try:
    return np.dtype(name) == dtype
  except TypeError:
    return False


def _decoded_array(saved: Mapping[str, Any]) -> np.ndarray:
  """Restores the array that `_encoded_array` has encoded."""
  # From a bytearray numpy makes an array into which the loader may write.
  raw = bytearray.fromhex(saved["hex"])
  dtype = np.dtype(saved["dtype"])
  shape = tuple(saved["shape"])
  return np.ndarray(shape, dtype, buffer=raw or None)


def _encoded_number(number: np.generic) -> dict[str, Any]:
  """Returns dtype, shape and bytes of a numpy scalar, as values of JSON.

  Raises `_UnknownTypeError` if the scalar would come back with another type.
  """
  saved = _encoded_array(np.asarray(number))
  # On some machines two types have the same dtype, e.g. np.int64 and
  # np.longlong.
  if type(_decoded_number(saved)) is not type(number):
    raise _UnknownTypeError(f"a numpy.{type(number).__name__}")
  return saved


def _decoded_number(saved: Mapping[str, Any]) -> np.generic:
  """Restores the numpy scalar that `_encoded_number` has encoded."""
  return np.asarray(_decoded_array(saved)).reshape(-1)[0]


def _decoded_pairs(pairs: Sequence[Any]) -> dict[Any, Any]:
  """Restores the dict that `_encoded_pairs` has encoded."""
  return {decoded(key): decoded(value) for key, value in pairs}


def _bits(number: float) -> str:
  """Returns the 8 bytes of a float as 16 hexadecimal digits."""
  return struct.pack(">d", number).hex()


def _from_bits(text: str) -> float:
  """Returns the float that `_bits` wrote."""
  (number,) = struct.unpack(">d", bytes.fromhex(text))
  return number


# For each type: the kind in the JSON, and a function that encodes a value.
# `_encoded` writes short ints and finite floats in another way, so an int here
# has more than `_INT_BITS` bits, and a float is not finite.
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
# Function that decodes a value, by kind.
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
