"""Checks of values, of nested mappings such as a config, and of JSON files.

Their messages are one line that says what is wrong and what is allowed; for a
misspelt field they name the nearest one.
"""

import collections
import contextlib
import dataclasses
import difflib
import importlib
import json
import math
import numbers
import operator
import os
import pathlib
import stat
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

Default = typing.TypeVar("Default")

# Configs, records and indices are much shorter. A longer file is another one,
# and to read all of it could take more memory than there is.
LONGEST_JSON = 64 * 2**20
_SHOWN = 80  # Characters of a wrong value that a message repeats.

# The limits of numbers, with the comparison that must hold.
_BOUNDS = {
  "above": operator.gt,
  "at_least": operator.ge,
  "below": operator.lt,
  "at_most": operator.le,
}
_LIMIT_KINDS = {"choices", *_BOUNDS}


def require(condition: bool, message: str) -> None:
  """Raises ValueError with a message unless a condition holds.

  Args:
    condition: What must hold.
    message: What is wrong if it does not, and what to do.
  """
  if not condition:
    raise ValueError(message)


def extra_package(name: str, needed_by: str, extra: str = "text") -> ModuleType:
  """Imports a package that only an extra of `setup.py` installs.

  Args:
    name: Name of the package, or of a module in it.
    needed_by: What needs it, for the message.
    extra: Name of the extra.

  Raises:
    ValueError: If it is not installed. The message is one line.
  """
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ValueError(
      f"{needed_by} needs the package {name.partition('.')[0]}: "
      f"pip install 'dilocox_jax[{extra}]'"
    ) from error


@contextlib.contextmanager
def in_front(text: str) -> Iterator[None]:
  """Puts a text, e.g. "sync.", in front of the message of a ValueError."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f"{text}{error}") from error


def limited(default: Default, **limits: Any) -> Default:
  """Declares a field of a dataclass, and which values it may have.

  Args:
    default: Default value of the field; None: it may be left unset.
    **limits: Limits as in `within_limits`; `check_limits` reads them.
  """
  return dataclasses.field(default=default, metadata=limits)


def check_limits(values: Any, prefix: str = "") -> None:
  """Raises ValueError for the first field of a dataclass outside its limits.

  A field of another type than its own is outside, too.

  Args:
    values: A dataclass, some of whose fields are declared with `limited`.
    prefix: Text in front of the fields' names, for messages.
  """
  types = typing.get_type_hints(type(values))
  for field in dataclasses.fields(values):
    value = getattr(values, field.name)
    limits = {
      kind: limit
      for kind, limit in field.metadata.items()
      if kind in _LIMIT_KINDS
    }
    if limits and value is not None:
      of_type(prefix + field.name, value, types[field.name])
      within_limits(prefix + field.name, value, **limits)


def within_limits(
  name: str,
  value: Any,
  choices: Iterable[Any] | None = None,
  **bounds: float | int,
) -> None:
  """Raises ValueError for a value outside one of the limits that are given.

  Args:
    name: Name of the value, for the message.
    value: The value to check. NaN is outside all bounds.
    choices: The only values that are allowed.
    **bounds: Numbers with which the value is compared: `above` and `below`,
      which it must not reach, `at_least` and `at_most`, which it may reach.
  """
  if choices is not None:
    one_of(name, value, choices)
  try:
    is_inside = all(_BOUNDS[kind](value, at) for kind, at in bounds.items())
  except TypeError as error:
    raise ValueError(f"{name}={shown(value)} must be a number") from error
  if not is_inside:
    texts = [f"{k.replace('_', ' ')} {_short(at)}" for k, at in bounds.items()]
    raise ValueError(f"{name}={shown(value)} must be {' and '.join(texts)}")


def _short(number: float) -> str:
  return str(number) if isinstance(number, int) else f"{number:g}"


def of_type(name: str, value: Any, kind: Any) -> Any:
  """Returns a value of a type; a whole number may stand for a float.

  Numbers of numpy become Python's.

  Args:
    name: Name of the value, for the message.
    value: The value to check.
    kind: A type, or a union of types.

  Raises:
    ValueError: If the value has another type.
  """
  kinds = typing.get_args(kind) or (kind,)
  if not isinstance(value, bool):
    if int in kinds and isinstance(value, numbers.Integral):
      return int(value)
    if float in kinds and isinstance(value, numbers.Real):
      return _float(name, value)
  if type(value) not in kinds:
    names = " or ".join(k.__name__ for k in kinds if k is not type(None))
    raise ValueError(f"{name}={shown(value)} must be of type {names}")
  return value


def _float(name: str, value: numbers.Real) -> float:
  try:
    return float(value)
  except OverflowError:
    raise ValueError(f"{name}={shown(value)} is too large") from None


def shown(value: Any) -> str:
  """Returns a wrong value for a message: one line, however long the value is.

  Args:
    value: Anything that was read from a file or given by a user.
  """
  # A number of numpy is shown as a number, and not as np.float64(1.0).
  text = str(value) if isinstance(value, numbers.Number) else repr(value)
  if len(text) <= _SHOWN:
    return text
  return f"{text[:_SHOWN]}... ({len(text):,} characters)"


def printable(text: str) -> str:
  r"""Returns a text on one line, with escapes for what cannot be printed.

  Names of files, for example, may have line breaks, and sequences with which a
  terminal moves its cursor. Example: "a" and a line break become r"a\n".

  Args:
    text: Any text, also with bytes of a file name that is not UTF-8.
  """
  return "".join(
    each if each.isprintable() else each.encode("unicode_escape").decode()
    for each in text
  )


def json_object(
  text: str | bytes, where: object, *, is_ours: bool = True
) -> dict[str, Any]:
  """Returns the object that a text in JSON describes.

  Args:
    text: The text, of which anything may be damaged.
    where: Place of the text, e.g. the path of a file, for the message.
    is_ours: Whether every number must be finite, and every key be there once.
      Python also reads NaN, 1e999 and the last of two equal keys, which we
      write nowhere. So a text that has them is damaged.

  Raises:
    ValueError: If it describes no object. The message is one line.
  """
  strict: dict[str, Any] = {}
  if is_ours:
    strict["parse_constant"] = _no_constant
    strict["parse_float"] = _finite
    strict["object_pairs_hook"] = _without_repeats
  try:
    return of_type("it", json.loads(text, **strict), dict)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{where} is no JSON object: {error}") from None


def _no_constant(name: str) -> None:
  raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f"{shown(text)} is out of range")
  return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) < len(pairs):
    counts = collections.Counter(name for name, _ in pairs)
    ((repeated, _),) = counts.most_common(1)
    raise ValueError(f"it has the key {shown(repeated)} more than once")
  return found


def file_bytes(path: str | os.PathLike[str], most: int = LONGEST_JSON) -> bytes:
  """Returns the content of a file that others may have damaged.

  Args:
    path: The file. A link is followed.
    most: Bytes that it may have.

  Raises:
    ValueError: If it is missing, is no file, cannot be read, or is larger. The
      message is one line.
  """
  path = pathlib.Path(path)
  try:
    status = path.stat()
    require(stat.S_ISREG(status.st_mode), f"{path} is no file")
    require(
      status.st_size <= most,
      f"{path} has {status.st_size:,} bytes, and {most:,} at most are read",
    )
    return path.read_bytes()
  except OSError as error:
    reason = error.strerror or error
    raise ValueError(f"{path} cannot be read ({reason})") from error


def json_file(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the object that a JSON file describes.

  Args:
    path: The file, of which anything may be damaged.

  Raises:
    ValueError: If it cannot be read, or describes no object. The message is one
      line and names the file.
  """
  return json_object(file_bytes(path), path)


def one_of(name: str, value: Any, choices: Iterable[Any]) -> None:
  """Raises ValueError, which lists the choices, for any other value.

  Args:
    name: Name of the value, for the message.
    value: The value to check.
    choices: All values that are allowed.
  """
  choices = list(choices)
  if value not in choices:
    names = ", ".join(str(choice) for choice in choices)
    raise ValueError(f"{name}={shown(value)} must be one of {names}")


# What papers and other libraries call a name, in lower case.
_OTHER_NAMES = {
  "lr": "learning_rate",
  "h": "sync_interval",
  "p": "num_fragments",
  "tau": "overlap_steps",
  "alpha": "mixing_alpha",
  "wd": "weight_decay",
  "seq_len": "sequence_length",
}


def did_you_mean(name: str, names: Iterable[str]) -> str:
  """Returns the end of a message: the nearest known name, or all names.

  Args:
    name: Name that is not known.
    names: All known names.
  """
  names = list(names)
  near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
  other = _OTHER_NAMES.get(str(name).lower())
  if other in names:
    near = [other]
  return f"did you mean {near[0]!r}?" if near else f"have: {', '.join(names)}"


def known(what: str, name: str, names: Iterable[str]) -> None:
  """Raises ValueError, with a hint, unless a name is one of those known.

  Args:
    what: Kind of thing that has the name, e.g. "method".
    name: The name to check.
    names: All known names.
  """
  names = list(names)
  if name not in names:
    hint = did_you_mean(name, names)
    raise ValueError(f"unknown {what} {shown(name)}: {hint}")


def dataclass_from(
  cls: Any, values: Mapping[str, Any], prefix: str = "", whole: Any = None
) -> Any:
  """Builds a dataclass and the dataclasses in it from a nested mapping.

  Args:
    cls: A dataclass whose fields are plain values or dataclasses.
    values: Values by field; missing fields keep their defaults.
    prefix: Dotted path of `cls` in front of its fields, for messages.
    whole: The dataclass at the beginning of that path; None: `cls`.

  Raises:
    ValueError: One line that names an unknown field, or a value of a wrong
      type.
  """
  fields = typing.get_type_hints(cls)
  built = {}
  for name, value in values.items():
    path = prefix + name
    if name not in fields:
      raise ValueError(_unknown(path, name, fields, whole or cls))
    kind = fields[name]
    if dataclasses.is_dataclass(kind):
      if not isinstance(value, Mapping):
        raise ValueError(f"{path}={shown(value)} must be a section of fields")
      built[name] = dataclass_from(kind, value, f"{path}.", whole or cls)
    else:
      built[name] = of_type(path, value, kind)
  return cls(**built)


def check_path(cls: type, path: str) -> None:
  """Raises ValueError, with the nearest name, if a field does not exist.

  Args:
    cls: A dataclass, possibly of dataclasses.
    path: Names joined by dots, e.g. "sync.sync_interval".
  """
  kind = cls
  for name in path.split("."):
    fields = (
      typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
    )
    if name not in fields:
      raise ValueError(_unknown(path, name, fields, cls))
    kind = fields[name]


def _unknown(
  path: str, name: str, fields: Mapping[str, Any], whole: type
) -> str:
  """Names the nearest field: almost the same one of any section comes first."""
  said = {each.rpartition(".")[2]: each for each in _paths(whole)}
  said |= {each: each for each in fields}
  near = difflib.get_close_matches(name, said, n=1, cutoff=0.8)
  hint = f"did you mean {said[near[0]]!r}?" if near else ""
  hint = hint or did_you_mean(name, fields)
  return f"unknown config field {shown(path)}: {hint}"


def _paths(cls: Any, prefix: str = "") -> Iterator[str]:
  """Yields the dotted names of a dataclass's fields."""
  for name, kind in typing.get_type_hints(cls).items():
    yield prefix + name
    if dataclasses.is_dataclass(kind):
      yield from _paths(kind, f"{prefix}{name}.")


def changed_fields(
  old: Mapping[str, Any], new: Mapping[str, Any], free: Sequence[str] = ()
) -> list[str]:
  """Lists the fields in which two nested mappings differ.

  Args:
    old: The nested mapping from before.
    new: The nested mapping from now.
    free: Dotted names of fields or sections that may differ.

  Returns:
    Lines "section.field: old -> new".
  """
  before = flat(old)
  after = flat(new)
  return [
    f"{path}: {before.get(path)!r} -> {after.get(path)!r}"
    for path in sorted(before.keys() | after.keys())
    if before.get(path) != after.get(path)
    and not any(f"{path}.".startswith(f"{name}.") for name in free)
  ]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns the values of a nested mapping by their dotted names, in order.

  Args:
    values: A nested mapping; names that are dotted already stay as they are. An
      empty mapping in it is a value.
    prefix: Text in front of every name.
  """
  by_path: dict[str, Any] = {}
  for name, value in values.items():
    if isinstance(value, Mapping) and value:
      by_path |= flat(value, f"{prefix}{name}.")
    else:
      by_path[prefix + name] = value
  return by_path
