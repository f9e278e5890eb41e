"""What every table of predictions is made of, whatever the paper.

A prediction that was fitted on the number it stands beside proves nothing, so
no row can be made without saying where its prediction comes from.
"""

import dataclasses
import re
from collections.abc import Sequence

from matplotlib.figure import Figure as Picture

from dilocox_jax.simulate.published import Figure

DERIVED = "derived"  # Nothing was fitted.
FITTED_HERE = "fitted on this row"  # A constant was chosen to match it.
FITTED_ELSEWHERE = "fitted elsewhere"  # Its constants match other rows.
KINDS = (DERIVED, FITTED_HERE, FITTED_ELSEWHERE)


@dataclasses.dataclass(frozen=True)
class TableRow:
  """One figure of a paper and its prediction.

  Attributes:
    published: The paper's; it names the row.
    predicted: In the paper's unit.
    kind: One of `KINDS`.
    basis: What was fitted or assumed, in a few words.
    grid_steps: Error in steps of the paper's grid, where it has one.
  """

  published: Figure
  predicted: float
  kind: str
  basis: str = ""
  grid_steps: int | None = None

  def __post_init__(self):
    _check_kind(self.kind)

  @property
  def relative_error(self) -> float:
    """(predicted - published) / published."""
    return self.predicted / self.published.value - 1

  @property
  def error(self) -> str:
    """As a reader sees it: grid steps where there is a grid."""
    if self.grid_steps is not None:
      return f"{self.grid_steps:+d} steps" if self.grid_steps else "exact"
    return f"{self.relative_error:+.1%}"


@dataclasses.dataclass(frozen=True)
class Prediction:
  """A number that no paper states.

  Attributes:
    name: What it is.
    predicted: In `unit`.
    unit: As in `Figure`.
    kind: One of `KINDS`.
    basis: What was fitted or assumed, in a few words.
  """

  name: str
  predicted: float
  unit: str
  kind: str
  basis: str = ""

  def __post_init__(self):
    _check_kind(self.kind)


def _check_kind(kind: str) -> None:
  if kind not in KINDS:
    raise ValueError(f"kind={kind!r} must be one of {', '.join(KINDS)}")


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows of one table, what was assumed, and how to show them.

  Attributes:
    name: Of its files: letters and underscores.
    title: For readers.
    rows: All of them; they go to CSV and JSON.
    paragraphs: What was assumed, what it means, what it cannot test.
    header: Of the table people see; the rows themselves if empty.
    cells: Below that header.
    pictures: File name without suffix to caption and figure.
  """

  name: str
  title: str
  rows: Sequence[TableRow | Prediction]
  paragraphs: Sequence[str]
  header: Sequence[str] = ()
  cells: Sequence[Sequence[str]] = ()
  pictures: dict[str, tuple[str, Picture]] = dataclasses.field(
    default_factory=dict
  )

  def shown(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and cells of the table people see."""
    if self.header:
      return self.header, self.cells
    header = ("figure", "published", "predicted", "error", "kind", "basis")
    return header, [_cells(row) for row in self.rows]


def _cells(row: TableRow | Prediction) -> tuple[str, ...]:
  if isinstance(row, Prediction):
    value = f"{_short(row.predicted)} {row.unit}"
    return row.name, "", value, "", row.kind, row.basis
  figure = row.published
  value = f"{figure.value:g} {figure.unit}"
  return (
    re.sub(r"^table \d+, ", "", figure.name),
    value if figure.is_verified else f"{value} (unverified)",
    _short(row.predicted),
    row.error,
    row.kind,
    row.basis,
  )


def _short(value: float) -> str:
  return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.4g}"
