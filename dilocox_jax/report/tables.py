"""Tables: the cells of a frame, and forms for pages, programs, terminals."""

import csv
import io
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from dilocox_jax.report import style, units
from dilocox_jax.report.escape import markdown, terminal
from dilocox_jax.report.frame import Frame, Setting, mean, standard_error

CellRows = list[dict[str, str]]


def _loss(setting: Setting) -> str:
  if all(map(math.isnan, setting.losses)) and not setting.curves:
    return "none yet"
  return units.human_loss(setting.loss, standard_error(setting.losses))


CELLS: dict[str, Callable[[Frame, Setting], str]] = {
  "run": lambda f, s: s.label + units.human_missing(len(s.traces), f.num_seeds),
  "loss": lambda _, s: _loss(s),
  "gap": lambda f, s: units.human_gap(*f.gap(s)) if f.base(s) else "-",
  "to": lambda f, s: s.baseline if f.base(s) else "-",
  "sent bytes": lambda _, s: units.human_bytes(s.sent_bytes),
  "fewer bytes": lambda f, s: units.human_ratio(f.fewer_bytes(s)),
  "steps": lambda _, s: f"{s.traces[0].steps:,}" if s.traces else "-",
}


def table(
  frame: Frame,
  columns: Sequence[str],
  settings: Sequence[Setting] | None = None,
  clock: str = "",
) -> CellRows:
  """Returns the cells of each setting by column.

  Args:
    frame: What the report is about.
    columns: Names of `CELLS`.
    settings: Those to show; by default all.
    clock: Name of the clock whose columns are added; empty for none.
  """
  return [
    {name: CELLS[name](frame, each) for name in columns}
    | (_times(frame, each, clock) if clock else {})
    for each in (frame.settings if settings is None else settings)
  ]


def _times(frame: Frame, setting: Setting, clock: str) -> dict[str, str]:
  cells = {}
  if setting.utilization:
    share = setting.utilization.get(clock, math.nan)
    cells["utilization"] = units.human_share(share)
  time_s = setting.seconds.get(clock, math.nan)
  cells["simulated time"] = units.human_time(time_s)
  if frame.target:
    cells[f"to loss {frame.target:g}"] = reached(setting, clock, frame.target)
  elif len(frame.settings) > 1 and all(s.traces for s in frame.settings):
    end_s = min(each.seconds[clock] for each in frame.settings)
    steps, loss = setting.after(clock, end_s)
    # Before its first evaluation a run has no loss, but steps.
    so_far = f"{steps} step{'s' * (steps != 1)}"
    shown = so_far if math.isnan(loss) else units.human_loss(loss)
    cells[f"loss at {units.human_time(end_s)}"] = shown
  return cells


def without_empty_columns(rows: CellRows) -> CellRows:
  """Returns rows without the columns in which no row has anything."""
  kept = [k for k in rows[0] if any(row[k] != "-" for row in rows)]
  return [{name: row[name] for name in kept} for row in rows]


def reached(setting: Setting, clock: str, target: float) -> str:
  """Says when a loss was reached, or by how many of the seeds with a curve.

  Args:
    setting: The setting.
    clock: Name of the clock.
    target: The loss (nats a token).
  """
  times_s = setting.seconds_to(clock, target)
  if count := sum(map(math.isinf, times_s)):
    some = len(times_s) - count
    return f"{some} of {len(times_s)} seeds" if some else "not reached"
  missing = units.human_missing(len(times_s), len(setting.traces))
  time = units.human_time(mean(times_s), standard_error(times_s))
  return time + (missing if times_s else "")


def price(frame: Frame) -> str:
  """States what the cheapest setting near its baseline pays for its bytes.

  A loss is called higher or lower only if the difference exceeds its error.
  Empty if there is nothing to compare, or nothing is saved.
  """
  least = frame.cheapest()
  base = frame.base(least) if least else None
  if not least or not base or (ratio := frame.fewer_bytes(least)) < 1.05:
    return ""
  than = style.proper(base.label)
  sent = f"sends {units.human_ratio(ratio)} less than {than}"
  if not math.isfinite(ratio):
    sent = "sends nothing"
  for clock in frame.clocks if len(frame.clocks) == 1 else ():
    times = (units.human_time(each.seconds[clock]) for each in (least, base))
    sent += ", in {} of simulated time instead of {}".format(*times)
  gap, error = frame.gap(least)
  loss = units.human_comparison(gap, error)
  if math.isfinite(error) and abs(gap) <= error:
    loss = f"the same within its error ({units.human_gap(gap, error)})"
  elif len(frame.pairs(least)) == 1:
    loss += " (one seed)"
  after = [units.human_tokens(each.traces[0].tokens) for each in (least, base)]
  if len(set(after)) > 1:
    loss += " after {} instead of {}".format(*after)
  return f"{style.proper(least.label)} {sent}; its loss is {loss}"


def markdown_table(
  header: Sequence[str], rows: Iterable[Sequence[Any]]
) -> list[str]:
  """Returns the lines of a Markdown table.

  Args:
    header: Names of the columns.
    rows: Cells, shown as they are, but for those that are `escape.Markdown`.
  """
  table = [list(header), ["---"] * len(header), *map(list, rows)]
  return ["| " + " | ".join(map(_cell, row)) + " |" for row in table]


def _cell(value: Any) -> str:
  return markdown(value if isinstance(value, str) else str(value))


def header_and_cells(
  rows: Sequence[Mapping[str, Any]],
) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
  """Splits rows, at least one, that all have the same columns in one order."""
  return tuple(rows[0]), [tuple(row.values()) for row in rows]


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns comma-separated values at full precision.

  Args:
    rows: Values by column. Columns have the order in which rows first name
      them. A row without a column has an empty cell there.
  """
  columns = list(dict.fromkeys(name for row in rows for name in row))
  lines = [_csv_line(columns)]
  lines += [_csv_line([row.get(name, "") for name in columns]) for row in rows]
  return "".join(lines)


def _csv_line(values: Sequence[Any]) -> str:
  """Returns values joined by commas, quoted where they have line breaks.

  The writer quotes what the end of its lines has in it. So that end is a
  carriage return and a line feed here, or only line feeds would be quoted.
  """
  text = io.StringIO()
  csv.writer(text, lineterminator="\r\n").writerow(values)
  return text.getvalue().removesuffix("\r\n") + "\n"


def terminal_table(
  header: Sequence[str],
  rows: Iterable[Sequence[str]],
  left: Collection[int] = (0,),
  **look: Any,
) -> Table:
  """Returns a table for a terminal; cells that are too wide are folded.

  It has no frame, so that more fits into 80 columns.

  Args:
    header: Names of the columns.
    rows: Cells, shown as they are, without markup.
    left: Indices of the columns of text. The others hold numbers, which are
      aligned on the right.
    **look: Arguments of `rich.table.Table`, e.g. its title.
  """
  look = {"title_justify": "left", "caption_justify": "left"} | look
  if "title" in look:
    look["title"] = terminal(look["title"])
  table = Table(box=box.SIMPLE_HEAD, pad_edge=False, **look)  # pyright: ignore
  for index, column in enumerate(header):
    side = "left" if index in left else "right"
    is_number = index not in left
    # Names give way to numbers, which are read in one piece.
    words = column.split(" ") if is_number else [column]
    name = Text("\n").join(map(terminal, words))
    table.add_column(name, justify=side, overflow="fold", no_wrap=is_number)
  for row in rows:
    table.add_row(*map(terminal, row))
  return table
