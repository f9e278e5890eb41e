"""Checks of values; their messages say what is wrong and what is allowed."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from typing import Any


def require(condition: bool, message: str) -> None:
  """Raises ValueError with a message unless a condition holds."""
  if not condition:
    raise ValueError(message)


@contextlib.contextmanager
def in_front(text: str) -> Iterator[None]:
  """Puts a text, e.g. "sync.", in front of the message of a ValueError."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f"{text}{error}") from error


def within_limits(
  name: str,
  value: Any,
  *,
  choices: Iterable[Any] | None = None,
  above: float | int | None = None,
  below: float | int | None = None,
  between: tuple[float | int, float | int] | None = None,
) -> None:
  """Raises ValueError for a value outside one of the limits that are given.

  Args:
    name: Name of the value, for the message.
    value: The value to check. NaN is outside every range.
    choices: The only values that are allowed.
    above: Number that the value must exceed.
    below: Number that the value must not reach.
    between: The smallest and the largest value that are allowed.
  """
  if choices is not None:
    one_of(name, value, choices)
  if above is not None:
    require(value > above, f"{name}={value} must be above {above:g}")
  if below is not None:
    require(value < below, f"{name}={value} must be below {below:g}")
  if between is not None:
    low, high = between
    message = f"{name}={value} must be from {low:g} to {high:g}"
    require(low <= value <= high, message)


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
