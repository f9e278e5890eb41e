"""Page of one run: results, figures, cost, settings and how to reproduce it.

A reader who has only this page must be able to judge its numbers. So the loss
stands beside the corpus it was measured on, and every figure says whether it
is measured or derived.
"""

import math
import pathlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dilocox_jax import files
from dilocox_jax.checks import flat
from dilocox_jax.metrics.lines import (
  Directory,
  RecordError,
  make_directory,
  one_line,
  write_atomically,
)
from dilocox_jax.report import figures, units
from dilocox_jax.report.meeting import meeting_lines
from dilocox_jax.report.run import LoadedRun, load_run
from dilocox_jax.report.tables import markdown_table

PAGE, FIGURES = "report.md", "figures"
SAMPLE = "sample.txt"  # Written by experiments.sample.
# What draws a figure of a run, and the figure's caption, by name of its file.
_FIGURES: dict[str, tuple[Callable[[LoadedRun], Any], str]] = {
  "loss": (figures.loss_figure, "Loss against tokens (measured)."),
  "drift": (
    figures.drift_figure,
    "Pairwise cosine of the replicas' pseudo-gradients, and the norm of their"
    " disagreement (measured).",
  ),
  "sent": (figures.bytes_figure, "Bytes that one replica sent (derived)."),
  "hours": (
    figures.time_figure,
    "Loss (measured) against the time on the cluster of the axis (simulated).",
  ),
  "ranks": (figures.rank_figure, "Ranks of the updates, and length of rounds."),
}


def save_figure(figure: Any, path: pathlib.Path) -> None:
  """Writes a PNG; raises RecordError, with its path, if that fails."""
  make_directory(path.parent)
  with one_line(path), files.replaced(path) as file:
    figure.savefig(file, format=path.suffix[1:])


def picture(
  figure: Any, out_dir: pathlib.Path, name: str, caption: str
) -> list[str]:
  """Saves a figure for a page; returns the lines that show it there.

  Args:
    figure: Matplotlib figure.
    out_dir: Directory of the page. The figure is written to its `figures/`.
    name: File name without suffix.
    caption: Text that stands for the picture where it cannot be seen.
  """
  save_figure(figure, out_dir / FIGURES / f"{name}.png")
  return [f"![{caption}]({FIGURES}/{name}.png)", ""]


def write_page(
  out_dir: pathlib.Path, title: str, lines: Sequence[str], command: str = ""
) -> pathlib.Path:
  """Writes `report.md`: title, command line if there is one, then the lines.

  Returns:
    Path of `report.md`.

  Raises:
    RecordError: If the file cannot be written.
  """
  start = [f"# {title}", "", *([f"    {command}", ""] if command else [])]
  text = "\n".join([*start, *lines]).rstrip() + "\n"
  write_atomically(out_dir / PAGE, text)
  return out_dir / PAGE


def _summary(run: LoadedRun) -> str:
  record = run.record
  replicas = record["num_replicas"]
  who = "one replica" if replicas == 1 else f"{replicas} replicas"
  start = (
    f"`{record['method']}` trained {record['parameter_count']:,} parameters"
    f" on {who} for {run.steps:,} steps ({units.human_tokens(run.tokens)})."
  )
  if run.result is None:
    return f"{start} There is no validation yet."
  in_bits = f", perplexity {run.perplexity:,.4g}"
  if math.isfinite(run.bits_per_byte):
    in_bits += f", {units.human_loss(run.bits_per_byte)} bits a byte"
  which = "The final" if run.finished else "The run has not ended. So far the"
  return (
    f"{start} {which} validation loss is"
    f" **{units.human_loss(run.validation_loss)}** nats a token{in_bits}"
    " (measured) on"
    f" the corpus {record['corpus_name']} with digest"
    f" `{record['corpus_digest']}`. Compare losses only if the digests are"
    f" equal. Each replica sent {units.human_bytes(run.total_sent_bytes)}"
    " (derived from the plan)."
  )


def _results(run: LoadedRun) -> list[str]:
  losses = {}
  if run.result:
    losses = {
      "validation loss, outer parameters": run.result.outer_loss,
      "validation loss, replicas' mean": run.result.mean_loss,
      "validation loss, replica 0": run.result.replica_loss,
      "loss on the text that judges": run.result.judge_loss,
    }
  sent = {"bytes sent by one replica": run.total_sent_bytes}
  if run.rounds:
    losses["training loss, last round"] = run.rounds[-1].loss
    largest = max(row.sent_bytes for row in run.rounds)
    sent = {"most bytes sent in a round, one replica": largest} | sent
  counts = {"inner steps": run.steps, "tokens, all replicas": run.tokens}
  rows = [
    (k, units.human_loss(v), "measured")
    for k, v in losses.items()
    if not math.isnan(v)
  ]
  rows += [(k, units.human_bytes(v), "derived") for k, v in sent.items()]
  rows += [(k, f"{v:,}", "counted") for k, v in counts.items()]
  return markdown_table(("quantity", "value", "kind"), rows)


def _cost(run: LoadedRun) -> list[str]:
  rows = []
  for event in sorted({timing.event for timing in run.timings}):
    spent_s = [t.wall_s for t in run.timings if t.event == event]
    rows.append((event, len(spent_s), f"{math.fsum(spent_s):.1f}"))
  rows.append(("all", len(run.timings), f"{run.wall_s:.1f}"))
  lines = markdown_table(("event", "times", "wall time (s)"), rows)
  speed = run.tokens_per_s
  if math.isfinite(speed):
    lines += ["", f"Throughput of the rounds: {speed:,.0f} tokens/s."]
  lines += [
    "",
    f"All times were measured on `{run.record['platform']}`. A run that was"
    " resumed counts only the work that it kept.",
  ]
  return lines + [line for text in _link(run) for line in ("", text)]


def _link(run: LoadedRun) -> Iterator[str]:
  """Yields sentences about a throttled link and about hidden exchanges."""
  counted = math.fsum(timing.link_bytes for timing in run.timings)
  if run.total_sent_bytes and math.isfinite(counted):
    yield (
      f"The kernel counted {units.human_bytes(round(counted))} on the link of"
      f" process 0 (measured), {counted / run.total_sent_bytes:.3f} times what"
      " the plan says that a replica sends."
    )
  waits = [t.exposed_s for t in run.timings if math.isfinite(t.exposed_s)]
  if waits:
    yield (
      "Exchanges ran beside the inner steps. After its steps a round waited"
      f" {statistics.median(waits):.3f} s for them (median, measured), and"
      f" {max(waits):.3f} s at most."
    )


def _again(run: LoadedRun) -> list[str]:
  record = run.record
  method, versions = record["method"], sorted(record["versions"].items())
  command = record.get("command") or (
    "python -m experiments.train"
    f" --config.sync.method={method} --workdir=runs/{method}"
  )
  rows = [*versions, ("source", record["source_revision"] or "unknown")]
  lines = ["```", command, "```", ""]
  lines += [
    "`config.json` in this directory holds all settings of the run (the table"
    " above). Pass settings that differ from the config file as"
    " `--config.section.field=value`."
  ]
  lines += ["", *markdown_table(("what", "version"), rows)]
  if chosen := record.get("chosen_for_device"):
    values = ", ".join(f"`{k}={v}`" for k, v in sorted(chosen.items()))
    start = "Left open by the config, and chosen for the device"
    lines += ["", f"{start}: {values}."]
  if earlier := record.get("earlier_starts"):
    lines += [
      "",
      f"Parts of this run were started in another way ({len(earlier)} earlier"
      " starts with another command, platform, source revision or choice for"
      " the device). `run.json` lists them.",
    ]
  return lines


def _draw(run: LoadedRun) -> list[str]:
  lines = []
  for name, (draw, caption) in _FIGURES.items():
    figure = draw(run)
    if figure is not None:
      lines += picture(figure, run.workdir, name, caption)
      lines += [f"*{caption}*", ""]
  return lines or ["There is nothing to draw yet.", ""]


def write_report(workdir: Directory) -> pathlib.Path:
  """Writes `report.md` and `figures/` of a run, finished or not.

  Args:
    workdir: Run directory.

  Returns:
    Path of `report.md`.

  Raises:
    RecordError: If the directory is no run directory, or a file of it cannot be
      read or written.
  """
  try:
    run = load_run(workdir)
  except ValueError as error:
    raise RecordError(
      f"there is no report: {error}; checkpoints and metrics stay as they are"
    ) from error
  settings = [(f"`{k}`", f"`{v}`") for k, v in flat(run.config).items()]
  sections = {
    "Results": _results(run),
    "Figures": _draw(run),
    "Who met": meeting_lines(run.workdir),
    "What it cost": _cost(run),
    "Settings": markdown_table(("field", "value"), settings),
    "How to reproduce": _again(run),
  }
  sample = run.workdir / SAMPLE
  if sample.exists():
    text = sample.read_text("utf-8").splitlines()
    sections["A sample"] = [f"    {line}" for line in text]
  lines = [_summary(run), ""]
  for title, body in sections.items():
    if not body:
      continue
    lines += [f"## {title}", "", *body, ""]
  title = f"{run.record['method']} on {run.record['corpus_name']}"
  return write_page(run.workdir, title, lines)
