"""The page of a sweep: tables, differences and pictures of its settings.

A sweep may take hours and is often done in several sittings. So runs that are
missing are shown as missing, and everything else is reported.
"""

import collections
import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence

from rich.console import Console

from dilocox_jax.metrics.lines import (
  Directory,
  make_directory,
  write_atomically,
)
from dilocox_jax.report import panels, tables, units
from dilocox_jax.report.frame import Frame, Setting
from dilocox_jax.report.page import picture, write_page
from dilocox_jax.report.text_tables import (
  csv_table,
  header_and_cells,
  markdown_table,
  terminal_table,
)

_LOSSES = ("run", "loss", "gap", "to", "sent bytes", "fewer bytes")
_OTHERS = ("run", "loss", "sent bytes")
_SIZE = (8.4, 5.6)
_READING = (
  "Losses (nats a token) are measured, of the outer parameters after the last"
  " step: mean over seeds ± its standard error. A gap is paired: its error is"
  " that of the gaps of the seeds. Bytes are derived from the plan."
)


@dataclasses.dataclass(frozen=True)
class SweepPage:
  """What the page of a sweep says.

  Attributes:
    name: Name of the sweep.
    frame: All settings.
    intro: Sentences on budget, machines and text.
    notes: Sentences on how to read the page.
    failed: Run, reason and log of each run that failed.
    command: Command line that made the page.
  """

  name: str
  frame: Frame
  intro: str = ""
  notes: Sequence[str] = ()
  failed: Sequence[Mapping[str, str]] = ()
  command: str = ""

  @property
  def equal(self) -> Frame:
    """The settings at equal tokens: as many as most have."""
    tokens = collections.Counter(
      each.traces[0].tokens for each in self.frame.settings if each.traces
    )
    usual = max(tokens, key=tokens.__getitem__, default=0)
    same = [
      each
      for each in self.frame.settings
      if not each.traces or each.traces[0].tokens == usual
    ]
    return dataclasses.replace(self.frame, settings=same)

  @property
  def others(self) -> list[Setting]:
    """The settings with other numbers of tokens."""
    same = [each.name for each in self.equal.settings]
    return [each for each in self.frame.settings if each.name not in same]


def write_sweep(page: SweepPage, out_dir: Directory) -> pathlib.Path:
  """Writes `report.md`, `table.csv` and `figures/`; returns the page's path.

  Args:
    page: What to say.
    out_dir: Directory to write into; made if missing.

  Raises:
    RecordError: If a file cannot be written.
  """
  out_dir = make_directory(out_dir)
  lines = [page.intro, "", *_spaced(f"- {note}" for note in page.notes)]
  for title, rows, note in _tables(page):
    lines += [f"## {title}", "", *markdown_table(*header_and_cells(rows)), ""]
    lines += [note, ""]
  lines += [_front(page.equal), ""]
  if found := [_sentence(page.equal, s) for s in _differences(page.equal)]:
    lines += ["## Differences larger than their error", ""]
    lines += [*(f"- {each}" for each in found), ""]
  settings = [(s.name, s.changed) for s in page.frame.settings if s.changed]
  if settings:
    rows = markdown_table(("run", "changed"), settings)
    lines += ["## Settings", "", *rows, ""]
  if page.equal.settings:
    lines += ["## Figures", "", *_draw(page.equal, out_dir)]
  if page.failed:
    lines += ["## Failed", ""]
    lines += markdown_table(*header_and_cells(page.failed))
  write_atomically(out_dir / "table.csv", csv_table(page.frame.records()))
  return write_page(out_dir, f"Sweep: {page.name}", lines, page.command)


def print_sweep(page: SweepPage, console: Console) -> None:
  """Prints the tables on a terminal.

  Args:
    page: What to say.
    console: Terminal to print on.
  """
  for title, rows, _ in _tables(page):
    for row in rows:
      row.pop("to", None)  # Without it the table fits into 80 columns.
    cells = header_and_cells(rows)
    table = terminal_table(*cells, collapse_padding=True, title=title)
    for column in table.columns:
      column.no_wrap = True
    console.print(table)
  console.print(_front(page.equal), highlight=False)


def _front(frame: Frame) -> str:
  names = ", ".join(each.label for each in frame.pareto_front())
  return f"On the Pareto front of loss and bytes, fewest bytes first: {names}."


def _spaced(lines) -> list[str]:
  return [text for line in lines for text in (line, "")]


def _tables(page: SweepPage) -> list[tuple[str, tables.CellRows, str]]:
  """Returns title, rows and note of each table that has rows."""
  frame, found = page.equal, []
  columns = [c for c in _LOSSES if _is_needed(frame, c)]
  found.append(("At equal tokens", tables.table(frame, columns), _READING))
  for clock, what in frame.clocks.items():
    rows = tables.table(frame, ("run",), clock=clock)
    note = (
      f"Clock '{clock}': {what}. Times are simulated. Between two evaluations"
      " the loss is taken to fall linearly."
    )
    found.append((f"Time on the clock '{clock}'", rows, note))
  if page.others:
    rows = tables.table(page.frame, _OTHERS, page.others)
    for clock in page.frame.clocks:
      for row, each in zip(rows, page.others, strict=True):
        time_s = each.seconds.get(clock, math.nan)
        row[f"time on '{clock}'"] = units.human_time(time_s)
    note = "Learning rate schedules end at the last step of each run."
    found.append(("With other numbers of steps", rows, note))
  return [each for each in found if each[1]]


def _is_needed(frame: Frame, column: str) -> bool:
  compares = any(frame.base(each) for each in frame.settings)
  return compares or column not in ("gap", "to", "fewer bytes")


def _differences(frame: Frame) -> list[Setting]:
  """Returns the settings whose gap exceeds its error, by the gap."""
  gaps = [(*frame.gap(each), n) for n, each in enumerate(frame.settings)]
  return [
    frame.settings[n] for gap, error, n in sorted(gaps) if abs(gap) > error
  ]


def _sentence(frame: Frame, setting: Setting) -> str:
  gap = units.human_comparison(*frame.gap(setting))
  fewer = frame.fewer_bytes(setting)
  sent = f", with {units.human_ratio(fewer)} fewer bytes" if fewer > 1 else ""
  base = frame.base(setting)
  than = base.label if base else setting.baseline
  return f"{setting.label} ends {gap} than {than}{sent}."


def _draw(frame: Frame, out_dir: pathlib.Path) -> list[str]:
  lines = []
  drawn = {"bytes": (panels.BYTES, tables.price(frame) or "Loss and bytes")}
  if any(len(points) > 1 for s in frame.settings for points in s.curves):
    title = "Validation loss at equal tokens"
    drawn = {"tokens": (panels.TOKENS, title)} | drawn
    for clock in frame.clocks:
      drawn[f"hours_{clock}"] = (clock, _time_title(frame, clock))
  for name, (axis, title) in drawn.items():
    figure = panels.loss_panels(frame, [axis], title, _SIZE)
    against = name.replace("hours_", "simulated time on the clock ")
    lines += picture(figure, out_dir, name, f"Loss against {against}")
  return lines


def _time_title(frame: Frame, clock: str) -> str:
  """Names what reaches the target loss first, beside its baseline."""
  first = panels.first_to(frame, clock)
  base = frame.base(first) if first else None
  if not first or not base:
    return f"Validation loss in simulated time on '{clock}'"
  own, other = (
    tables.reached(each, clock, frame.target) for each in (first, base)
  )
  start = f"On '{clock}' {first.label} reaches loss {frame.target:g} in {own}"
  return f"{start}, {base.label} in {other}"
