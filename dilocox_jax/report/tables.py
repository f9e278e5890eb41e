"""Builds the tables of a report, as Markdown, as CSV and for a terminal.

In a table of settings (methods with all their hyper-parameters), the cell "-"
means that the setting has no such value.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dilocox_jax.checks import printable
from dilocox_jax.report import style, units
from dilocox_jax.report.escape import markdown, terminal
from dilocox_jax.report.frame import Frame, Setting, mean, standard_error

CellRows = list[dict[str, str]]  # Texts of the cells of each row, by column.
_WITHOUT_END = 10**6  # Characters of a line that is longer than any table.


def _run(frame: Frame, setting: Setting) -> str:
  """Returns the name of a setting, e.g. "diloco (2 of 3 seeds)".

  The number of seeds is left out if no seed is missing.
  """
  missing = units.human_missing(len(setting.seed_runs), frame.num_seeds)
  return setting.label + missing


def _loss(frame: Frame, setting: Setting) -> str:
  """Returns the mean loss of a setting, with its standard error.

  The text is "none yet" for runs without a validation.
  """
  del frame
  if all(map(math.isnan, setting.losses)) and not setting.curves:
    return "none yet"
  return units.human_loss(setting.loss, standard_error(setting.losses))


def _gap(frame: Frame, setting: Setting) -> str:
  """Returns the gap of a setting to its baseline, with its standard error."""
  if not frame.base(setting):
    return "-"
  gap, error = frame.gap(setting)
  return units.human_gap(gap, error)


def _baseline(frame: Frame, setting: Setting) -> str:
  """Returns the name of a setting's baseline."""
  if not frame.base(setting):
    return "-"
  return setting.baseline


def _sent_bytes(frame: Frame, setting: Setting) -> str:
  """Returns the bytes that a replica sent, the mean over seeds."""
  del frame
  return units.human_bytes(setting.sent_bytes)


def _fewer_bytes(frame: Frame, setting: Setting) -> str:
  """Returns `Frame.fewer_bytes` of a setting as text, e.g. "25.3x"."""
  return units.human_ratio(frame.fewer_bytes(setting))


def _steps(frame: Frame, setting: Setting) -> str:
  """Returns how many inner steps the first run of a setting took."""
  del frame
  if not setting.seed_runs:
    return "-"
  return f"{setting.seed_runs[0].steps:,}"


# Function from a frame and a setting to the text of a cell, by column.
CELLS: dict[str, Callable[[Frame, Setting], str]] = {
  "run": _run,
  "loss": _loss,
  "gap": _gap,
  "to": _baseline,
  "sent bytes": _sent_bytes,
  "fewer bytes": _fewer_bytes,
  "steps": _steps,
}


def table(
  frame: Frame,
  columns: Sequence[str],
  settings: Sequence[Setting] | None = None,
  clock: str = "",
) -> CellRows:
  """Returns a row of cells for each setting.

  Args:
    frame: All settings of the report.
    columns: Names of columns, which are keys of `CELLS`.
    settings: Settings to show; None: all.
    clock: Clock (simulated cluster) whose columns are added; "": none.
  """
  if settings is None:
    settings = frame.settings
  rows = []
  for setting in settings:
    row = {column: CELLS[column](frame, setting) for column in columns}
    if clock:
      row |= _times(frame, setting, clock)
    rows.append(row)
  return rows


def _times(frame: Frame, setting: Setting, clock: str) -> dict[str, str]:
  """Returns the cells of a setting in the columns of a simulated cluster.

  The last column is the time to the target loss. Without a target, it is the
  loss at the time at which the fastest setting ends, if there are several
  settings and all have runs.
  """
  cells = {}
  if setting.utilization:
    share = setting.utilization.get(clock, math.nan)
    cells["utilization"] = units.human_share(share)
  time_s = setting.seconds.get(clock, math.nan)
  cells["simulated time"] = units.human_time(time_s)
  has_all_runs = all(other.seed_runs for other in frame.settings)
  if frame.target:
    cells[f"to loss {frame.target:g}"] = reached(setting, clock, frame.target)
  elif len(frame.settings) > 1 and has_all_runs:
    end_s = min(other.seconds[clock] for other in frame.settings)
    steps, loss = setting.after(clock, end_s)
    if not math.isnan(loss):
      text = units.human_loss(loss)
    else:
      # Before its first evaluation a run has no loss, so its steps are shown.
      text = f"{steps} step" if steps == 1 else f"{steps} steps"
    cells[f"loss at {units.human_time(end_s)}"] = text
  return cells


def without_empty_columns(rows: CellRows) -> CellRows:
  """Returns rows without the columns in which all cells are "-".

  There must be at least one row; all have the same columns.
  """
  columns = [
    column for column in rows[0] if any(row[column] != "-" for row in rows)
  ]
  return [{column: row[column] for column in columns} for row in rows]


def numbered(rows: CellRows, names: Sequence[str], column: str) -> CellRows:
  """Numbers rows, and replaces the names of rows in one column by the numbers.

  A new first column, "#", has the numbers of the rows, from 1.

  Args:
    rows: Cells of each row, by column.
    names: Name of each row.
    column: Column with names of other rows, e.g. "to". The result has a column
      "to #" with the numbers of these rows instead. Cells without such a name
      stay.
  """
  numbers = {name: str(number) for number, name in enumerate(names, start=1)}
  numbered_rows = []
  for number, row in enumerate(rows, start=1):
    numbered_row = {"#": str(number)}
    for key, cell in row.items():
      if key == column:
        numbered_row[f"{column} #"] = numbers.get(cell, cell)
      else:
        numbered_row[key] = cell
    numbered_rows.append(numbered_row)
  return numbered_rows


def reached(setting: Setting, clock: str, target: float) -> str:
  """Returns a text of the time at which the seeds of a setting reached a loss.

  Only seeds with evaluations count. The text is, for example:

  - "18 s" or "18 ± 1.2 s" if all of them reached the loss. If other seeds lack
    evaluations, a text such as " (2 of 3 seeds)" follows.
  - "1 of 3 seeds" if only some of them reached it.
  - "not reached" if none of them reached it.
  - "-" if no seed has evaluations.

  Args:
    setting: The setting.
    clock: Name of the simulated cluster.
    target: The loss (nats a token).
  """
  times_s = setting.seconds_to(clock, target)
  if not times_s:
    return "-"
  num_reached = len(times_s) - sum(map(math.isinf, times_s))
  if num_reached == 0:
    return "not reached"
  if num_reached < len(times_s):
    return f"{num_reached} of {len(times_s)} seeds"
  missing = units.human_missing(len(times_s), len(setting.seed_runs))
  time = units.human_time(mean(times_s), standard_error(times_s))
  return time + missing


def price(frame: Frame) -> str:
  """Returns a sentence about the setting that sends fewest bytes, or "".

  `Frame.cheapest` returns this setting. The sentence compares the bytes and the
  loss of the setting with those of its baseline. If the frame has exactly one
  simulated cluster, the sentence also compares the simulated times. The result
  is "" if there is no such setting, or if the baseline sends less than 1.05
  times as much.
  """
  cheapest = frame.cheapest()
  if cheapest is None:
    return ""
  base = frame.base(cheapest)
  if base is None:
    return ""
  ratio = frame.fewer_bytes(cheapest)
  if ratio < 1.05:
    return ""
  sent = "sends nothing"
  if math.isfinite(ratio):
    factor = units.human_ratio(ratio)
    sent = f"sends {factor} less than {style.proper(base.label)}"
  if len(frame.clocks) == 1:
    (clock,) = frame.clocks
    time = units.human_time(cheapest.seconds[clock])
    base_time = units.human_time(base.seconds[clock])
    sent += f", in {time} of simulated time instead of {base_time}"
  gap, error = frame.gap(cheapest)
  loss = units.human_comparison(gap, error)
  if math.isfinite(error) and abs(gap) <= error:
    loss = f"the same within its error ({units.human_gap(gap, error)})"
  elif len(frame.pairs(cheapest)) == 1:
    loss += " (one seed)"
  tokens = units.human_tokens(cheapest.seed_runs[0].tokens)
  base_tokens = units.human_tokens(base.seed_runs[0].tokens)
  if tokens != base_tokens:
    loss += f" after {tokens} instead of {base_tokens}"
  return f"{style.proper(cheapest.label)} {sent}; its loss is {loss}"


def markdown_table(
  header: Sequence[str], rows: Iterable[Sequence[Any]]
) -> list[str]:
  """Returns the lines of a Markdown table.

  Args:
    header: Names of the columns.
    rows: Cells of each row. Cells that are `Markdown` stay as they are, and all
      others are escaped.
  """
  table = [list(header), ["---"] * len(header), *map(list, rows)]
  return ["| " + " | ".join(map(_cell, row)) + " |" for row in table]


def _cell(value: Any) -> str:
  """Returns a value as the text of a Markdown cell."""
  if not isinstance(value, str):
    value = str(value)
  return markdown(value)


def header_and_cells(
  rows: Sequence[Mapping[str, Any]],
) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
  """Splits rows into the names of the columns and a tuple of cells per row.

  There must be at least one row. All have the same columns in one order.
  """
  return tuple(rows[0]), [tuple(row.values()) for row in rows]


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns the text of a CSV file, with numbers at full precision.

  Characters that cannot be printed become escapes, so each row is one line.

  Args:
    rows: Values of each row by column. Columns are in the order in which they
      first appear. A missing value or None gives an empty cell. NaN gives
      "nan".
  """
  # The import is slow, and only this function needs it.
  import pandas as pd

  names = list(dict.fromkeys(name for row in rows for name in row))
  cells = [[row.get(name, "") for name in names] for row in rows]
  # With other types than `object`, whole numbers could become floats.
  table = pd.DataFrame(cells, columns=names, dtype=object)
  table = table.map(_csv_value).rename(columns=printable)
  return table.to_csv(index=False, lineterminator="\n", na_rep="nan")


def _csv_value(value: Any) -> Any:
  """Returns a value as it stands in a cell: None as "", texts printable."""
  if value is None:
    return ""
  return printable(value) if isinstance(value, str) else value


def terminal_table(
  header: Sequence[str],
  rows: Iterable[Sequence[str]],
  left: Collection[int] = (0,),
  **look: Any,
) -> Table:
  """Returns a table without a frame for a terminal.

  Columns of text are folded if they are too wide. Columns of numbers are not,
  but their names have one word on each line.

  Args:
    header: Names of the columns.
    rows: Cells of each row, shown as they are, without markup.
    left: Indices of the columns of text; all others are numbers, aligned right.
    **look: Arguments of `rich.table.Table`, e.g. `title`.
  """
  look = {"title_justify": "left", "caption_justify": "left"} | look
  if "title" in look:
    look["title"] = terminal(look["title"])
  table = Table(box=box.SIMPLE_HEAD, pad_edge=False, **look)  # pyright: ignore
  for index, column in enumerate(header):
    is_number = index not in left
    words = [column]
    if is_number:
      # Numbers must not be folded, so the name of their column is.
      words = column.split(" ")
    table.add_column(
      Text("\n").join(map(terminal, words)),
      justify="right" if is_number else "left",
      overflow="fold",
      no_wrap=is_number,
    )
  for row in rows:
    table.add_row(*map(terminal, row))
  return table


def first_that_fits(layouts: Sequence[Table], console: Console) -> Table:
  """Returns the first layout of a table for which a terminal has room.

  No cell of it is folded. If the terminal has room for none, the result is the
  last layout.
  """
  # With these options a table is as wide as its longest cells need.
  without_end = console.options.update(max_width=_WITHOUT_END)
  for table in layouts:
    needed = console.measure(table, options=without_end).maximum
    if needed <= console.width:
      return table
  return layouts[-1]
