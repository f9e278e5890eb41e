"""An ablation in one table, its data, and the pictures drawn from them.

Losses are averaged over seeds, never over corpora: trials on different text
get tables and pictures of their own. What failed stands beside what ended, for
a setting that diverges is a result too.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dilocox_jax.metrics.lines import (
  Directory,
  make_directory,
  write_atomically,
  write_json,
)
from dilocox_jax.report import units
from dilocox_jax.report.ablation import figures
from dilocox_jax.report.ablation.trials import (
  SettingResult,
  TrialOutcome,
  entries,
  pareto_front,
)
from dilocox_jax.report.page import PAGE, save_figure
from dilocox_jax.report.text_tables import csv_table, markdown_table

_COLUMNS = (
  "run",
  "changed",
  "validation loss",
  "bytes a replica",
  "fewer bytes a sync",
)


def _settings(entry: SettingResult) -> str:
  return " ".join(f"{k}={v}" for k, v in entry.changed.items())


def _loss(entry: SettingResult) -> str:
  loss = units.human_loss(entry.validation_loss)
  if len(entry.losses) < 2:
    return loss
  return f"{loss} ± {entry.standard_error:.4f}"


def _cells(entry: SettingResult) -> tuple[str, ...]:
  name = entry.name
  if entry.is_incomplete:
    name += f" ({len(entry.losses)} of {entry.num_seeds} seeds)"
  return (
    name,
    _settings(entry),
    _loss(entry),
    units.human_bytes(entry.total_sent_bytes),
    units.human_ratio(entry.times_fewer_bytes),
  )


def _by_corpus(
  outcomes: Sequence[TrialOutcome],
) -> dict[str, list[SettingResult]]:
  found: dict[str, list[SettingResult]] = {}
  for entry in entries(outcomes):
    found.setdefault(entry.corpus, []).append(entry)
  return found


def _data(entry: SettingResult, on_front: bool) -> dict[str, Any]:
  return {
    "run": entry.name,
    "validation_loss": entry.validation_loss,
    "standard_error": entry.standard_error,
    "num_seeds": len(entry.losses),
    "total_sent_bytes": entry.total_sent_bytes,
    "times_fewer_bytes": entry.times_fewer_bytes,
    "is_on_pareto_front": on_front,
    "corpus": entry.corpus,
    "losses": dict(zip(entry.seeds, entry.losses, strict=True)),
    "workdirs": [str(path) for path in entry.workdirs],
    "settings": dict(entry.settings),
  }


def _flat(row: dict[str, Any]) -> dict[str, Any]:
  plain = {k: v for k, v in row.items() if not isinstance(v, dict | list)}
  return plain | {f"setting:{k}": v for k, v in row["settings"].items()}


def _draw(
  found: Sequence[SettingResult], out_dir: pathlib.Path, suffix: str
) -> list[str]:
  drawn = {
    f"pareto{suffix}": (
      "Validation loss (measured) against the bytes one replica sent (derived"
      " from the plan).",
      figures.pareto(found),
    )
  }
  for path in figures.charted(found):
    drawn[f"{path}{suffix}"] = (
      f"Validation loss (measured) against `{path}`, other settings equal"
      " along a line.",
      figures.hyper_parameter(found, path),
    )
  lines = []
  for name, (caption, figure) in drawn.items():
    save_figure(figure, out_dir / "figures" / f"{name}.png")
    lines += [f"![{caption}](figures/{name}.png)", "", f"*{caption}*", ""]
  return lines


def _section(
  corpus: str,
  found: Sequence[SettingResult],
  out_dir: pathlib.Path,
  suffix: str,
) -> list[str]:
  front = ", ".join(entry.name for entry in pareto_front(found))
  return [
    f"## On {corpus}",
    "",
    "Loss of the outer parameters after the last step, in nats a token"
    " (measured), mean over seeds ± its standard error where there are"
    " several. Bytes are derived from the plan; the last column says how many"
    " times fewer a sync sends than fp32 would.",
    "",
    *markdown_table(_COLUMNS, map(_cells, found)),
    "",
    f"On the Pareto front, fewest bytes first: {front}.",
    "",
    *_draw(found, out_dir, suffix),
  ]


def _failed(outcomes: Sequence[TrialOutcome]) -> list[str]:
  rows = [(o.name, o.seed, o.failure, o.log) for o in outcomes if o.failure]
  if not rows:
    return []
  table = markdown_table(("run", "seed", "reason", "log"), rows)
  return ["## Failed", "", *table, ""]


def write_ablation(
  outcomes: Sequence[TrialOutcome], out_dir: Directory, command: str = ""
) -> pathlib.Path:
  """Writes the page of an ablation, its data and its figures.

  Args:
    outcomes: What became of each run.
    out_dir: Where `report.md`, `ablation.json`, `ablation.csv` and `figures/`
      go.
    command: The command line, for the record.

  Returns:
    The path of `report.md`.

  Raises:
    RecordError: The disk refused.
  """
  out_dir = make_directory(out_dir)
  found = _by_corpus(outcomes)
  rows = []
  lines = ["# Ablation", "", *([f"    {command}", ""] if command else [])]
  for number, (corpus, each) in enumerate(found.items(), start=1):
    front = pareto_front(each)
    rows += [_data(entry, entry in front) for entry in each]
    suffix = f"-corpus{number}" if len(found) > 1 else ""
    lines += _section(corpus, each, out_dir, suffix)
  lines += _failed(outcomes)
  failed = [
    {"run": o.name, "seed": o.seed, "reason": o.failure, "log": str(o.log)}
    for o in outcomes
    if o.failure
  ]
  write_json(out_dir / "ablation.json", {"runs": rows, "failed": failed})
  write_atomically(out_dir / "ablation.csv", csv_table([*map(_flat, rows)]))
  write_atomically(out_dir / PAGE, "\n".join(lines).rstrip() + "\n")
  return out_dir / PAGE


def print_ablation(outcomes: Sequence[TrialOutcome], console: Console) -> None:
  """Prints a table a corpus, lowest loss first, and what failed.

  Args:
    outcomes: What became of each run.
    console: Where to print.
  """
  for corpus, found in _by_corpus(outcomes).items():
    table = Table(caption=f"corpus {corpus}; bytes derived from the plan")
    for index, column in enumerate(_COLUMNS):
      side = "left" if index < 2 else "right"
      table.add_column(column, justify=side, overflow="fold")
    front = pareto_front(found)
    for entry in found:
      cells = map(escape, _cells(entry))
      table.add_row(*cells, style="bold" if entry in front else None)
    console.print(table)
    console.print("Bold: on the Pareto front of loss and bytes.")
  for outcome in outcomes:
    if outcome.failure:
      console.print(
        f"failed: {outcome.name}, seed {outcome.seed}: {outcome.failure}"
        f" (log: {outcome.log})",
        markup=False,
        highlight=False,
        soft_wrap=True,
      )
