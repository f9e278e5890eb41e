"""Several runs in one table and one figure.

A loss means nothing across two texts, and the default text differs between
Python versions. So runs with different digests are refused, also if they only
differ in the windows of one corpus that they are evaluated on. All numbers
come from the rows of the runs.
"""

import itertools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from dilocox_jax.metrics.lines import (
  Directory,
  make_directory,
  write_atomically,
  write_json,
)
from dilocox_jax.report import style, text_tables, units
from dilocox_jax.report.curves import Curve, choose_front, draw_curves
from dilocox_jax.report.page import save_figure, write_page
from dilocox_jax.report.run import LoadedRun, load_run
from dilocox_jax.report.spread import cheapest

_TIME = "simulated time"
_WIDE = 20  # Ratio of two times from which their axis is logarithmic.
# Values of a run that the data hold.
_NUMBERS = (
  *("validation_loss", "total_sent_bytes", "steps", "tokens", "wall_s"),
  "finished",
)
# Fields that runs are drawn against, and captions of their panels.
_PANELS = (
  ("simulated_s", "loss measured, time derived (simulated)"),
  ("tokens", "measured"),
  ("total_sent_bytes", "loss measured, bytes derived from the plan"),
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


def _price(run: LoadedRun, base: LoadedRun) -> tuple[float, float]:
  """Returns loss / base loss - 1 and base bytes / bytes; NaN for neither."""
  sent_bytes = run.total_sent_bytes
  fewer = base.total_sent_bytes / sent_bytes if sent_bytes else math.nan
  return run.validation_loss / base.validation_loss - 1, fewer


def _cheapest(runs: Mapping[str, LoadedRun], baseline: str) -> str:
  """Returns the label of the cheapest run that ends near the baseline."""
  base = runs[baseline]
  gaps = {k: _price(run, base)[0] for k, run in runs.items() if k != baseline}
  return cheapest(gaps, {k: run.total_sent_bytes for k, run in runs.items()})


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
  if run.simulated_s and base.simulated_s and _clock(run) == _clock(base):
    times = (units.human_time(max(r.simulated_s.values())) for r in (run, base))
    title += ", in {} of simulated time instead of {}".format(*times)
  title += f"; its loss is {units.human_comparison(gap)}"
  seen = [units.human_tokens(each.tokens) for each in (run, base)]
  if len(set(seen)) > 1:
    title += " after {} instead of {}".format(*seen)
  return title


def _clock(run: LoadedRun) -> str:
  """Names the clock of a run such that equal names stand for equal clocks.

  Two clocks of one cluster may have steps of different length.
  """
  digest = run.record.get("clock_digest", "")
  return f"{run.clock}, {digest}" if digest else run.clock


def _have_one_clock(runs: Mapping[str, LoadedRun]) -> bool:
  """Whether simulated times are those of one cluster, so that they compare."""
  return len({_clock(run) for run in runs.values() if run.simulated_s}) < 2


def comparison_figure(runs: Mapping[str, LoadedRun]) -> Figure:
  """Draws validation loss of several runs against what they cost.

  Simulated time comes first if all runs carry a clock, then tokens, then
  bytes.

  Args:
    runs: Runs by label, at least one, evaluated on one text.
  """
  baseline = _baseline(runs)
  has_all_times = all(run.simulated_s for run in runs.values())
  is_timed = has_all_times and _have_one_clock(runs)
  panels = dict(_PANELS if is_timed else _PANELS[1:])
  title = _comparison_title(runs, baseline)
  figure, axes = style.frame(len(panels), title, (4.8 * len(panels), 4.4))
  losses = {k: run.validation_loss for k, run in runs.items()}
  losses = {k: loss for k, loss in losses.items() if math.isfinite(loss)}
  front = choose_front(losses, baseline, [_cheapest(runs, baseline)])
  clocks = [run.clock for run in runs.values()]
  for ax, (field, kind) in zip(axes, panels.items(), strict=True):
    values = {k: _values(run, field) for k, run in runs.items()}
    divisor = _label_axis(ax, field, itertools.chain(*values.values()), clocks)
    if field == "simulated_s" and _differ_widely(values.values()):
      style.log_axis(ax, (1, 3), "{:,g}".format)
    curves = [
      Curve(k, [x / divisor for x, _ in pairs], [y for _, y in pairs])
      for k, pairs in values.items()
    ]
    draw_curves(ax, curves, front, baseline)
    style.caption(ax, kind)
  rows = [row for run in runs.values() for row in run.evaluations]
  shown = [row.outer_loss for row in rows]
  cut = style.cut_high(axes[-2], shown, kept=list(losses.values()))
  style.caption(axes[-2], f"measured{cut}")
  for ax in axes:
    ax.set_ylim(axes[-2].get_ylim())
  axes[0].set_ylabel(style.LOSS_AXIS)
  style.legend(figure, axes[-2], 4)
  return figure


def _values(run: LoadedRun, field: str) -> list[tuple[float, float]]:
  """Returns (cost, loss) of each evaluation that has a cost."""
  if field == "simulated_s":
    at = run.simulated_s
    return [(at[e.step], e.outer_loss) for e in run.evaluations if e.step in at]
  pairs = [(float(getattr(e, field)), e.outer_loss) for e in run.evaluations]
  return [(cost, loss) for cost, loss in pairs if cost > 0]


def _differ_widely(values: Iterable[list[tuple[float, float]]]) -> bool:
  """Whether one run's time is so long that others cannot be seen beside it."""
  ends = [pairs[-1][0] for pairs in values if pairs]
  return max(ends, default=0) > _WIDE * min(ends, default=0) > 0


def _label_axis(
  ax: Axes,
  field: str,
  pairs: Iterable[tuple[float, float]],
  clocks: Sequence[str],
) -> float:
  """Labels the horizontal axis; returns the divisor of its unit."""
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
    style.time_axis(ax, unit, clocks)
  return divisor


def _entry(label: str, run: LoadedRun) -> dict[str, Any]:
  entry = {"label": label, "method": run.record["method"]}
  entry |= {name: getattr(run, name) for name in _NUMBERS}
  if run.simulated_s:
    entry["simulated_s"] = max(run.simulated_s.values())
  return entry


def _table(runs: Mapping[str, LoadedRun]) -> list[dict[str, str]]:
  """Returns rows by column; the prices are relative to the baseline."""
  baseline, is_alone = _baseline(runs), len(runs) == 1
  is_timed = any(run.simulated_s for run in runs.values())
  needs_clock = not _have_one_clock(runs)
  rows = []
  for label, run in runs.items():
    gap, fewer = _price(run, runs[baseline])
    if is_alone and run.total_sent_bytes:
      fewer = run.fp32_bytes / run.total_sent_bytes
    time = units.human_time(max(run.simulated_s.values(), default=math.nan))
    if run.simulated_s and needs_clock:
      time += f" ({_clock(run)})"
    row = {
      "method": label if run.finished else f"{label} (not finished)",
      "loss": units.human_loss(run.validation_loss)
      if run.evaluations
      else "none yet",
      "gap": units.human_gap(gap),
      "sent bytes": units.human_bytes(run.total_sent_bytes),
      "fewer bytes": units.human_ratio(fewer),
      _TIME: time,
      "steps": f"{run.steps:,}",
      "tokens": f"{run.tokens:,}",
      "wall (s)": f"{run.wall_s:.1f}",
    }
    unused = {_TIME: not is_timed, "gap": is_alone}
    rows.append({k: v for k, v in row.items() if not unused.get(k)})
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
  averaged = [k for k, run in runs.items() if _keeps_average(run)]
  if averaged:
    found.append(
      f"Evaluated on an average of the parameters: {', '.join(averaged)}."
    )
  return [line for each in found for line in (each, "")]


def _keeps_average(run: LoadedRun) -> bool:
  return bool(run.config.get("outer", {}).get("average_power"))


def _page(runs: Mapping[str, LoadedRun]) -> list[str]:
  first = next(iter(runs.values()))
  baseline = _baseline(runs)
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
    f"**{_comparison_title(runs, baseline)}.**",
    "",
    *text_tables.markdown_table(*text_tables.header_and_cells(_table(runs))),
    "",
    "![Validation loss (measured) against what each run costs](comparison.png)",
    "",
    "Full-precision values: `comparison.json`, `comparison.csv`.",
  ]


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
  runs = _labelled(loaded)
  out_dir = make_directory(out_dir)
  entries = [_entry(label, run) for label, run in runs.items()]
  write_json(
    out_dir / "comparison.json",
    {"corpus_digest": loaded[0].record["corpus_digest"], "runs": entries},
  )
  write_atomically(out_dir / "comparison.csv", text_tables.csv_table(entries))
  save_figure(comparison_figure(runs), out_dir / "comparison.png")
  return write_page(out_dir, "Methods side by side", _page(runs), command)


def print_table(runs: Sequence[LoadedRun], console: Console) -> None:
  """Prints the table of the comparison on a terminal.

  Args:
    runs: Runs, at least one, all evaluated on one text.
    console: Terminal to print on.

  Raises:
    ValueError: If the runs were not evaluated on one text.
  """
  labelled = _labelled(runs)
  rows = _table(labelled)
  if len({run.tokens for run in runs}) == 1:
    for row in rows:
      del row["tokens"]  # Without tokens it fits into 80 columns.
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
