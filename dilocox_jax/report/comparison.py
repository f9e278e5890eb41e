"""Compares several runs, or the settings of a sweep, on one page."""

import collections
import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from dilocox_jax.checks import require
from dilocox_jax.metrics.lines import (
  Directory,
  make_directory,
  write_atomically,
)
from dilocox_jax.report import escape, panels, style, tables, units
from dilocox_jax.report.escape import file_name, markdown
from dilocox_jax.report.frame import Frame, frame_of
from dilocox_jax.report.page import (
  FIGURES,
  picture,
  remove_pictures,
  write_page,
)
from dilocox_jax.report.run import LoadedRun
from dilocox_jax.report.tables import CellRows

# Note below the first table: how to read its columns.
_READING = (
  "Losses (nats a token) are measured: validation losses of the outer"
  " parameters after the last step, as mean over seeds ± standard error. A gap"
  " compares two settings on the seeds that both have, and its error is the"
  " standard error of the gaps of these seeds. Bytes are derived from the plan."
  " The column of fewer bytes is relative to the baseline, or to fp32 gradients"
  " in every step if a setting has no baseline."
)
# Columns of a table of settings, and of a table of runs (`tables.CELLS`).
_OF_SETTINGS = ("run", "loss", "gap", "to", "sent bytes", "fewer bytes")
_OF_RUNS = ("run", "loss", "gap", "sent bytes", "fewer bytes", "steps")
_TEXTS = ("run", "to")  # Columns of text; all others have numbers.
_HOURS = "hours_"  # Start of the file name of a clock's picture.


class Section(NamedTuple):
  """A table of settings, with its title and a note.

  Attributes:
    title: Title of the table.
    rows: Cells of each row.
    note: Text below the table, in Markdown.
    names: Name of the setting of each row.
  """

  title: str
  rows: CellRows
  note: str
  names: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Page:
  """A comparison of settings, for a page or for a terminal.

  Attributes:
    title: Title of the page.
    frame: The settings with their runs. A setting is a method with all its
      hyper-parameters.
    intro: Paragraphs in front of the tables, in Markdown.
    failed: Table rows about the runs that failed. Each row has the columns
      "run", "reason" and "log".
    columns: Columns of the first table, which are keys of `tables.CELLS`, e.g.
      "loss" and "gap". A column whose cells are all "-" is left out.
  """

  title: str
  frame: Frame
  intro: Sequence[str] = ()
  failed: Sequence[Mapping[str, str]] = ()
  columns: Sequence[str] = _OF_SETTINGS

  @property
  def equal(self) -> Frame:
    """The settings that were trained on equally many tokens.

    The number of tokens is the one that most settings have. Settings without a
    run are included. Settings with fewer tokens are included if their loss is
    infinite, as after a divergence.
    """
    num_settings = collections.Counter(
      setting.tokens for setting in self.frame.settings if setting.tokens
    )
    usual_tokens = max(num_settings, key=num_settings.__getitem__, default=0)
    equal_settings = []
    for setting in self.frame.settings:
      has_no_run = setting.tokens == 0
      has_diverged = setting.tokens < usual_tokens and setting.loss == math.inf
      if has_no_run or has_diverged or setting.tokens == usual_tokens:
        equal_settings.append(setting)
    return dataclasses.replace(self.frame, settings=equal_settings)

  def sections(self) -> Iterator[Section]:
    """Yields the tables.

    The first table compares the settings that were trained on equally many
    tokens (`equal`). Then each clock (a simulated cluster) has a table of
    times. If there are other settings, the last table has them.
    """
    frame = self.equal
    names = [setting.name for setting in frame.settings]
    rows = tables.without_empty_columns(tables.table(frame, self.columns))
    yield Section("At equal tokens", rows, _READING, names)
    for clock, description in frame.clocks.items():
      note = (
        "Times are simulated. Between two evaluations the loss is taken to fall"
        " linearly."
      )
      if description != clock:
        note = f"Clock '{markdown(clock)}': {markdown(description)}. {note}"
      rows = tables.table(frame, ("run",), clock=clock)
      yield Section(f"Time on the clock '{clock}'", rows, note, names)
    other_settings = [
      setting
      for setting in self.frame.settings
      if setting not in frame.settings
    ]
    if not other_settings:
      return
    columns = [column for column in _OF_SETTINGS if column != "fewer bytes"]
    rows = tables.table(self.frame, columns, other_settings)
    rows = tables.without_empty_columns(rows)
    for row, setting in zip(rows, other_settings, strict=True):
      for clock in frame.clocks:
        time_s = setting.seconds.get(clock, math.nan)
        row[f"time on '{clock}'"] = units.human_time(time_s)
    yield Section(
      title="With other numbers of tokens",
      rows=rows,
      note="Learning rate schedules end at the last step of each run.",
      names=[setting.name for setting in other_settings],
    )

  def _lines(self) -> Iterator[str]:
    """Yields the lines of the page up to its pictures."""
    for paragraph in self.intro:
      yield paragraph
      yield ""
    for section in self.sections():
      yield from _section(section.title, section.rows)
      yield section.note
      yield ""
    labels = [setting.label for setting in self.equal.pareto_front()]
    front = ", ".join(map(markdown, labels or ["none"]))
    yield (
      f"On the Pareto front of loss and bytes, fewest bytes first: {front}."
    )
    yield ""
    settings = self.frame.settings
    if any(setting.changed for setting in settings):
      changes = [
        {"run": setting.name, "changed": setting.changed}
        for setting in settings
      ]
      yield from _section("Settings", changes)
    if self.failed:
      yield from _section("Failed", self.failed)

  def write(self, out_dir: Directory, command: str = "") -> pathlib.Path:
    """Writes `report.md`, `report.html`, `table.csv` and `figures/`.

    Pictures that an earlier page has left in `figures/` are removed.

    Args:
      out_dir: Directory to write into; created if missing.
      command: Command line to show on the page; "": none.

    Returns:
      Path of `report.md`.

    Raises:
      RecordError: If a file cannot be written or removed, or if a picture
        cannot be read.
    """
    out_dir = make_directory(out_dir)
    lines = [*self._lines(), "## Figures", ""]
    if self.equal.settings:
      lines += _pictures(self.equal, out_dir)
    table = tables.csv_table(self.frame.records())
    write_atomically(out_dir / "table.csv", table)
    return write_page(out_dir, self.title, lines, command)

  def print(self, console: Console) -> None:
    """Prints the tables on a terminal, each in the widest layout that fits."""
    for section in self.sections():
      layouts = list(_layouts(section))
      console.print(tables.first_that_fits(layouts, console))


def _layouts(section: Section) -> Iterator[Table]:
  """Yields layouts of a table for a terminal, the widest first.

  There are three if the table names baselines, otherwise one. In the second
  layout the rows have numbers, and a baseline is named by the number of its
  row. The third layout also lacks the column of fewer bytes.
  """
  rows = section.rows
  yield _terminal_table(section.title, rows)
  if "to" not in rows[0]:
    return
  rows = tables.numbered(rows, section.names, "to")
  yield _terminal_table(section.title, rows)
  rows = [
    {column: cell for column, cell in row.items() if column != "fewer bytes"}
    for row in rows
  ]
  yield _terminal_table(section.title, rows)


def _terminal_table(title: str, rows: CellRows) -> Table:
  """Returns a table of settings for a terminal."""
  header, cells = tables.header_and_cells(rows)
  text_columns = [header.index(name) for name in _TEXTS if name in header]
  return tables.terminal_table(
    header, cells, left=text_columns, collapse_padding=True, title=title
  )


def _section(title: str, rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
  """Yields the lines of a section with a title and one table."""
  header, cells = tables.header_and_cells(rows)
  yield f"## {markdown(title)}"
  yield ""
  yield from tables.markdown_table(header, cells)
  yield ""


def side_by_side(runs: Sequence[LoadedRun]) -> Page:
  """Returns the page that compares several runs.

  Gaps and bytes are relative to the run of AllReduce, or to the last one if
  there are several. Without AllReduce, they are relative to the run that sent
  most bytes. A single run has no gap. A run with another number of tokens than
  the run with which it is compared has no gap either.

  Args:
    runs: Runs, at least one, all evaluated on the same sequences.

  Raises:
    ValueError: If there is no run, or if the runs were not evaluated on the
      same sequences.
  """
  require(bool(runs), "nothing to compare: give at least one run directory")
  _require_one_text(runs)
  runs_by_label = _runs_by_label(runs)
  baseline = ""
  if len(runs) > 1:
    baseline = _baseline(runs_by_label)
  corpus = markdown(runs[0].corpus)
  intro = [*_differences(runs_by_label), f"Losses on the corpus {corpus}."]
  return Page(
    title="Methods side by side",
    frame=frame_of(runs_by_label, baseline),
    intro=intro,
    columns=_OF_RUNS,
  )


def _baseline(runs: Mapping[str, LoadedRun]) -> str:
  """Returns the label of the run with which `side_by_side` compares others."""
  label_by_method = {run.record["method"]: label for label, run in runs.items()}
  if "allreduce" in label_by_method:
    return label_by_method["allreduce"]
  return max(runs, key=lambda label: runs[label].total_sent_bytes)


def _require_one_text(runs: Sequence[LoadedRun]) -> None:
  """Raises ValueError unless all runs were evaluated on the same sequences."""
  first = runs[0]
  for run in runs[1:]:
    require(
      run.record["corpus_digest"] == first.record["corpus_digest"],
      f"losses on different corpora cannot be compared: {first.workdir} has"
      f" {first.corpus}, {run.workdir} has {run.corpus}",
    )
    require(
      run.record.get("held_out_digest") == first.record.get("held_out_digest"),
      f"{first.workdir} and {run.workdir} were evaluated on different windows"
      f" of one text, {first.corpus} and {run.corpus}: these follow from"
      " data.validation_fraction, data.sequence_length, data.batch_size and"
      " evaluation.num_sequences, so make them equal",
    )


def _runs_by_label(runs: Sequence[LoadedRun]) -> dict[str, LoadedRun]:
  """Returns runs by their names on the page: "diloco" or "diloco (run2)".

  If several runs have the same method, the name contains the name of the run's
  directory. If an earlier run already has the resulting name, the name contains
  the path of the directory instead.
  """
  methods = [run.record["method"] for run in runs]
  runs_by_label = {}
  for method, run in zip(methods, runs, strict=True):
    label = method
    if methods.count(method) > 1:
      label = f"{method} ({run.workdir.name})"
    if label in runs_by_label:
      # Two directories in different places may have the same name.
      label = f"{method} ({run.workdir})"
    runs_by_label[label] = run
  return runs_by_label


def _differences(runs: Mapping[str, LoadedRun]) -> Iterator[str]:
  """Yields sentences about differences that a reader would not expect.

  They are about numbers of parameters or replicas, and about runs that were
  evaluated on an average of the parameters.
  """
  fields = {"parameters": "parameter_count", "replicas": "num_replicas"}
  for noun, field in fields.items():
    values = {label: run.record[field] for label, run in runs.items()}
    if len(set(values.values())) > 1:
      values_text = ", ".join(
        f"{markdown(label)} {value:,}" for label, value in values.items()
      )
      yield f"**The runs differ in their {noun}: {values_text}.**"
  averaged = [
    label
    for label, run in runs.items()
    if run.config.get("outer", {}).get("average_power")
  ]
  if averaged:
    labels = ", ".join(map(markdown, averaged))
    yield f"Evaluated on an average of the parameters: {labels}."


def _pictures(frame: Frame, out_dir: pathlib.Path) -> Iterator[str]:
  """Draws the pictures of a page, and yields the lines that show them.

  Pictures of an earlier page are removed. If no setting was evaluated more than
  once, the only picture is loss against bytes.
  """
  titles = {}
  has_curves = any(
    len(points) > 1 for setting in frame.settings for points in setting.curves
  )
  if has_curves:
    titles[panels.TOKENS] = "Validation loss at equal tokens"
  titles[panels.BYTES] = tables.price(frame) or "Loss and bytes"
  if has_curves:
    for clock in frame.clocks:
      titles[clock] = _time_title(frame, clock)
  names = _picture_names(frame)
  new_names = {names[axis] for axis in titles}
  remove_pictures(out_dir, _old_picture_names(out_dir) - new_names)
  for axis, title in titles.items():
    cost = axis
    if axis in frame.clocks:
      cost = f"simulated time on the clock {axis}"
    figure = panels.loss_panel(frame, axis, title, size=(8.4, 5.6))
    yield from picture(figure, out_dir, names[axis], f"Loss against {cost}")


def _picture_names(frame: Frame) -> dict[str, str]:
  """Returns the file names of the pictures, without suffix, by horizontal axis.

  The axis is `panels.TOKENS`, `panels.BYTES` or the name of a clock (simulated
  cluster). All file names differ.
  """
  names = {panels.TOKENS: panels.TOKENS, panels.BYTES: panels.BYTES}
  for clock in frame.clocks:
    name = file_name(f"{_HOURS}{clock}")
    unique_name = name
    number = 1
    while unique_name in names.values():
      number += 1
      unique_name = f"{name}_{number}"
    names[clock] = unique_name
  return names


def _old_picture_names(out_dir: pathlib.Path) -> set[str]:
  """Returns names of pictures that an earlier page may have left, no suffix."""
  names = {panels.TOKENS, panels.BYTES}
  for path in (out_dir / FIGURES).glob(f"{_HOURS}*.png"):
    names.add(path.stem)
  return names


def _time_title(frame: Frame, clock: str) -> str:
  """Returns the title of the picture of loss against simulated time.

  It names the setting that first reaches the target loss, and its baseline, if
  there are both.
  """
  clock_name = escape.picture(clock)
  first = panels.first_to(frame, clock)
  base = frame.base(first) if first else None
  if not first or not base:
    return f"Validation loss in simulated time on '{clock_name}'"
  first_time = tables.reached(first, clock, frame.target)
  base_time = tables.reached(base, clock, frame.target)
  return (
    f"On '{clock_name}' {style.proper(first.label)} reaches loss "
    f"{frame.target:g} in {first_time}, {style.proper(base.label)} in "
    f"{base_time}"
  )
