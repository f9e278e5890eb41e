"""Checks of values; their messages say what is wrong and what is allowed."""

import difflib
from collections.abc import Iterable
from typing import Any


def require(condition: bool, message: str) -> None:
  """Raises ValueError with a message unless a condition holds."""
  if not condition:
    raise ValueError(message)


def positive(section: str, **values: int | float | None) -> None:
  """Raises ValueError for the first value of a section that is not above 0.

  Args:
    section: Name of the section, for the message.
    **values: Values by the names of their fields; None passes.
  """
  for name, value in values.items():
    require(
      value is None or value > 0, f"{section}.{name}={value} must be positive"
    )


def within(
  low: int, high: float | int, section: str, **values: float | int | None
) -> None:
  """Raises ValueError for the first value outside a range, or not a number.

  Args:
    low: The smallest value that is allowed.
    high: The largest value that is allowed.
    section: Name of the section, for the message.
    **values: Values by the names of their fields; None passes.
  """
  for name, value in values.items():
    require(
      value is None or low <= value <= high,
      f"{section}.{name}={value} must be from {low:g} to {high:g}",
    )


def at_least(low: int, **values: int) -> None:
  """Raises ValueError for the first value below a bound.

  Args:
    low: The smallest value that is allowed.
    **values: Values by the names of their fields.
  """
  for name, value in values.items():
    require(value >= low, f"{name}={value} must be at least {low}")


def one_of(name: str, value: Any, choices: Iterable[Any]) -> None:
  """Raises ValueError, which lists the choices, for any other value."""
  choices = list(choices)
  if value not in choices:
    names = ", ".join(str(choice) for choice in choices)
    raise ValueError(f"{name}={value!r} must be one of {names}")


def did_you_mean(name: str, names: Iterable[str]) -> str:
  """Returns the end of a message: the nearest known name, or all names."""
  names = list(names)
  near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
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
    raise ValueError(f"unknown {what} {name!r}: {did_you_mean(name, names)}")
