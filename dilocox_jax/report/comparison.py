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

from dilocox_jax.metrics.lines import (
  Directory,
  make_directory,
  write_atomically,
)
from dilocox_jax.report import panels, style, tables, units
from dilocox_jax.report.frame import Frame, Setting, frame_of
from dilocox_jax.report.page import picture, save_figure, write_page
from dilocox_jax.report.run import LoadedRun, load_run
from dilocox_jax.report.tables import CellRows

Section = tuple[str, CellRows, str]  # Title, rows, and a note below them.
_SIZE = (8.4, 5.6)
_READING = (
  "Losses (nats a token) are measured, of the outer parameters after the last"
  " step: mean over seeds ± its standard error. A gap is paired: its error is"
  " that of the gaps of the seeds. Bytes are derived from the plan."
)


def _markdown(sections: Sequence[Section]) -> Iterator[str]:
  for title, rows, note in sections:
    table = tables.markdown_table(*tables.header_and_cells(rows))
    yield from (f"## {title}", "", *table, "", note, "")


def _print(sections: Sequence[Section], console: Console) -> None:
  for title, rows, note in sections:
    table = tables.terminal_table(
      *tables.header_and_cells(rows),
      left=(0, *(n for n, column in enumerate(rows[0]) if column == "to")),
      collapse_padding=True,
      title=title or None,
      caption=note or None,
    )
    console.print(table)


def _require_one_text(runs: Sequence[LoadedRun]) -> None:
  first = runs[0]
  for run in runs[1:]:
    if run.record["corpus_digest"] != first.record["corpus_digest"]:
      raise ValueError(
        f"losses on different corpora cannot be compared: {first.workdir} has"
        f" {first.corpus}, {run.workdir} has {run.corpus}"
      )
    if run.record.get("held_out_digest") != first.record.get("held_out_digest"):
      raise ValueError(
        f"{first.workdir} and {run.workdir} were evaluated on different windows"
        f" of one text, {first.corpus} and {run.corpus}: these follow from"
        " data.validation_fraction, data.sequence_length, data.batch_size and"
        " evaluation.num_sequences, so make them equal"
      )


def _labelled(runs: Sequence[LoadedRun]) -> dict[str, LoadedRun]:
  """Returns runs by label: the method, and the directory if methods repeat.

  Raises:
    ValueError: If the runs were not evaluated on one text.
  """
  _require_one_text(runs)
  methods = [run.record["method"] for run in runs]
  labels = {}
  for method, run in zip(methods, runs, strict=True):
    is_repeated = methods.count(method) > 1
    label = f"{method} ({run.workdir.name})" if is_repeated else method
    # Directories in different places may have the same name.
    labels[f"{method} ({run.workdir})" if label in labels else label] = run
  return labels


def _baseline(runs: Mapping[str, LoadedRun]) -> str:
  """Returns the label of AllReduce, or else of the run that sent most."""
  for label, run in runs.items():
    if run.record["method"] == "allreduce":
      return label
  return max(runs, key=lambda label: runs[label].total_sent_bytes)


def _unlike(runs: Mapping[str, LoadedRun]) -> Iterator[str]:
  """Says in what runs differ that a reader would take to be alike."""
  for what, field in (
    ("parameters", "parameter_count"),
    ("replicas", "num_replicas"),
  ):
    values = {label: run.record[field] for label, run in runs.items()}
    if len(set(values.values())) > 1:
      each = ", ".join(f"{label} {own:,}" for label, own in values.items())
      yield f"**The runs differ in their {what}: {each}.**"
  averaged = [
    label
    for label, run in runs.items()
    if run.config.get("outer", {}).get("average_power")
  ]
  if averaged:
    names = ", ".join(averaged)
    yield f"Evaluated on an average of the parameters: {names}."


def _section(runs: Mapping[str, LoadedRun], frame: Frame) -> Section:
  """Returns the table of runs: at equal simulated time, then of all steps."""
  columns = ["run", "loss", "gap", "sent bytes", "fewer bytes", "steps"]
  note = "Fewer bytes are relative to fp32 gradients in every step."
  if len(runs) > 1:
    note = f"Gap and fewer bytes are relative to {_baseline(runs)}."
  else:
    columns.remove("gap")
  if len({run.tokens for run in runs.values()}) > 1:
    note, columns = f"Numbers of tokens differ. {note}", [*columns, "tokens"]
  rows = tables.table(frame, [*columns, "wall (s)"])
  if frame.clocks and len(runs) > 1:
    equal = tables.at_equal_time(frame, *frame.clocks)
    pairs = zip(rows, equal, strict=True)
    rows = [{"run": row["run"], **cell, **row} for row, cell in pairs]
  if any(each.seconds for each in frame.settings):
    for row, each in zip(rows, frame.settings, strict=True):
      del row["wall (s)"]  # What is left fits into 80 columns.
      times = [
        units.human_time(time_s) + ("" if frame.clocks else f" ({clock})")
        for clock, time_s in each.seconds.items()
      ]
      row["simulated time"] = "".join(times) or "-"
    note += "".join(
      f" Times are simulated: {x}." for x in frame.clocks.values()
    )
  corpus = next(iter(runs.values())).corpus
  note += (
    f" Loss (nats a token) on corpus {corpus}; bytes derived from the plan."
  )
  return "Results", rows, note


def _frame(runs: Mapping[str, LoadedRun]) -> Frame:
  return frame_of(runs, _baseline(runs) if len(runs) > 1 else "")


def compare(
  workdirs: Sequence[Directory], out_dir: Directory, command: str = ""
) -> pathlib.Path:
  """Writes a table, its data and a figure of several runs.

  Args:
    workdirs: Run directories, at least one, all evaluated on one text.
    out_dir: Directory for `report.md`, `comparison.csv` and `comparison.png`.
    command: Command line to show on the page.

  Returns:
    Path of `report.md`.

  Raises:
    ValueError: If there is no run, a directory is no run directory, or the
      runs were not evaluated on one text.
    RecordError: If a file cannot be written.
  """
  if not workdirs:
    raise ValueError("nothing to compare: give at least one run directory")
  runs = _labelled([load_run(workdir) for workdir in workdirs])
  frame, out_dir = _frame(runs), make_directory(out_dir)
  csv = tables.csv_table(frame.records())
  write_atomically(out_dir / "comparison.csv", csv)
  first = frame.settings[0]
  title = tables.price(frame) or (
    f"{first.name}: loss {units.human_loss(first.loss)}"
  )
  # Simulated time comes first: it is what a slow link is about.
  axes = [*frame.clocks, panels.TOKENS, panels.BYTES]
  figure = panels.loss_panels(frame, axes, title)
  save_figure(figure, out_dir / "comparison.png")
  lines = [
    *(line for each in _unlike(runs) for line in (each, "")),
    *(f"**{title}.**", ""),
    *_markdown([_section(runs, frame)]),
    "![Validation loss (measured) against what each run costs](comparison.png)",
    *("", "Full-precision values: `comparison.csv`."),
  ]
  return write_page(out_dir, "Methods side by side", lines, command)


def print_table(runs: Sequence[LoadedRun], console: Console) -> None:
  """Prints the tables of the comparison on a terminal.

  Args:
    runs: Runs, at least one, all evaluated on one text.
    console: Terminal to print on.

  Raises:
    ValueError: If the runs were not evaluated on one text.
  """
  labelled = _labelled(runs)
  _, rows, note = _section(labelled, _frame(labelled))
  _print([("", rows, note)], console)
  for line in _unlike(labelled):
    console.print(line.replace("**", ""), highlight=False)


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

  def sections(self) -> list[Section]:
    """Returns the tables at equal tokens, in simulated time, and of others."""
    frame = self.equal
    compares = any(map(frame.base, frame.settings))
    more = ("gap", "to", "sent bytes", "fewer bytes")
    columns = ["run", "loss", *(more if compares else ("sent bytes",))]
    rows = tables.table(frame, columns)
    found = [("At equal tokens", rows, _READING)]
    for clock, what in frame.clocks.items():
      note = (
        f"Clock '{clock}': {what}. Times are simulated. Between two evaluations"
        " the loss is taken to fall linearly."
      )
      rows = tables.table(frame, ("run",), clock=clock)
      found.append((f"Time on the clock '{clock}'", rows, note))
    rows = tables.table(self.frame, ("run", "loss", "sent bytes"), self.others)
    for row, each in zip(rows, self.others, strict=True):
      for clock in frame.clocks:
        time_s = each.seconds.get(clock, math.nan)
        row[f"time on '{clock}'"] = units.human_time(time_s)
    note = "Learning rate schedules end at the last step of each run."
    found.append(("With other numbers of steps", rows, note))
    return [each for each in found if each[1]]

  def lines(self) -> Iterator[str]:
    """Yields the page but for its pictures."""
    frame = self.equal
    yield from (self.intro, "")
    for note in self.notes:
      yield from (f"- {note}", "")
    yield from _markdown(self.sections())
    names = ", ".join(each.label for each in frame.pareto_front()) or "none"
    yield f"On the Pareto front of loss and bytes, fewest bytes first: {names}."
    yield ""
    if found := list(_differences(frame)):
      yield from ("## Differences larger than their error", "", *found, "")
    pairs = [(s.name, s.changed) for s in self.frame.settings if s.changed]
    if pairs:
      rows = tables.markdown_table(("run", "changed"), pairs)
      yield from ("## Settings", "", *rows, "")
    if self.failed:
      rows = tables.markdown_table(*tables.header_and_cells(self.failed))
      yield from ("## Failed", "", *rows, "")


def _differences(frame: Frame) -> Iterator[str]:
  """Yields a sentence on each gap that exceeds its error, by the gap."""
  gaps = [(*frame.gap(each), n) for n, each in enumerate(frame.settings)]
  for gap, error, number in sorted(gaps):
    if abs(gap) > error:
      setting = frame.settings[number]
      base, fewer = frame.base(setting), frame.fewer_bytes(setting)
      than = base.label if base else setting.baseline
      sent = (
        f", with {units.human_ratio(fewer)} fewer bytes" if fewer > 1 else ""
      )
      words = units.human_comparison(gap, error)
      yield f"- {setting.label} ends {words} than {than}{sent}."


def write_sweep(page: SweepPage, out_dir: Directory) -> pathlib.Path:
  """Writes `report.md`, `table.csv` and `figures/`; returns the page's path.

  Args:
    page: What to say.
    out_dir: Directory to write into; made if missing.

  Raises:
    RecordError: If a file cannot be written.
  """
  out_dir = make_directory(out_dir)
  lines = [*page.lines()]
  if page.equal.settings:
    lines += ["## Figures", "", *_pictures(page.equal, out_dir)]
  table = tables.csv_table(page.frame.records())
  write_atomically(out_dir / "table.csv", table)
  return write_page(out_dir, f"Sweep: {page.name}", lines, page.command)


def print_sweep(page: SweepPage, console: Console) -> None:
  """Prints the tables on a terminal.

  Args:
    page: What to say.
    console: Terminal to print on.
  """
  _print([(title, rows, "") for title, rows, _ in page.sections()], console)


def _pictures(frame: Frame, out_dir: pathlib.Path) -> Iterator[str]:
  titles = {panels.BYTES: tables.price(frame) or "Loss and bytes"}
  if any(len(points) > 1 for s in frame.settings for points in s.curves):
    titles = {panels.TOKENS: "Validation loss at equal tokens"} | titles
    titles |= {clock: _time_title(frame, clock) for clock in frame.clocks}
  for axis, title in titles.items():
    figure = panels.loss_panels(frame, [axis], title, _SIZE)
    name, against = axis, axis
    if axis in frame.clocks:
      name, against = f"hours_{axis}", f"simulated time on the clock {axis}"
    yield from picture(figure, out_dir, name, f"Loss against {against}")


def _time_title(frame: Frame, clock: str) -> str:
  """Names what reaches the target loss first, beside its baseline."""
  first = panels.first_to(frame, clock)
  base = frame.base(first) if first else None
  if not first or not base:
    return f"Validation loss in simulated time on '{clock}'"
  own, other = (
    (style.proper(each.label), tables.reached(each, clock, frame.target))
    for each in (first, base)
  )
  start = "On '{}' {} reaches loss {:g} in {}, {} in {}"
  return start.format(clock, *own[:1], frame.target, *own[1:], *other)
