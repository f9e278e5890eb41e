"""Numbers that carry their units, as people write them, and their ranges.

A bandwidth without a unit is sooner or later wrong by a factor of eight or of
a million. So every quantity in a cluster file has its unit: "1 Gbit/s",
"40 ms", "16 MiB", "312 TFLOP/s", "2 %". Bits and bytes would differ by the
case of one letter (Gb, GB), hence "bit" is always spelt out. Decimal
arithmetic keeps what was written: "0.1 ms" is exactly the float 1e-4.
"""

import dataclasses
import decimal
import functools
import math
import re
import typing
from typing import Any

_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|inf)(.*)")


@dataclasses.dataclass(frozen=True)
class Dimension:
  """What a quantity measures, and in which units.

  Attributes:
    name: Name of the dimension, for messages.
    units: Names of units to their size in the base unit, as decimals.
    base: Unit of the numbers that the program computes with.
    example: Unit that messages recommend.
    foreign: Further units that can be read but are never printed.
  """

  name: str
  units: dict[str, str]
  base: str
  example: str
  foreign: dict[str, str] = dataclasses.field(default_factory=dict)


_POWERS = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def _metric(unit: str, prefixes: str) -> dict[str, str]:
  return {p + unit: f"1e{_POWERS[p]}" for p in ("", *prefixes)}


RATE = Dimension(
  "rate",
  _metric("bit/s", "kMGT"),
  base="bit/s",
  example="Mbit/s",
  foreign={"B/s": "8", "kB/s": "8e3", "MB/s": "8e6", "GB/s": "8e9"},
)
TIME = Dimension(
  "time",
  {"us": "1e-6", "ms": "1e-3", "s": "1", "min": "60", "h": "3600"},
  base="s",
  example="ms",
)
_BINARY = {"KiB": "1024", "MiB": "1048576", "GiB": "1073741824"}
SIZE = Dimension("size", _metric("B", "kMGT") | _BINARY, "B", "MB")
COMPUTE = Dimension(
  "compute rate", _metric("FLOP/s", "GTPE"), "FLOP/s", "TFLOP/s"
)
SHARE = Dimension("share", {"%": "1e-2"}, base="", example="%")


def parse_quantity(text: Any, dimension: Dimension, field: str) -> float:
  """Returns the number that a text with a unit stands for.

  Args:
    text: A number and its unit, e.g. "100 Mbit/s"; "inf bit/s" is unlimited.
    dimension: The dimension that is expected.
    field: Where the text was written, for messages.

  Returns:
    The value in the base unit of the dimension; a share as a fraction.

  Raises:
    ValueError: One line that names the field and a unit it expects.
  """
  match = _NUMBER.fullmatch(str(text).strip())
  if match is None:
    raise ValueError(
      f"{field}: {text!r} is no {dimension.name}:"
      f" write e.g. '1 {dimension.example}'"
    )
  number, unit = match.group(1), match.group(2).strip()
  if not unit:
    raise ValueError(
      f"{field}: {number} has no unit:"
      f" write e.g. '{number} {dimension.example}'"
    )
  factor = (dimension.units | dimension.foreign).get(unit)
  if factor is None:
    units = ", ".join([*dimension.units, *dimension.foreign])
    raise ValueError(
      f"{field}: {text!r} has no unit of a {dimension.name}: have {units}"
    )
  try:
    return float(decimal.Decimal(number) * decimal.Decimal(factor))
  except decimal.Overflow:
    raise ValueError(f"{field}: {text!r} is too large") from None


def format_quantity(value: float, dimension: Dimension) -> str:
  """Returns the shortest text that `parse_quantity` reads back exactly.

  Among equally short texts it prefers a number between 1 and 1000, and then
  the smaller unit: 1e9 bit/s is "1 Gbit/s", 0.1 s is "0.1 s" ("100 ms" is
  longer).

  Args:
    value: Number in the base unit of the dimension; a share as a fraction.
    dimension: The dimension.
  """
  if not math.isfinite(value):
    return f"{value} {dimension.base or '%'}"
  texts = []
  for unit, factor in dimension.units.items():
    number = decimal.Decimal(repr(float(value))) / decimal.Decimal(factor)
    text = f"{_number(number)} {unit}"
    texts.append((len(text), not 1 <= abs(number) < 1000, len(texts), text))
  return min(texts)[-1]


def _number(value: decimal.Decimal) -> str:
  """Returns digits without an exponent and without zeros at the end."""
  text = f"{value:f}"
  return text.rstrip("0").rstrip(".") if "." in text else text


@dataclasses.dataclass(frozen=True)
class FileKey:
  """How a cluster file states an attribute.

  Attributes:
    name: The key.
    holds: Type of the value (str, int, float, bool, tuple), or the dimension
      of a quantity that is written with its unit.
    low: The least value; None: there is no range.
    high: The greatest value.
    ends: "[" or "(" and "]" or ")": whether the ends belong to the range.
  """

  name: str
  holds: type | Dimension
  low: float | int | None = None
  high: float | int = math.inf
  ends: str = "[]"

  def check(self, attribute: str, value: Any) -> None:
    """Raises ValueError unless a value is absent or in its range."""
    if self.low is None or value is None:
      return
    above = value >= self.low if self.ends[0] == "[" else value > self.low
    below = value <= self.high if self.ends[1] == "]" else value < self.high
    if above and below:
      return
    least = "at least" if self.ends[0] == "[" else "more than"
    wanted = f"be {least} {self._shown(self.low)}"
    if math.isfinite(self.high):
      most = "at most" if self.ends[1] == "]" else "less than"
      wanted += f" and {most} {self._shown(self.high)}"
    elif self.ends[1] == ")":
      wanted += " and finite"
    raise ValueError(f"{attribute}={self._shown(value)} must {wanted}")

  def _shown(self, number: float | int) -> str:
    if isinstance(self.holds, Dimension):
      return format_quantity(float(number), self.holds)
    return f"{number:g}"


@functools.cache
def file_keys(section: type) -> dict[str, FileKey]:
  """Returns the keys of a section of a cluster file, by attribute.

  Args:
    section: `Link`, `Site`, `Pair`, `Jitter` or `SiteOutage`.
  """
  hints = typing.get_type_hints(section, include_extras=True)
  return {
    attribute: key
    for attribute, hint in hints.items()
    for key in getattr(hint, "__metadata__", ())
    if isinstance(key, FileKey)
  }


class Checked:
  """Checks every attribute that has a range."""

  def __post_init__(self):
    for attribute, key in file_keys(type(self)).items():
      key.check(attribute, getattr(self, attribute))


# Keys of what is positive, and of times that may be zero.
positive = functools.partial(FileKey, low=0, ends="(]")
duration = functools.partial(FileKey, holds=TIME, low=0, ends="[)")
