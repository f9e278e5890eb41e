"""Several runs in one table and one figure.

A loss means nothing across two texts, and the default text differs between
Python versions. So runs with different digests are refused, also if they only
differ in the windows of one corpus that they are evaluated on. All numbers
come from the rows of the runs.
"""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dilocox_jax.metrics.lines import (
  Directory,
  make_directory,
  write_atomically,
  write_json,
)
from dilocox_jax.report import style, units
from dilocox_jax.report.curves import Curve, choose_front, draw_curves
from dilocox_jax.report.page import PAGE, save_figure
from dilocox_jax.report.run import LoadedRun, load_run
from dilocox_jax.report.text_tables import csv_table, markdown_table

_NEAR = 0.1  # A loss at most a tenth above the baseline's counts as near it.


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
  """Returns runs by label: the method, and the directory if methods repeat."""
  methods = [run.record["method"] for run in runs]
  labels = {}
  for method, run in zip(methods, runs, strict=True):
    label = method
    if methods.count(method) > 1:
      label = f"{method} ({run.workdir.name})"
    # Directories in different places may have the same name.
    labels[f"{method} ({run.workdir})" if label in labels else label] = run
  return labels


def _baseline(runs: Mapping[str, LoadedRun]) -> str:
  """Returns the label of AllReduce, or else of the run that sent most."""
  synchronous = (
    k for k, r in runs.items() if r.record["method"] == "allreduce"
  )
  most = max(runs, key=lambda label: runs[label].total_sent_bytes)
  return next(synchronous, most)


def _price(run: LoadedRun, base: LoadedRun) -> tuple[float, float]:
  """Returns loss / base loss - 1 and base bytes / bytes; NaN for neither."""
  sent_bytes = run.total_sent_bytes
  fewer = base.total_sent_bytes / sent_bytes if sent_bytes else math.nan
  return run.validation_loss / base.validation_loss - 1, fewer


def _cheapest(runs: Mapping[str, LoadedRun], baseline: str) -> str:
  """Returns the label of the run that sends least, or "" without one.

  Runs whose loss is at most a tenth above the baseline's are preferred.
  """
  base = runs[baseline]
  ended = [
    label
    for label, run in runs.items()
    if math.isfinite(_price(run, base)[0]) and label != baseline
  ]
  near = [label for label in ended if _price(runs[label], base)[0] <= _NEAR]
  labels = near or ended
  return min(labels, key=lambda k: runs[k].total_sent_bytes, default="")


def _comparison_title(runs: Mapping[str, LoadedRun], baseline: str) -> str:
  """States what the cheapest run pays, compared with the baseline."""
  base, least = runs[baseline], _cheapest(runs, baseline)
  if not least:
    return f"{baseline}: loss {units.human_loss(base.validation_loss)}"
  run = runs[least]
  gap, fewer = _price(run, base)
  title = f"{least} sends {units.human_ratio(fewer)} less than {baseline}"
  if not math.isfinite(fewer):
    title = f"{least} sends nothing"
  if run.simulated_s and base.simulated_s:
    times = (units.human_time(max(r.simulated_s.values())) for r in (run, base))
    title += ", in {} of simulated time instead of {}".format(*times)
  return f"{title}; its loss is {units.human_comparison(gap)}"


def comparison_figure(runs: Mapping[str, LoadedRun]) -> Figure:
  """Draws validation loss of several runs against what they cost.

  Simulated time comes first if all runs carry a clock, then tokens, then
  bytes.

  Args:
    runs: Runs by label, at least one, evaluated on one text.
  """
  baseline = _baseline(runs)
  is_timed = all(run.simulated_s for run in runs.values())
  panels = (["simulated_s"] if is_timed else []) + [
    "tokens",
    "total_sent_bytes",
  ]
  size = (4.8 * len(panels), 4.4)
  title = _comparison_title(runs, baseline)
  figure, axes = style.frame(len(panels), title, size)
  losses = {k: run.validation_loss for k, run in runs.items()}
  losses = {k: loss for k, loss in losses.items() if math.isfinite(loss)}
  front = choose_front(losses, baseline, [_cheapest(runs, baseline)])
  rows = [row for run in runs.values() for row in run.evaluations]
  for ax, field in zip(axes, panels, strict=True):
    divisor = _label_axis(ax, field, runs)
    curves = [_curve(k, run, field, divisor) for k, run in runs.items()]
    draw_curves(ax, curves, front, baseline)
  if is_timed:
    style.caption(axes[0], "loss measured, time derived (simulated)")
  cut = style.cut_high(axes[-2], [row.outer_loss for row in rows])
  style.caption(axes[-2], f"measured{cut}")
  style.caption(axes[-1], "loss measured, bytes derived from the plan")
  for ax in axes:
    ax.set_ylim(axes[-2].get_ylim())
  axes[0].set_ylabel("validation loss (nats a token)")
  style.legend(figure, axes[-2], 4)
  return figure


def _values(run: LoadedRun, field: str) -> list[tuple[float, float]]:
  """Returns (cost, loss) of each evaluation that has a cost."""
  if field == "simulated_s":
    at = run.simulated_s
    return [(at[e.step], e.outer_loss) for e in run.evaluations if e.step in at]
  pairs = [(float(getattr(e, field)), e.outer_loss) for e in run.evaluations]
  return [(cost, loss) for cost, loss in pairs if cost > 0]


def _label_axis(ax: Axes, field: str, runs: Mapping[str, LoadedRun]) -> float:
  """Labels the horizontal axis; returns the divisor of its unit."""
  pairs = [pair for run in runs.values() for pair in _values(run, field)]
  costs = [cost for cost, loss in pairs if math.isfinite(loss)]
  if field == "total_sent_bytes":
    style.bytes_axis(ax, [round(cost) for cost in costs])
    return 1.0
  largest = max(costs, default=0)
  if field == "tokens":
    divisor, unit = units.tokens_unit(largest)
    ax.set_xlabel(f"{unit}, all replicas")
  else:
    divisor, unit = units.time_unit(largest)
    ax.set_xlabel(f"simulated time on the given cluster ({unit})")
  return divisor


def _curve(label: str, run: LoadedRun, field: str, divisor: float) -> Curve:
  pairs = _values(run, field)
  return Curve(label, [x / divisor for x, _ in pairs], [y for _, y in pairs])


def _entry(label: str, run: LoadedRun) -> dict[str, Any]:
  entry = {
    "label": label,
    "method": run.record["method"],
    "validation_loss": run.validation_loss,
    "total_sent_bytes": run.total_sent_bytes,
    "steps": run.steps,
    "tokens": run.tokens,
    "wall_s": run.wall_s,
    "finished": run.finished,
  }
  if run.simulated_s:
    entry["simulated_s"] = max(run.simulated_s.values())
  return entry


def _table(runs: Mapping[str, LoadedRun]) -> tuple[list[str], list[list[str]]]:
  """Returns header and cells; the prices are relative to the baseline."""
  baseline = _baseline(runs)
  is_timed = any(run.simulated_s for run in runs.values())
  header = ["method", "loss", "gap", "sent bytes", "fewer bytes"]
  header += ["simulated time"] if is_timed else []
  header += ["steps", "tokens", "wall (s)"]
  rows = []
  for label, run in runs.items():
    gap, fewer = _price(run, runs[baseline])
    row = [
      label if run.finished else f"{label} (not finished)",
      units.human_loss(run.validation_loss),
      units.human_gap(gap),
      units.human_bytes(run.total_sent_bytes),
      units.human_ratio(fewer),
    ]
    if is_timed:
      last_s = max(run.simulated_s.values(), default=math.nan)
      row.append(units.human_time(last_s))
    rows.append(
      [*row, f"{run.steps:,}", f"{run.tokens:,}", f"{run.wall_s:.1f}"]
    )
  return header, rows


def _page(runs: Mapping[str, LoadedRun], command: str) -> str:
  first = next(iter(runs.values()))
  budgets = {run.tokens for run in runs.values()}
  baseline = _baseline(runs)
  same = (
    f"the same budget of {units.human_tokens(first.tokens)}"
    if len(budgets) == 1
    else "**different budgets of tokens**"
  )
  return "\n".join(
    [
      "# Methods side by side",
      "",
      *([f"    {command}", ""] if command else []),
      f"Corpus: {first.record['corpus_name']}, digest"
      f" `{first.record['corpus_digest']}`; {same}. Loss (nats a token, outer"
      " parameters) and wall time are measured, bytes are derived from the"
      " plan, and simulated time, if there is any, is derived from the cluster"
      " of the run. The gap of the loss, and how many times fewer bytes one"
      f" replica sends, are relative to {baseline}.",
      "",
      f"**{_comparison_title(runs, baseline)}.**",
      "",
      *markdown_table(*_table(runs)),
      "",
      "![Validation loss (measured) against what each run"
      " costs](comparison.png)",
      "",
      "Full-precision values: `comparison.json`, `comparison.csv`.",
      "",
    ]
  )


def compare(
  workdirs: Sequence[Directory], out_dir: Directory, command: str = ""
) -> pathlib.Path:
  """Writes a table, its data and a figure of several runs.

  Args:
    workdirs: Run directories, at least one, all evaluated on one text.
    out_dir: Directory for `report.md`, `comparison.json`, `.csv` and `.png`.
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
  loaded = [load_run(workdir) for workdir in workdirs]
  _require_one_text(loaded)
  runs = _labelled(loaded)
  out_dir = make_directory(out_dir)
  entries = [_entry(label, run) for label, run in runs.items()]
  write_json(
    out_dir / "comparison.json",
    {"corpus_digest": loaded[0].record["corpus_digest"], "runs": entries},
  )
  write_atomically(out_dir / "comparison.csv", csv_table(entries))
  save_figure(comparison_figure(runs), out_dir / "comparison.png")
  write_atomically(out_dir / PAGE, _page(runs, command))
  return out_dir / PAGE


def print_table(runs: Sequence[LoadedRun], console: Console) -> None:
  """Prints the table of the comparison on a terminal.

  Args:
    runs: Runs, at least one, all evaluated on one text.
    console: Terminal to print on.

  Raises:
    ValueError: If the runs were not evaluated on one text.
  """
  _require_one_text(runs)
  labelled = _labelled(runs)
  header, rows = _table(labelled)
  # Without frame and tokens the table fits into 80 columns.
  left_out = header.index("tokens")
  table = Table(
    box=box.SIMPLE_HEAD,
    pad_edge=False,
    caption=f"Gap and fewer bytes are relative to {_baseline(labelled)}. Loss"
    f" (nats a token) on corpus {runs[0].corpus}; bytes derived from the plan.",
  )
  for index, column in enumerate(header):
    side = "left" if index == 0 else "right"
    if index != left_out:
      table.add_column(column, justify=side, no_wrap=index == 0)
  for row in rows:
    table.add_row(*map(escape, row[:left_out] + row[left_out + 1 :]))
  console.print(table)
