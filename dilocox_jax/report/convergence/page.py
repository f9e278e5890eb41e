"""Page, terminal tables and JSON data of a convergence sweep.

A sweep takes hours and is often done in several sittings. So results that are
missing are shown as missing, and everything else is reported.
"""

import dataclasses
import pathlib
from typing import Any

from rich.console import Console

from dilocox_jax.metrics.lines import Directory, make_directory, write_json
from dilocox_jax.report.convergence import figures
from dilocox_jax.report.convergence.comparison import (
  Comparison,
  MethodResult,
  mean_seconds_to,
)
from dilocox_jax.report.convergence.orderings import verdicts
from dilocox_jax.report.convergence.tables import tables
from dilocox_jax.report.page import picture, write_page
from dilocox_jax.report.text_tables import markdown_table, terminal_table


def write_convergence(found: Comparison, out_dir: Directory) -> pathlib.Path:
  """Writes `report.md`, `convergence.json` and `figures/`.

  Args:
    found: Results of the sweep.
    out_dir: Directory to write into; made if missing.

  Returns:
    Path of `report.md`.

  Raises:
    RecordError: If a file cannot be written.
  """
  out_dir = make_directory(out_dir)
  lines = [f"{found.budget} Corpus digest `{found.corpus}`.", ""]
  lines += [text for note in _notes(found) for text in (f"- {note}", "")]
  for table in tables(found):
    rows = markdown_table(table.header, table.rows)
    lines += [f"## {table.title}", "", *rows, ""]
    lines += [text for note in table.notes for text in (note, "")]
  lines += ["## Figures", "", *_draw(found, out_dir)]
  write_json(out_dir / "convergence.json", _data(found))
  return write_page(out_dir, f"Convergence: {found.name}", lines, found.command)


def _notes(found: Comparison) -> list[str]:
  notes = list(found.notes)
  if found.untuned:
    names = ", ".join(found.untuned)
    notes.append(f"Not in this report because they are not tuned: {names}.")
  return notes


def _draw(found: Comparison, out_dir: pathlib.Path) -> list[str]:
  drawn = {
    "tokens": figures.loss_by_tokens(found),
    "bytes": figures.loss_by_bytes(found),
  }
  for clock in found.clocks:
    drawn[f"hours_{clock}"] = figures.loss_by_time(found, clock)
  lines = []
  for name, figure in drawn.items():
    against = name.replace("hours_", "simulated time on the clock ")
    lines += picture(figure, out_dir, name, f"Loss against {against}")
  return lines


def _data(found: Comparison) -> dict[str, Any]:
  def values(entry: MethodResult) -> dict[str, Any]:
    return {
      "method": entry.name,
      "losses": {trace.seed: trace.loss for trace in entry.traces},
      "standard_error": entry.spread.standard_error,
      "gap": found.gap(entry),
      "gap_standard_error": found.gap_error(entry),
      "baseline": entry.baseline,
      "keeps_average": entry.keeps_average,
      "sent_bytes": entry.sent_bytes,
      "utilisation": entry.utilisation,
      "seconds": entry.seconds,
      "seconds_to_target": {
        clock: mean_seconds_to(entry, clock, found.target_loss)
        for clock in found.clocks
      },
      "tuned": entry.tuned,
      "tuning_runs": entry.tuning_runs,
      "edges": entry.edges,
    }

  return {
    "corpus_digest": found.corpus,
    "clocks": found.clocks,
    "target_loss": found.target_loss,
    "methods": [values(entry) for entry in found.entries],
    "equal_time": [dataclasses.asdict(each) for each in found.equal_time],
    "orderings": [dataclasses.asdict(each) for each in verdicts(found)],
  }


def print_convergence(found: Comparison, console: Console) -> None:
  """Prints the tables, without those that only the page shows.

  Args:
    found: Results of the sweep.
    console: Terminal to print on.
  """
  for name, what in found.clocks.items():
    console.print(f"Clock '{name}': {what}.", highlight=False)
  for note in _notes(found):
    console.print(note, markup=False, highlight=False)
  for each in tables(found):
    if each.on_page_alone:
      continue
    is_text = each.header[-1] == "verdict"
    left = range(len(each.header) if is_text else 1)
    console.print(
      terminal_table(each.header, each.rows, left, title=each.title)
    )
