"""Several runs in one table and one figure.

A loss means nothing across two texts, and the default text differs between
Python versions. So runs with different digests are refused, also if they only
differ in the windows of one corpus that they are evaluated on. All numbers
come from the rows of the runs.
"""

import pathlib
from collections.abc import Mapping, Sequence

from rich.console import Console

from dilocox_jax.metrics.lines import (
  Directory,
  make_directory,
  write_atomically,
)
from dilocox_jax.report import panels, tables, text_tables, units
from dilocox_jax.report.frame import Frame, frame_of
from dilocox_jax.report.page import save_figure, write_page
from dilocox_jax.report.run import LoadedRun, load_run

_TIME = "simulated time"
_COLUMNS = (
  *("run", "loss", "gap", "sent bytes", "fewer bytes", "steps", "tokens"),
  "wall (s)",
)


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


def _framed(runs: Mapping[str, LoadedRun]) -> Frame:
  return frame_of(runs, _baseline(runs) if len(runs) > 1 else "")


def _title(frame: Frame) -> str:
  """States what the cheapest run pays, compared with the baseline."""
  first = frame.settings[0]
  return tables.price(frame) or (
    f"{first.name}: loss {units.human_loss(first.loss)}"
  )


def _rows(runs: Mapping[str, LoadedRun], frame: Frame) -> tables.CellRows:
  """Returns cells by column, with times of several clocks each by its name."""
  columns = [c for c in _COLUMNS if len(runs) > 1 or c != "gap"]
  rows = tables.table(frame, columns)
  if frame.clocks and len(runs) > 1:
    equal = tables.at_equal_time(frame, *frame.clocks)
    rows = [
      {"run": row["run"], **cell, **row}
      for row, cell in zip(rows, equal, strict=True)
    ]
  if any(run.simulated_s for run in runs.values()):
    for row, each in zip(rows, frame.settings, strict=True):
      times = [
        units.human_time(time_s) + ("" if frame.clocks else f" ({clock})")
        for clock, time_s in each.seconds.items()
      ]
      row[_TIME] = "".join(times) or "-"
  return rows


def _relation(runs: Mapping[str, LoadedRun]) -> str:
  """Says what the columns of a table compare a run with."""
  if len(runs) == 1:
    return "Fewer bytes are relative to fp32 gradients in every step"
  return f"Gap and fewer bytes are relative to {_baseline(runs)}"


def _unlike(runs: Mapping[str, LoadedRun]) -> list[str]:
  """Says in what runs differ that a reader would take to be alike."""
  found = []
  for what, value in (
    ("parameters", lambda run: f"{run.record['parameter_count']:,}"),
    ("replicas", lambda run: str(run.record["num_replicas"])),
  ):
    values = {label: value(run) for label, run in runs.items()}
    if len(set(values.values())) > 1:
      each = ", ".join(f"{label} {own}" for label, own in values.items())
      found.append(f"**The runs differ in their {what}: {each}.**")
  averaged = [
    label
    for label, run in runs.items()
    if run.config.get("outer", {}).get("average_power")
  ]
  if averaged:
    found.append(
      f"Evaluated on an average of the parameters: {', '.join(averaged)}."
    )
  return [line for each in found for line in (each, "")]


def _page(runs: Mapping[str, LoadedRun], frame: Frame) -> list[str]:
  first = next(iter(runs.values()))
  budget = f"the same budget of {units.human_tokens(first.tokens)}"
  if len({run.tokens for run in runs.values()}) > 1:
    budget = "**different budgets of tokens**"
  return [
    f"Corpus: {first.record['corpus_name']}, digest"
    f" `{first.record['corpus_digest']}`; {budget}. Loss (nats a token, outer"
    " parameters) and wall time are measured, bytes are derived from the"
    " plan, and simulated time, if there is any, is derived from the cluster"
    f" of the run. {_relation(runs)}.",
    "",
    *_unlike(runs),
    f"**{_title(frame)}.**",
    "",
    *text_tables.markdown_table(
      *text_tables.header_and_cells(_rows(runs, frame))
    ),
    "",
    "![Validation loss (measured) against what each run costs](comparison.png)",
    "",
    "Full-precision values: `comparison.csv`.",
  ]


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
  frame, out_dir = _framed(runs), make_directory(out_dir)
  csv = text_tables.csv_table(frame.records())
  write_atomically(out_dir / "comparison.csv", csv)
  # Simulated time comes first: it is what a slow link is about.
  axes = [*frame.clocks, panels.TOKENS, panels.BYTES]
  figure = panels.loss_panels(frame, axes, _title(frame))
  save_figure(figure, out_dir / "comparison.png")
  title = "Methods side by side"
  return write_page(out_dir, title, _page(runs, frame), command)


def print_table(runs: Sequence[LoadedRun], console: Console) -> None:
  """Prints the table of the comparison on a terminal.

  Args:
    runs: Runs, at least one, all evaluated on one text.
    console: Terminal to print on.

  Raises:
    ValueError: If the runs were not evaluated on one text.
  """
  labelled = _labelled(runs)
  rows = _rows(labelled, _framed(labelled))
  # What is left fits into 80 columns.
  left_out = ["tokens"] if len({run.tokens for run in runs}) == 1 else []
  left_out += ["wall (s)"] if _TIME in rows[0] else []
  rows = [{k: row[k] for k in row if k not in left_out} for row in rows]
  table = text_tables.terminal_table(
    *text_tables.header_and_cells(rows),
    collapse_padding=True,
    caption=f"{_relation(labelled)}. Loss (nats a token) on corpus"
    f" {runs[0].corpus}; bytes derived from the plan.",
  )
  table.columns[0].no_wrap = True
  console.print(table)
  for line in filter(None, _unlike(labelled)):
    console.print(line.replace("**", ""), highlight=False)
