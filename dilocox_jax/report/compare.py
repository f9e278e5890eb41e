"""Several runs in one table and one picture.

A loss means nothing across two corpora, and the default corpus differs between
Python versions, so runs with different digests are refused rather than put in
one table with a footnote; other windows of one corpus are another text. Every
number comes from the rows, none is recomputed.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dilocox_jax.metrics.lines import (
  Directory,
  make_directory,
  write_atomically,
  write_json,
)
from dilocox_jax.report import figures, units
from dilocox_jax.report.page import PAGE, save_figure
from dilocox_jax.report.run import LoadedRun, load_run
from dilocox_jax.report.text_tables import csv_table, markdown_table

_COLUMNS = (
  "method",
  "validation loss",
  "bytes on the wire, a replica",
  "steps",
  "tokens",
  "wall time (s)",
)


def _require_one_text(runs: Sequence[LoadedRun]) -> None:
  first = runs[0]
  for run in runs[1:]:
    if run.record["corpus_digest"] != first.record["corpus_digest"]:
      raise ValueError(
        f"losses on different corpora do not compare: {first.workdir} has"
        f" {first.corpus}, {run.workdir} has {run.corpus}"
      )
    if run.record.get("held_out_digest") != first.record.get("held_out_digest"):
      raise ValueError(
        f"{first.workdir} and {run.workdir} were evaluated on different windows"
        f" of one text, {first.corpus} and {run.corpus}: they follow from"
        " data.validation_fraction, data.sequence_length, data.batch_size and"
        " evaluation.num_sequences"
      )


def _labels(runs: Sequence[LoadedRun]) -> list[str]:
  methods = [run.record["method"] for run in runs]
  return [
    method if methods.count(method) == 1 else f"{method} ({run.workdir.name})"
    for method, run in zip(methods, runs, strict=True)
  ]


def _entry(run: LoadedRun, label: str) -> dict[str, Any]:
  return {
    "label": label,
    "method": run.record["method"],
    "validation_loss": run.validation_loss,
    "total_sent_bytes": run.total_sent_bytes,
    "steps": run.steps,
    "tokens": run.tokens,
    "wall_s": run.wall_s,
    "finished": run.finished,
  }


def _cells(run: LoadedRun, label: str) -> tuple[str, ...]:
  return (
    label if run.finished else f"{label} (not finished)",
    units.human_loss(run.validation_loss),
    units.human_bytes(run.total_sent_bytes),
    f"{run.steps:,}",
    f"{run.tokens:,}",
    f"{run.wall_s:.1f}",
  )


def _table(runs: Sequence[LoadedRun]) -> list[tuple[str, ...]]:
  return [_cells(*pair) for pair in zip(runs, _labels(runs), strict=True)]


def _page(runs: Sequence[LoadedRun]) -> str:
  budgets = {run.tokens for run in runs}
  same = (
    f"the same budget of {units.human_tokens(runs[0].tokens)}"
    if len(budgets) == 1
    else "**different budgets of tokens**"
  )
  return "\n".join(
    [
      "# Methods side by side",
      "",
      f"Corpus: {runs[0].record['corpus_name']}, digest"
      f" `{runs[0].record['corpus_digest']}`; {same}. Loss (nats a token, outer"
      " parameters) and wall time are measured; bytes are derived from the"
      " plan.",
      "",
      *markdown_table(_COLUMNS, _table(runs)),
      "",
      "![Validation loss against tokens (measured) and bytes (derived from the"
      " plan)](comparison.png)",
      "",
      "Full-precision values: `comparison.json`, `comparison.csv`.",
      "",
    ]
  )


def compare(workdirs: Sequence[Directory], out_dir: Directory) -> pathlib.Path:
  """Writes a table, its data and a picture of several runs.

  Args:
    workdirs: Run directories, at least one, all evaluated on one text.
    out_dir: Where `report.md`, `comparison.json`, `.csv` and `.png` go.

  Returns:
    The path of `report.md`.

  Raises:
    ValueError: No run was given, or they were not evaluated on one text.
    RecordError: The disk refused.
  """
  if not workdirs:
    raise ValueError("nothing to compare: give at least one run directory")
  runs = [load_run(workdir) for workdir in workdirs]
  _require_one_text(runs)
  labels = _labels(runs)
  out_dir = make_directory(out_dir)
  entries = [_entry(*pair) for pair in zip(runs, labels, strict=True)]
  write_json(
    out_dir / "comparison.json",
    {"corpus_digest": runs[0].record["corpus_digest"], "runs": entries},
  )
  write_atomically(out_dir / "comparison.csv", csv_table(entries))
  save_figure(
    figures.comparison_figure(runs, labels), out_dir / "comparison.png"
  )
  write_atomically(out_dir / PAGE, _page(runs))
  return out_dir / PAGE


def print_table(runs: Sequence[LoadedRun], console: Console) -> None:
  """Prints the comparison's table on a terminal.

  Args:
    runs: At least one, all evaluated on one text.
    console: Where to print.

  Raises:
    ValueError: They were not evaluated on one text.
  """
  _require_one_text(runs)
  table = Table(caption=f"corpus {runs[0].corpus}; bytes derived from the plan")
  for index, column in enumerate(_COLUMNS):
    side = "left" if index == 0 else "right"
    table.add_column(column, justify=side, no_wrap=index == 0)
  for cells in _table(runs):
    table.add_row(*cells)
  console.print(table)
