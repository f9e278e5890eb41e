"""Several runs, or all settings of a sweep, in the same tables and pictures.

A loss means nothing across two texts, and the default text differs between
Python versions. So runs with different digests are refused, also if they only
differ in the windows of one corpus that they are evaluated on. A sweep may take
hours and is often done in several sittings: runs that are missing are shown as
missing, and everything else is reported.
"""

import collections
import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console

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

_READING = (
  "Losses (nats a token) are measured, of the outer parameters after the last"
  " step: mean over seeds ± its standard error. A gap is paired: its error is"
  " that of the gaps of the seeds. Bytes are derived from the plan; fewer bytes"
  " are relative to the baseline, without one to fp32 gradients in every step."
)
_OF_SETTINGS = ("run", "loss", "gap", "to", "sent bytes", "fewer bytes")
_HOURS = "hours_"  # Begin of the name of a picture of a clock.
_OF_RUNS = ("run", "loss", "gap", "sent bytes", "fewer bytes", "steps")


@dataclasses.dataclass(frozen=True)
class Page:
  """What a comparison says, on a page and on a terminal.

  Attributes:
    title: Title of the page.
    frame: All settings.
    intro: Paragraphs in front of the tables.
    failed: Run, reason and log of each run that failed.
    columns: Columns of the first table; those with nothing in them are left
      out.
  """

  title: str
  frame: Frame
  intro: Sequence[str] = ()
  failed: Sequence[Mapping[str, str]] = ()
  columns: Sequence[str] = _OF_SETTINGS

  @property
  def equal(self) -> Frame:
    """The settings at equal tokens: as many as most have."""
    settings = self.frame.settings
    tokens = collections.Counter(
      each.tokens for each in settings if each.tokens
    )
    usual = max(tokens, key=tokens.__getitem__, default=0)
    # One that diverged did not get as far as its budget.
    same = [
      x
      for x in settings
      if x.tokens in (0, usual) or (x.tokens < usual and x.loss == math.inf)
    ]
    return dataclasses.replace(self.frame, settings=same)

  def sections(self) -> Iterator[tuple[str, CellRows, str]]:
    """Yields title, rows and a note of each table.

    They are those at equal tokens, in simulated time, and of the settings with
    other numbers of tokens.
    """
    frame = self.equal
    rows = tables.table(frame, self.columns)
    yield "At equal tokens", tables.without_empty_columns(rows), _READING
    for clock, what in frame.clocks.items():
      note = (
        f"Clock '{markdown(clock)}': {markdown(what)}. Times are simulated."
        " Between two evaluations the loss is taken to fall linearly."
      )
      rows = tables.table(frame, ("run",), clock=clock)
      yield f"Time on the clock '{clock}'", rows, note
    others = [x for x in self.frame.settings if x not in frame.settings]
    if not others:
      return
    rows = tables.table(self.frame, _OF_SETTINGS[:-1], others)
    rows = tables.without_empty_columns(rows)
    for row, each in zip(rows, others, strict=True):
      for clock in frame.clocks:
        time_s = each.seconds.get(clock, math.nan)
        row[f"time on '{clock}'"] = units.human_time(time_s)
    note = "Learning rate schedules end at the last step of each run."
    yield "With other numbers of tokens", rows, note

  def _lines(self) -> Iterator[str]:
    """Yields the page but for its pictures."""
    for paragraph in self.intro:
      yield from (paragraph, "")
    for title, rows, note in self.sections():
      yield from _section(title, rows)
      yield from (note, "")
    front = [each.label for each in self.equal.pareto_front()] or ["none"]
    start = "On the Pareto front of loss and bytes, fewest bytes first"
    yield from (f"{start}: {', '.join(map(markdown, front))}.", "")
    settings = self.frame.settings
    changed = [{"run": s.name, "changed": s.changed} for s in settings]
    if any(each.changed for each in settings):
      yield from _section("Settings", changed)
    if self.failed:
      yield from _section("Failed", self.failed)

  def write(self, out_dir: Directory, command: str = "") -> pathlib.Path:
    """Writes `report.md`, `table.csv` and `figures/`; returns the page's path.

    Args:
      out_dir: Directory to write into; made if missing.
      command: Command line to show on the page.

    Raises:
      RecordError: If a file cannot be written.
    """
    out_dir = make_directory(out_dir)
    lines = [*self._lines(), "## Figures", ""]
    if self.equal.settings:
      lines += _pictures(self.equal, out_dir)
    table = tables.csv_table(self.frame.records())
    write_atomically(out_dir / "table.csv", table)
    return write_page(out_dir, self.title, lines, command)

  def print(self, console: Console) -> None:
    """Prints the tables on a terminal."""
    for title, rows, _ in self.sections():
      table = tables.terminal_table(
        *tables.header_and_cells(rows),
        left=(0, *(n for n, column in enumerate(rows[0]) if column == "to")),
        collapse_padding=True,
        title=title,
      )
      console.print(table)


def _section(title: str, rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
  table = tables.markdown_table(*tables.header_and_cells(rows))
  yield from (f"## {markdown(title)}", "", *table, "")


def side_by_side(runs: Sequence[LoadedRun]) -> Page:
  """Returns the page of several runs.

  Gaps and bytes are relative to AllReduce, or else to the run that sent most.

  Args:
    runs: Runs, at least one, all evaluated on one text.

  Raises:
    ValueError: If there is none, or they were not evaluated on one text.
  """
  require(bool(runs), "nothing to compare: give at least one run directory")
  _require_one_text(runs)
  labeled, baseline = _labeled(runs), ""
  if len(runs) > 1:
    sent = {label: run.total_sent_bytes for label, run in labeled.items()}
    by_method = {run.record["method"]: label for label, run in labeled.items()}
    baseline = by_method.get("allreduce") or max(sent, key=sent.__getitem__)
  corpus = markdown(runs[0].corpus)
  intro = [*_unlike(labeled), f"Losses on the corpus {corpus}."]
  frame = frame_of(labeled, baseline)
  return Page("Methods side by side", frame, intro, columns=_OF_RUNS)


def _require_one_text(runs: Sequence[LoadedRun]) -> None:
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


def _labeled(runs: Sequence[LoadedRun]) -> dict[str, LoadedRun]:
  """Returns runs by label: the method, and the directory if methods repeat."""
  methods = [run.record["method"] for run in runs]
  labels = {}
  for method, run in zip(methods, runs, strict=True):
    is_repeated = methods.count(method) > 1
    label = f"{method} ({run.workdir.name})" if is_repeated else method
    # Directories in different places may have the same name.
    labels[f"{method} ({run.workdir})" if label in labels else label] = run
  return labels


def _unlike(runs: Mapping[str, LoadedRun]) -> Iterator[str]:
  """Says in what runs differ that a reader would take to be alike."""
  fields = {"parameters": "parameter_count", "replicas": "num_replicas"}
  for what, field in fields.items():
    values = {label: run.record[field] for label, run in runs.items()}
    if len(set(values.values())) > 1:
      each = ", ".join(
        f"{markdown(label)} {own:,}" for label, own in values.items()
      )
      yield f"**The runs differ in their {what}: {each}.**"
  averaged = [
    label
    for label, run in runs.items()
    if run.config.get("outer", {}).get("average_power")
  ]
  if averaged:
    names = ", ".join(map(markdown, averaged))
    yield f"Evaluated on an average of the parameters: {names}."


def _pictures(frame: Frame, out_dir: pathlib.Path) -> Iterator[str]:
  titles = {panels.BYTES: tables.price(frame) or "Loss and bytes"}
  if any(len(points) > 1 for s in frame.settings for points in s.curves):
    titles = {panels.TOKENS: "Validation loss at equal tokens"} | titles
    titles |= {clock: _time_title(frame, clock) for clock in frame.clocks}
  names = _picture_names(frame)
  remove_pictures(out_dir, _earlier(out_dir) - {names[a] for a in titles})
  for axis, title in titles.items():
    name, against = names[axis], axis
    if axis in frame.clocks:
      against = f"simulated time on the clock {axis}"
    figure = panels.loss_panel(frame, axis, title, (8.4, 5.6))
    yield from picture(figure, out_dir, name, f"Loss against {against}")


def _picture_names(frame: Frame) -> dict[str, str]:
  """Returns the name of the file of each axis, without suffix.

  Names of clocks that differ in other characters than letters and digits get
  numbers, so that no picture replaces another one.
  """
  names = {axis: axis for axis in (panels.TOKENS, panels.BYTES)}
  for clock in frame.clocks:
    name = file_name(f"{_HOURS}{clock}")
    same = sum(other.startswith(name) for other in names.values())
    names[clock] = f"{name}_{same + 1}" if same else name
  return names


def _earlier(out_dir: pathlib.Path) -> set[str]:
  """Returns the names of pictures that an earlier page may have left."""
  timed = (out_dir / FIGURES).glob(f"{_HOURS}*.png")
  return {panels.TOKENS, panels.BYTES, *(path.stem for path in timed)}


def _time_title(frame: Frame, clock: str) -> str:
  """Names what reaches the target loss first, beside its baseline."""
  first = panels.first_to(frame, clock)
  base = frame.base(first) if first else None
  if not first or not base:
    return f"Validation loss in simulated time on '{escape.picture(clock)}'"
  own, other = (
    (style.proper(each.label), tables.reached(each, clock, frame.target))
    for each in (first, base)
  )
  start = "On '{}' {} reaches loss {:g} in {}, {} in {}"
  return start.format(
    escape.picture(clock), *own[:1], frame.target, *own[1:], *other
  )
