"""Nested mappings: building dataclasses from them, and comparing them.

Misspelt fields of all sections of a config are found here. The message names
the nearest known field.
"""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from dilocox_jax.checks import did_you_mean, of_type


def dataclass_from(
  cls: Any, values: Mapping[str, Any], prefix: str = ""
) -> Any:
  """Builds a dataclass and the dataclasses in it from a nested mapping.

  Args:
    cls: A dataclass whose fields are plain values or dataclasses.
    values: Values by field; missing fields keep their defaults.
    prefix: Dotted path of `cls` in front of its fields, for messages.

  Raises:
    ValueError: One line that names an unknown field, or a value of a wrong
      type.
  """
  fields = typing.get_type_hints(cls)
  built = {}
  for name, value in values.items():
    path = prefix + name
    if name not in fields:
      raise ValueError(_unknown(path, name, fields))
    kind = fields[name]
    if dataclasses.is_dataclass(kind):
      if not isinstance(value, Mapping):
        raise ValueError(f"{path}={value!r} must be a section of fields")
      built[name] = dataclass_from(kind, value, f"{path}.")
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
      raise ValueError(_unknown(path, name, fields))
    kind = fields[name]


def _unknown(path: str, name: str, fields: Mapping[str, Any]) -> str:
  return f"unknown config field {path!r}: {did_you_mean(name, fields)}"


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
  before, after = flat(old), flat(new)
  return [
    f"{path}: {before.get(path)!r} -> {after.get(path)!r}"
    for path in sorted(before.keys() | after.keys())
    if before.get(path) != after.get(path)
    and not any(f"{path}.".startswith(f"{name}.") for name in free)
  ]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns the values of a nested mapping by their dotted names, in order.

  Args:
    values: A nested mapping; names that are dotted already stay as they are.
    prefix: Text in front of every name.
  """
  by_path: dict[str, Any] = {}
  for name, value in values.items():
    if isinstance(value, Mapping):
      by_path |= flat(value, f"{prefix}{name}.")
    else:
      by_path[prefix + name] = value
  return by_path
