"""Checks of values, of nested mappings such as a config, and of JSON files.

A failed check raises ValueError with a message of one line.
"""

import collections
import contextlib
import dataclasses
import difflib
import functools
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

# Largest size of a JSON file (bytes). Configs, records and indices are much
# smaller. A larger file is no such file, and reading all of it could take more
# memory than there is.
LONGEST_JSON = 64 * 2**20
_SHOWN = 80  # Characters of a wrong value that a message repeats.

# Comparison of a value with a bound that must hold, by the kind of the bound.
_BOUNDS = {
  "above": operator.gt,
  "at_least": operator.ge,
  "below": operator.lt,
  "at_most": operator.le,
}
_LIMIT_KINDS = {"choices", *_BOUNDS}


def require(condition: bool, message: str) -> None:
  """Raises ValueError with a message of one line unless a condition holds."""
  if not condition:
    raise ValueError(message)


def extra_package(name: str, needed_by: str, extra: str = "text") -> ModuleType:
  """Imports a package that only an extra of `setup.py` installs.

  Args:
    name: Name of the package, or of a module in it.
    needed_by: Option or function that needs the package, for the message, e.g.
      "data.tokenizer".
    extra: Name of the extra.

  Raises:
    ValueError: If the package cannot be imported.
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
  """Puts a text in front of the message of a ValueError in a `with` block."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f"{text}{error}") from error


def limited(default: Default, **limits: Any) -> Default:
  """Declares a field of a dataclass, and which values it may have.

  Args:
    default: Default value of the field; None: the field may be left unset.
    **limits: Limits of the value: `choices`, `above`, `at_least`, `below` or
      `at_most` (`within_limits`). `check_limits` checks them.

  Returns:
    The field of the dataclass; for type checkers a value of the default's type.
  """
  return dataclasses.field(default=default, metadata=limits)


@functools.cache
def _types_of(cls: Any) -> dict[str, Any]:
  """Returns the types of a dataclass's fields. Do not change the dict."""
  return typing.get_type_hints(cls)


def check_limits(values: Any, prefix: str = "") -> None:
  """Checks the fields of a dataclass that are declared with limits.

  Fields that are None are not checked.

  Args:
    values: A dataclass, some of whose fields are declared with `limited`.
    prefix: Text in front of the fields' names, for messages, e.g. "sync.".

  Raises:
    ValueError: If a field is outside its limits or has a wrong type.
  """
  types = _types_of(type(values))
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


def check_types(values: Any, prefix: str = "") -> None:
  """Checks the types of all fields of a dataclass.

  Unlike `check_limits` it also checks fields without limits, and it refuses
  None in a field whose type does not allow it.

  Args:
    values: A dataclass.
    prefix: Text in front of the fields' names, for messages, e.g. "sync.".

  Raises:
    ValueError: If a field has a wrong type.
  """
  for name, kind in _types_of(type(values)).items():
    of_type(prefix + name, getattr(values, name), kind)


def within_limits(
  name: str,
  value: Any,
  choices: Iterable[Any] | None = None,
  **bounds: float | int,
) -> None:
  """Raises ValueError for a value outside one of the given limits.

  Args:
    name: Name of the value, for the message.
    value: The value to check. NaN, or a value that is no number, is outside all
      bounds.
    choices: The only allowed values; None: all are.
    **bounds: `above` and `below`, which the value must not equal, and
      `at_least` and `at_most`, which it may equal.
  """
  if choices is not None:
    one_of(name, value, choices)
  try:
    is_inside = all(_BOUNDS[kind](value, at) for kind, at in bounds.items())
  except TypeError as error:
    raise ValueError(f"{name}={shown(value)} must be a number") from error
  if not is_inside:
    texts = [
      f"{kind.replace('_', ' ')} {_short(at)}" for kind, at in bounds.items()
    ]
    raise ValueError(f"{name}={shown(value)} must be {' and '.join(texts)}")


def _short(number: float) -> str:
  """Returns a bound as a short text, e.g. 1000 as "1000" and 0.5 as "0.5"."""
  return str(number) if isinstance(number, int) else f"{number:g}"


def of_type(name: str, value: Any, kind: Any) -> Any:
  """Checks the type of a value, and returns the value.

  If `kind` allows a float but no int, a whole number is converted to a float. A
  number of numpy becomes a number of Python. A bool is not taken for a number.

  Args:
    name: Name of the value, for the message.
    value: The value to check.
    kind: A type, or a union of types such as `int | None`.

  Raises:
    ValueError: If the value has another type, or is too large for a float. An
      instance of a subclass is refused, too, unless it is a number.
  """
  kinds = typing.get_args(kind) or (kind,)
  if not isinstance(value, bool):
    if int in kinds and isinstance(value, numbers.Integral):
      return int(value)
    if float in kinds and isinstance(value, numbers.Real):
      return _float(name, value)
  if type(value) not in kinds:
    names = " or ".join(
      kind.__name__ for kind in kinds if kind is not type(None)
    )
    raise ValueError(f"{name}={shown(value)} must be of type {names}")
  return value


def _float(name: str, value: numbers.Real) -> float:
  """Converts a number to a float, or raises ValueError if it is too large."""
  try:
    return float(value)
  except OverflowError:
    raise ValueError(f"{name}={shown(value)} is too large") from None


def shown(value: Any) -> str:
  """Returns the text of any wrong value, for a message.

  A text of more than 80 characters is cut to the first 80, followed by the
  length of the whole text.
  """
  # A number of numpy is shown as a number, and not as np.float64(1.0).
  text = str(value) if isinstance(value, numbers.Number) else repr(value)
  if len(text) <= _SHOWN:
    return text
  return f"{text[:_SHOWN]}... ({len(text):,} characters)"


def printable(text: str) -> str:
  r"""Returns a text on one line: an escape replaces what cannot be printed.

  Example: "a" and a line break become r"a\n". A no-break space stays, because
  tables have it in the names of their columns.
  """

  def printable_character(character: str) -> str:
    if character.isprintable() or character == "\N{NO-BREAK SPACE}":
      return character
    return character.encode("unicode_escape").decode()

  return "".join(map(printable_character, text))


def json_object(
  text: str | bytes, where: object, *, is_ours: bool = True
) -> dict[str, Any]:
  """Parses a text that must be a JSON object.

  Args:
    text: The text. It may be damaged in any way.
    where: Where the text is, e.g. the path of a file, for the message.
    is_ours: Whether a program of this project wrote the text. Such a program
      never writes NaN, infinite numbers (1e999) or repeated keys, so they are
      refused.

  Raises:
    ValueError: If the text is damaged, or is JSON but no object.
  """
  hooks: dict[str, Any] = {}
  if is_ours:
    hooks["parse_constant"] = _refuse_constant
    hooks["parse_float"] = _finite_float
    hooks["object_pairs_hook"] = _dict_without_repeats
  try:
    return of_type("it", json.loads(text, **hooks), dict)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{where} is no JSON object: {error}") from None


def _refuse_constant(name: str) -> None:
  """Raises ValueError, because a JSON text holds "NaN" or an infinity."""
  raise ValueError(f"{name} is no number")


def _finite_float(text: str) -> float:
  """Converts a number in a JSON text to a float.

  Raises ValueError if the float is infinite.
  """
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f"{shown(text)} is out of range")
  return value


def _dict_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Builds a dict from the keys and values of a JSON object.

  Raises ValueError if a key occurs more than once.
  """
  values = dict(pairs)
  if len(values) < len(pairs):
    counts = collections.Counter(name for name, _ in pairs)
    ((repeated, _),) = counts.most_common(1)
    raise ValueError(f"it has the key {shown(repeated)} more than once")
  return values


def file_bytes(path: str | os.PathLike[str], most: int = LONGEST_JSON) -> bytes:
  """Returns the content of a file that others may have damaged.

  Args:
    path: The file. A symbolic link is followed.
    most: Largest size of the file (bytes).

  Raises:
    ValueError: If the file is missing, is no regular file, cannot be read, or
      is too large.
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
  """Reads a JSON file that must hold an object.

  Raises ValueError if the file cannot be read or holds no JSON object. The
  message names the file.
  """
  return json_object(file_bytes(path), path)


def one_of(name: str, value: Any, choices: Iterable[Any]) -> None:
  """Raises ValueError, with a list of the choices, if a value is none of them.

  `name` is the name of the value in the message.
  """
  choices = list(choices)
  if value not in choices:
    names = ", ".join(str(choice) for choice in choices)
    raise ValueError(f"{name}={shown(value)} must be one of {names}")


# Our name of a field, by its name in papers and other libraries (lower case).
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
  """Returns the end of a message about an unknown name.

  If papers call one of the known names by this name, that one is suggested:
  `overlap_steps` for "tau". Otherwise the most similar known name is suggested.
  If no name is similar, all known names are listed.

  Examples: "did you mean 'sync_interval'?" and "have: diloco, eager".
  """
  names = list(names)
  suggestions = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
  our_name = _OTHER_NAMES.get(str(name).lower())
  if our_name in names:
    suggestions = [our_name]
  if suggestions:
    return f"did you mean {suggestions[0]!r}?"
  return f"have: {', '.join(names)}"


def known(what: str, name: str, names: Iterable[str]) -> None:
  """Raises ValueError if a name is not among the known names.

  The message suggests a known name. `what` is the kind of thing that has the
  name, e.g. "method".
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
    values: Values by name of the field; missing fields keep their defaults.
    prefix: Dotted path of `cls` in the outermost dataclass, with a dot at its
      end, for messages; "" for the outermost dataclass itself.
    whole: The outermost dataclass, whose fields a message may suggest; None:
      `cls`.

  Raises:
    ValueError: If a field is unknown, or a value has a wrong type. The message
      names the field.
    TypeError: If a field that has no default is missing.
  """
  fields = _types_of(cls)
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
  """Raises ValueError unless a path of names leads to a field of a dataclass.

  An example of a path is "sync.sync_interval". The message suggests the nearest
  known name.
  """
  kind = cls
  for name in path.split("."):
    fields: dict[str, Any] = {}
    if dataclasses.is_dataclass(kind):
      fields = _types_of(kind)
    if name not in fields:
      raise ValueError(_unknown(path, name, fields, cls))
    kind = fields[name]


def _unknown(
  path: str, name: str, fields: Mapping[str, Any], whole: type
) -> str:
  """Returns a message about an unknown field, which suggests a known field.

  A field of another section is suggested only if its name almost equals the
  unknown name. Example: for "model.batch_sise", "did you mean
  'data.batch_size'?".
  """
  suggestion_by_name = {}
  # If several sections have a field of one name, the last section is suggested.
  for known_path in _paths(whole):
    _, _, last_name = known_path.rpartition(".")
    suggestion_by_name[last_name] = known_path
  # Fields of the same section replace fields of this name in other sections.
  for field in fields:
    suggestion_by_name[field] = field
  nearest_names = difflib.get_close_matches(
    name, suggestion_by_name, n=1, cutoff=0.8
  )
  if nearest_names:
    hint = f"did you mean {suggestion_by_name[nearest_names[0]]!r}?"
  else:
    hint = did_you_mean(name, fields)
  return f"unknown config field {shown(path)}: {hint}"


def _paths(cls: Any, prefix: str = "") -> Iterator[str]:
  """Yields the dotted names of all sections and fields of nested dataclasses.

  Example: "sync" and "sync.sync_interval".
  """
  for name, kind in _types_of(cls).items():
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
    free: Dotted names of fields or sections that may differ, e.g. "mesh" or
      "mesh.layout".

  Returns:
    A line "section.field: old -> new" for each field, sorted. A field that one
    of the mappings lacks counts as None there.
  """
  before = flat(old)
  after = flat(new)

  def is_free(path: str) -> bool:
    # The dot keeps "mesh" from freeing a field such as "meshes.count".
    return any(f"{path}.".startswith(f"{name}.") for name in free)

  changes = []
  for path in sorted(before.keys() | after.keys()):
    has_changed = before.get(path) != after.get(path)
    if has_changed and not is_free(path):
      changes.append(f"{path}: {before.get(path)!r} -> {after.get(path)!r}")
  return changes


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Flattens a nested mapping into values by their dotted names, in order.

  Example: {"seed": 0, "data": {"glob": ""}} becomes {"seed": 0, "data.glob":
  ""}. An empty mapping inside stays as a value.

  Args:
    values: A nested mapping.
    prefix: Text in front of every name.
  """
  by_path: dict[str, Any] = {}
  for name, value in values.items():
    if isinstance(value, Mapping) and value:
      by_path |= flat(value, f"{prefix}{name}.")
    else:
      by_path[prefix + name] = value
  return by_path


def unflat(values: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
  """Builds nested dicts from a flat mapping. It is the reverse of `flat`.

  Example: {"seed": 0, "data.glob": ""} becomes {"seed": 0, "data": {"glob":
  ""}} with the `separator` ".".
  """
  nested_values: dict[str, Any] = {}
  for name, value in values.items():
    *sections, last = name.split(separator)
    section = nested_values
    for section_name in sections:
      section = section.setdefault(section_name, {})
    section[last] = value
  return nested_values
