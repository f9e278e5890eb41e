"""Page, terminal tables and data of an ablation.

Losses are averaged over seeds, never over corpora: trials on different texts
get tables and figures of their own. Trials that failed are listed too, because
a setting that diverges is a result.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from dilocox_jax.metrics.lines import (
  Directory,
  make_directory,
  write_atomically,
  write_json,
)
from dilocox_jax.report import text_tables, units
from dilocox_jax.report.ablation import figures
from dilocox_jax.report.ablation.trials import (
  SettingResult,
  TrialOutcome,
  setting_results,
)
from dilocox_jax.report.page import picture, write_page
from dilocox_jax.report.spread import pareto_front

_READING = (
  "The loss (nats a token, measured) is that of the outer parameters after"
  " the last step: mean over seeds ± standard error if there are several"
  " seeds. Bytes are derived from the plan. The last column says how many"
  " times fewer bytes a sync sends than it would in fp32."
)
_PARETO = (
  "Validation loss (measured) against the bytes one replica sent (derived"
  " from the plan)."
)
_CHARTED = (
  "Validation loss (measured) against `{}`; the other settings are equal along"
  " a line."
)


def _row(result: SettingResult) -> dict[str, str]:
  """Returns the cells of a setting by column."""
  missing = units.human_missing(len(result.seeds), result.num_seeds)
  loss = units.human_loss(result.spread.mean)
  if len(result.seeds) > 1:
    loss += f" ± {result.spread.standard_error:.4f}"
  return {
    "run": result.name + missing,
    "changed": " ".join(f"{k}={v}" for k, v in result.changed.items()),
    "validation loss": loss,
    "bytes a replica": units.human_bytes(result.sent_bytes),
    "fewer bytes a sync": units.human_ratio(result.times_fewer_bytes),
  }


def _by_corpus(
  outcomes: Sequence[TrialOutcome],
) -> dict[str, list[SettingResult]]:
  results: dict[str, list[SettingResult]] = {}
  for result in setting_results(outcomes):
    results.setdefault(result.corpus, []).append(result)
  return results


def _data(result: SettingResult, is_on_front: bool) -> dict[str, Any]:
  losses = result.spread.losses
  return {
    "run": result.name,
    "validation_loss": result.spread.mean,
    "standard_error": result.spread.standard_error,
    "num_seeds": len(losses),
    "total_sent_bytes": result.sent_bytes,
    "times_fewer_bytes": result.times_fewer_bytes,
    "is_on_pareto_front": is_on_front,
    "corpus": result.corpus,
    "losses": dict(zip(result.seeds, losses, strict=True)),
    "workdirs": [str(path) for path in result.workdirs],
    "settings": dict(result.settings),
  }


def _flat(row: dict[str, Any]) -> dict[str, Any]:
  plain = {k: v for k, v in row.items() if not isinstance(v, dict | list)}
  return plain | {f"setting:{k}": v for k, v in row["settings"].items()}


def _draw(
  results: Sequence[SettingResult], out_dir: pathlib.Path, suffix: str
) -> list[str]:
  lines = []
  for path in ("pareto", *figures.charted(results)):
    caption, figure = _PARETO, figures.pareto(results)
    if path != "pareto":
      caption = _CHARTED.format(path)
      figure = figures.hyper_parameter(results, path)
    lines += picture(figure, out_dir, f"{path}{suffix}", caption)
    lines += [f"*{caption}*", ""]
  return lines


def _section(
  corpus: str,
  results: Sequence[SettingResult],
  out_dir: pathlib.Path,
  suffix: str,
) -> list[str]:
  front = ", ".join(result.name for result in pareto_front(results))
  lines = [f"## On {corpus}", "", _READING, ""]
  header, cells = text_tables.header_and_cells([*map(_row, results)])
  lines += text_tables.markdown_table(header, cells)
  lines += ["", f"Settings on the Pareto front, fewest bytes first: {front}."]
  return [*lines, "", *_draw(results, out_dir, suffix)]


def write_ablation(
  outcomes: Sequence[TrialOutcome], out_dir: Directory, command: str = ""
) -> pathlib.Path:
  """Writes the page of an ablation, its data and its figures.

  Args:
    outcomes: Outcomes of all trials.
    out_dir: Directory for `report.md`, `ablation.json`, `ablation.csv` and
      `figures/`.
    command: Command line to show on the page.

  Returns:
    Path of `report.md`.

  Raises:
    RecordError: If a file cannot be written.
  """
  out_dir = make_directory(out_dir)
  by_corpus = _by_corpus(outcomes)
  rows = []
  lines = []
  for number, (corpus, results) in enumerate(by_corpus.items(), start=1):
    front = pareto_front(results)
    rows += [_data(result, result in front) for result in results]
    suffix = f"-corpus{number}" if len(by_corpus) > 1 else ""
    lines += _section(corpus, results, out_dir, suffix)
  failed = [
    {"run": o.name, "seed": o.seed, "reason": o.failure, "log": str(o.log)}
    for o in outcomes
    if o.failure
  ]
  if failed:
    table = text_tables.markdown_table(*text_tables.header_and_cells(failed))
    lines += ["## Failed", "", *table, ""]
  write_json(out_dir / "ablation.json", {"runs": rows, "failed": failed})
  csv = text_tables.csv_table([*map(_flat, rows)])
  write_atomically(out_dir / "ablation.csv", csv)
  return write_page(out_dir, "Ablation", lines, command)


def print_ablation(outcomes: Sequence[TrialOutcome], console: Console) -> None:
  """Prints one table per corpus, lowest loss first, and the failed trials.

  Args:
    outcomes: Outcomes of all trials.
    console: Terminal to print on.
  """
  for corpus, results in _by_corpus(outcomes).items():
    caption = f"corpus {corpus}; bytes derived from the plan"
    header, cells = text_tables.header_and_cells([*map(_row, results)])
    table = text_tables.terminal_table(header, cells, (0, 1), caption=caption)
    front = pareto_front(results)
    for result, row in zip(results, table.rows, strict=True):
      row.style = "bold" if result in front else None
    console.print(table)
    console.print("Bold settings are on the Pareto front of loss and bytes.")
  for outcome in outcomes:
    if outcome.failure:
      console.print(
        f"failed: {outcome.name}, seed {outcome.seed}: {outcome.failure}"
        f" (log: {outcome.log})",
        markup=False,
        highlight=False,
        soft_wrap=True,
      )
