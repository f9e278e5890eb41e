"""Reads numbers with units, as people write them in a cluster file.

Examples: "1 Gbit/s", "40 ms", "16 MiB", "312 TFLOP/s", "2 %". A unit is
required, so that no rate is wrong by a factor of eight or of a million. "bit"
is spelled out, because Gb and GB differ only by the case of a letter.
"""

import dataclasses
import decimal
import math
import re
from typing import Any

from dilocox_jax.checks import require, shown

# A number in the first group, and the rest of the text in the second group.
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|inf)(.*)")


@dataclasses.dataclass(frozen=True)
class Dimension:
  """A kind of quantity, such as a rate, and its units.

  Attributes:
    name: Name of the dimension, for messages.
    units: Size of each unit, by its name, in bit/s, seconds, bytes, FLOP/s or a
      fraction. For example, "ms" has the size "1e-3".
    example: Name of the unit that messages recommend.
  """

  name: str
  units: dict[str, str]
  example: str


_POWERS = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def _metric(unit: str, prefixes: str) -> dict[str, str]:
  """Returns the sizes of a unit and of its multiples, by their names.

  Args:
    unit: Name of the unit, e.g. "B".
    prefixes: Letters in `_POWERS`; "kM" adds "kB" and "MB" to "B".
  """
  return {prefix + unit: f"1e{_POWERS[prefix]}" for prefix in ("", *prefixes)}


_BYTES_A_SECOND = {"B/s": "8", "kB/s": "8e3", "MB/s": "8e6", "GB/s": "8e9"}
_TIMES = {"us": "1e-6", "ms": "1e-3", "s": "1", "min": "60", "h": "3600"}
_BINARY = {"KiB": "1024", "MiB": "1048576", "GiB": "1073741824"}
RATE = Dimension("rate", _metric("bit/s", "kMGT") | _BYTES_A_SECOND, "Mbit/s")
TIME = Dimension("time", _TIMES, "ms")
SIZE = Dimension("size", _metric("B", "kMGT") | _BINARY, "MB")
COMPUTE = Dimension("compute rate", _metric("FLOP/s", "GTPE"), "TFLOP/s")
SHARE = Dimension("share", {"%": "1e-2"}, "%")


def parse_quantity(text: Any, dimension: Dimension, field: str) -> float:
  """Converts text such as "2 %" to bit/s, seconds, bytes, FLOP/s or a fraction.

  For example, "100 Mbit/s" is 1e8, and "2 %" is 0.02.

  Args:
    text: A number of at least 0, and its unit. "inf bit/s" is unlimited.
    dimension: The dimension that is expected.
    field: Name of the field that has the text, for messages.

  Raises:
    ValueError: One line that names the field, if the text is no such quantity.
  """
  match = _NUMBER.fullmatch(str(text).strip())
  example = dimension.example
  kind = dimension.name
  if match is None:
    hint = f"write e.g. '1 {example}'"
    raise ValueError(f"{field}: {shown(text)} is no {kind}: {hint}")
  number = match.group(1)
  unit = match.group(2).strip()
  short = number[:20]
  hint = f"write e.g. '{short} {example}'"
  require(unit != "", f"{field}: {short} has no unit: {hint}")
  require(not number.startswith("-"), f"{field}: {shown(text)} is below 0")
  units = ", ".join(dimension.units)
  require(
    unit in dimension.units,
    f"{field}: {shown(text)} has no unit of a {kind}: have {units}",
  )
  try:
    factor = decimal.Decimal(dimension.units[unit])
    value = float(decimal.Decimal(number) * factor)
  except decimal.DecimalException:
    value = math.nan
  is_in_range = math.isfinite(value) or number == "inf"
  require(is_in_range, f"{field}: {shown(text)} is out of range")
  return value
