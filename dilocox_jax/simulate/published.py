"""Reads figures that papers report from data files.

Predictions of the simulator are compared with these figures. Some figures that
people quote were never checked in the paper. So every figure must name its
source and its status, and a file in which one of them is missing is refused.
The caller says where the files are.
"""

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

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
      if not getattr(self, field).strip():
        raise ValueError(f"{field} is missing")
    if not math.isfinite(self.value):
      raise ValueError(f"value={self.value} must be finite")
    if self.status not in STATUSES:
      allowed = " or ".join(map(repr, STATUSES))
      raise ValueError(f"status={self.status!r} must be {allowed}")

  @property
  def is_verified(self) -> bool:
    """Whether the figure was read in its source."""
    return self.status == STATUSES[0]


def load_published(path: str | os.PathLike[str]) -> dict[str, Figure]:
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
  path = pathlib.Path(path)
  try:
    content = json.loads(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise ValueError(f"{path}: {error.strerror or 'cannot be read'}") from error
  except ValueError as error:
    raise ValueError(f"{path}: the file is not JSON ({error})") from error
  if not isinstance(content, dict) or set(content) != {"paper", "figures"}:
    raise ValueError(
      f'{path}: the file must be {{"paper": citation, "figures": [...]}}'
    )
  if not isinstance(content["figures"], list):
    raise ValueError(f"{path}: figures must be a list")
  figures: dict[str, Figure] = {}
  for number, entry in enumerate(content["figures"], start=1):
    where = f"{path}: figure {number}"
    if isinstance(entry, dict) and isinstance(entry.get("name"), str):
      where += f" ({entry['name']!r})"
    try:
      figure = _figure(entry)
    except ValueError as error:
      raise ValueError(f"{where}: {error}") from error
    if figure.name in figures:
      raise ValueError(f"{where}: another figure has this name: rename one")
    figures[figure.name] = figure
  return figures


def _figure(entry: Any) -> Figure:
  """Returns the figure that a JSON object describes.

  Args:
    entry: Content of the JSON object.

  Raises:
    ValueError: If a field is missing, unknown or of the wrong type.
  """
  if not isinstance(entry, dict):
    raise ValueError("a figure must be a JSON object")
  fields = {field.name: field for field in dataclasses.fields(Figure)}
  if unknown := sorted(set(entry) - set(fields)):
    raise ValueError(
      f"{unknown[0]} is not a field: the fields are {', '.join(fields)}"
    )
  for name, field in fields.items():
    if name not in entry:
      if field.default is dataclasses.MISSING:
        raise ValueError(f"{name} is missing")
      continue
    value, numeric = entry[name], name == "value"
    types = (int, float) if numeric else (str,)
    if isinstance(value, bool) or not isinstance(value, types):
      expected = "a number" if numeric else "a text"
      raise ValueError(f"{name}={value!r} must be {expected}")
  return Figure(**{**entry, "value": float(entry["value"])})
