"""Reads figures that papers report from data files.

Predictions of the simulator are compared with these figures. Some figures that
people quote were never checked in the paper. So every figure must name its
source and its status, and a file in which one of them is missing is refused.
The caller says where the files are.
"""

import dataclasses
import math
import pathlib
from typing import Any

from dilocox_jax.checks import (
  in_front,
  json_object,
  known,
  of_type,
  one_of,
  require,
)

STATUSES = ("published", "recalled, unverified")


@dataclasses.dataclass(frozen=True)
class Figure:
  """Holds one number of a paper.

  Attributes:
    name: Name of the figure, unique in its file.
    value: Value of the figure, in `unit`.
    unit: Unit as printed in the paper, e.g. "Gbit/s"; "ratio" for a number
      without a unit.
    source: Paper, and the table or section with the figure.
    status: Whether the figure was read in the paper, one of `STATUSES`.
    note: Remark for readers; may be empty.
  """

  name: str
  value: float
  unit: str
  source: str
  status: str
  note: str = ""

  def __post_init__(self):
    for field in ("name", "unit", "source"):
      require(getattr(self, field).strip() != "", f"{field} is missing")
    require(math.isfinite(self.value), f"value={self.value} must be finite")
    one_of("status", self.status, STATUSES)

  @property
  def is_verified(self) -> bool:
    """Whether the figure was read in its source."""
    return self.status == STATUSES[0]


def load_published(path: pathlib.Path) -> dict[str, Figure]:
  """Reads the figures of one paper.

  Args:
    path: Path of a JSON file {"paper": citation, "figures": [figure, ...]}.
      Every figure has the fields of `Figure`; the note may be left out.

  Returns:
    Figures by name, in the order of the file.

  Raises:
    ValueError: If the file cannot be read, or a field is missing, unknown or
      wrong. The message is one line that names the file and the figure.
  """
  with in_front(f"{path}: "):
    return _figures(path)


def _figures(path: pathlib.Path) -> dict[str, Figure]:
  try:
    content = json_object(path.read_text(encoding="utf-8"), "the file")
  except OSError as error:
    raise ValueError(error.strerror or "cannot be read") from error
  entries = content.get("figures")
  is_whole = set(content) == {"paper", "figures"} and isinstance(entries, list)
  require(is_whole, 'the file must be {"paper": citation, "figures": [...]}')
  figures: dict[str, Figure] = {}
  for number, entry in enumerate(entries or (), start=1):
    name = entry.get("name") if isinstance(entry, dict) else None
    with in_front(f"figure {number} ({name!r}): "):
      figure = _figure(entry)
      is_new = figure.name not in figures
      require(is_new, "another figure has this name: rename one")
    figures[figure.name] = figure
  return figures


def _figure(entry: Any) -> Figure:
  """Returns the figure that a JSON object describes.

  Args:
    entry: Content of the JSON object.

  Raises:
    ValueError: If a field is missing, unknown or of the wrong type.
  """
  of_type("a figure", entry, dict)
  fields = {field.name: field for field in dataclasses.fields(Figure)}
  for name in entry:
    known("field", name, fields)
  for name, field in fields.items():
    is_given = name in entry or field.default is not dataclasses.MISSING
    require(is_given, f"{name} is missing")
  kinds = {name: float if name == "value" else str for name in entry}
  return Figure(**{n: of_type(n, v, kinds[n]) for n, v in entry.items()})
