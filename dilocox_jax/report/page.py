"""Page of one run: results, figures, cost, settings and how to reproduce it.

A reader who has only this page must be able to judge its numbers. So the loss
stands beside the corpus it was measured on, and every figure says whether it
is measured or derived.
"""

import collections
import itertools
import math
import os
import pathlib
import shlex
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dilocox_jax import files
from dilocox_jax.checks import flat, in_front, of_type
from dilocox_jax.metrics.lines import (
  Directory,
  RecordError,
  make_directory,
  one_line,
  read_rows,
  write_atomically,
)
from dilocox_jax.metrics.recorder import MAILBOX_LOG
from dilocox_jax.report import figures, units
from dilocox_jax.report.escape import code, fenced, indented, markdown
from dilocox_jax.report.run import LoadedRun, load_run
from dilocox_jax.report.tables import markdown_table

PAGE, FIGURES = "report.md", "figures"
SAMPLE = "sample.txt"  # Written by experiments.sample.
_LONGEST_SAMPLE = 2**24  # Bytes. A longer file is not one of ours.
# What draws a figure of a run, and the figure's caption, by name of its file.
_FIGURES: dict[str, tuple[Callable[[LoadedRun], Any], str]] = {
  "loss": (figures.loss_figure, "Loss against tokens (measured)."),
  "drift": (
    figures.drift_figure,
    "Pairwise cosine of the replicas' pseudo-gradients, and the norm of their"
    " disagreement (measured).",
  ),
  "hours": (
    figures.time_figure,
    "Loss (measured) against the time on the cluster of the axis (simulated).",
  ),
  "ranks": (figures.rank_figure, "Ranks of the updates, and length of rounds."),
}


def picture(
  figure: Any, out_dir: pathlib.Path, name: str, caption: str
) -> list[str]:
  """Saves a figure for a page; returns the lines that show it there.

  Args:
    figure: Matplotlib figure.
    out_dir: Directory of the page. The figure is written to its `figures/`.
    name: File name without suffix.
    caption: Text that stands for the picture where it cannot be seen, shown as
      it is.

  Raises:
    RecordError: If the file cannot be written.
  """
  path = out_dir / FIGURES / f"{name}.png"
  make_directory(out_dir)
  with one_line(path):
    files.folder_below(out_dir, FIGURES)
    with files.replaced(path, root=out_dir) as file:
      figure.savefig(file, format="png")
  return [f"![{markdown(caption)}]({FIGURES}/{name}.png)", ""]


def remove_pictures(out_dir: pathlib.Path, names: Iterable[str]) -> None:
  """Removes pictures of an earlier page, which the new one does not show.

  Args:
    out_dir: Directory of the page.
    names: File names without suffix, as for `picture`.

  Raises:
    RecordError: If the system refuses.
  """
  for name in names:
    path = out_dir / FIGURES / f"{name}.png"
    with one_line(path, "remove"):
      path.unlink(missing_ok=True)


def write_page(
  out_dir: pathlib.Path, title: str, lines: Sequence[str], command: str = ""
) -> pathlib.Path:
  """Writes `report.md`: title, command line if there is one, then the lines.

  Returns:
    Path of `report.md`.

  Raises:
    RecordError: If the file cannot be written.
  """
  start = [f"# {markdown(title)}", ""]
  if command:
    start += [*indented(command), ""]
  text = "\n".join([*start, *lines]).rstrip() + "\n"
  write_atomically(out_dir / PAGE, text)
  return out_dir / PAGE


def _summary(run: LoadedRun) -> str:
  record = run.record
  replicas = record["num_replicas"]
  who = "one replica" if replicas == 1 else f"{replicas} replicas"
  start = (
    f"{code(record['method'])} trained {record['parameter_count']:,} parameters"
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
    f" the corpus {markdown(record['corpus_name'])} with digest"
    f" {code(record['corpus_digest'])}. Compare losses only if the digests are"
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
  if run.rounds:
    losses["training loss, last round"] = run.rounds[-1].loss
  sent = units.human_bytes(run.total_sent_bytes)
  rows = [
    (name, units.human_loss(loss), "measured")
    for name, loss in losses.items()
    if not math.isnan(loss)
  ]
  rows += [
    ("bytes sent by one replica", sent, "derived"),
    ("inner steps", f"{run.steps:,}", "counted"),
    ("tokens, all replicas", f"{run.tokens:,}", "counted"),
  ]
  return markdown_table(("quantity", "value", "kind"), rows)


def _cost(run: LoadedRun) -> Iterator[str]:
  spent_s = collections.defaultdict(list)
  for timing in run.timings:
    spent_s[timing.event].append(timing.wall_s)
  rows = [
    (k, len(v), f"{math.fsum(v):.1f}") for k, v in sorted(spent_s.items())
  ]
  rows.append(("all", len(run.timings), f"{run.wall_s:.1f}"))
  yield from markdown_table(("event", "times", "wall time (s)"), rows)
  yield ""
  if math.isfinite(speed := run.tokens_per_s):
    yield f"Throughput of the rounds: {speed:,.0f} tokens/s."
  yield (
    f"All times were measured on {code(run.record['platform'])}. A run that was"
    " resumed counts only the work that it kept."
  )
  for text in _link(run):
    yield from ("", text)


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


def _mailbox_members(workdir: pathlib.Path) -> list[str]:
  """Says who met in a store and what it cost; nothing if nobody did.

  The trainer writes a row for each event. A replica that began again may have
  several rows of an event; the last one counts.

  Raises:
    RecordError: If a row is damaged.
  """
  rows = read_rows(workdir / MAILBOX_LOG)
  try:
    with in_front(f"{workdir / MAILBOX_LOG} has a damaged row: "):
      for row in rows:
        _check_meeting(row)
  except ValueError as error:
    raise RecordError(str(error)) from error
  events = {row["event"]: row for row in rows}
  if not events:
    return []
  lines = markdown_table(
    ("events", "averaged (measured)", "left out"), [*_spans(events)]
  )
  usage = dict(rows[-1]["usage"])
  up, down = usage.pop("bytes_up", 0), usage.pop("bytes_down", 0)
  requests = ", ".join(f"{count:,} {kind}" for kind, count in usage.items())
  return [
    *lines,
    "",
    f"Since its last start this replica made {requests} requests, wrote"
    f" {units.human_bytes(up)} and read {units.human_bytes(down)} (measured,"
    " snapshots and manifests included).",
  ]


def _sample(workdir: pathlib.Path) -> str:
  """Returns what a model wrote; nothing if there is none.

  A link, or anything else that is no file, is none: whoever may write in the
  directory could bring another file onto the page.

  Raises:
    RecordError: If it cannot be read.
  """
  with one_line(workdir / SAMPLE, "read"):
    folder = files.opened_root(workdir)
    try:
      content = files.read_file(folder, SAMPLE, at_most=_LONGEST_SAMPLE)
    finally:
      os.close(folder)
  return (content or b"").decode(errors="replace")


def _check_meeting(row: dict[str, Any]) -> None:
  """Raises ValueError unless a row says who met."""
  of_type("event", row.get("event"), int)
  for name in of_type("members", row.get("members"), list):
    of_type("members", name, str)
  for reason in of_type("left_out", row.get("left_out"), dict).values():
    of_type("left_out", reason, str)
  for count in of_type("usage", row.get("usage"), dict).values():
    of_type("usage", count, int)


def _spans(events: dict[int, Any]) -> Iterator[tuple[str, str, str]]:
  """Yields events with the same members, one after the other, as one row."""

  def outcome(event: int) -> tuple[str, str]:
    members, left_out = events[event]["members"], events[event]["left_out"]
    reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
    return ", ".join(members) or "nobody", reasons

  for found, group in itertools.groupby(sorted(events), outcome):
    first, *_, last = [*group] * 2
    yield (f"{first}" if first == last else f"{first} to {last}", *found)


def _again(run: LoadedRun) -> Iterator[str]:
  record, method = run.record, run.record["method"]
  command = record.get("command") or (
    f"python -m experiments.train --config.sync.method={shlex.quote(method)}"
    f" --workdir=runs/{method.partition('(')[0]}"
  )
  source = "source", record["source_revision"] or "unknown"
  rows = [*sorted(record["versions"].items()), source]
  yield from (*fenced(command), "")
  yield (
    "`config.json` in this directory holds all settings of the run (the table"
    " above). Pass settings that differ from the config file as"
    " `--config.section.field=value`."
  )
  yield from ("", *markdown_table(("what", "version"), rows))
  # What adapters leave frozen follows from the settings.
  named = record.get("handed_in", ())
  if parts := [part for part in named if not part.startswith("frozen")]:
    given = "Handed in, in place of what the settings say: "
    yield from ("", f"{given}{markdown(', '.join(parts))}.")
  if "exchange" in parts:
    yield "Bytes are those of the codec in the settings."
  if chosen := record.get("chosen_for_device"):
    values = ", ".join(code(f"{k}={v}") for k, v in sorted(chosen.items()))
    yield from (
      "",
      f"Left open by the config, chosen for the device: {values}.",
    )
  if earlier := record.get("earlier_starts"):
    yield ""
    yield (
      f"Parts of this run were started in another way ({len(earlier)} earlier"
      " starts with another command, platform, source revision or choice for"
      " the device). `run.json` lists them."
    )


def _draw(run: LoadedRun) -> Iterator[str]:
  for name, (draw, caption) in _FIGURES.items():
    figure = draw(run)
    if figure is None:
      remove_pictures(run.workdir, [name])
    else:
      yield from picture(figure, run.workdir, name, caption)
      yield from (f"*{caption}*", "")


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
  settings = [(code(k), code(str(v))) for k, v in flat(run.config).items()]
  sections: dict[str, Iterable[str]] = {
    "Results": _results(run),
    "Figures": _draw(run),
    "What it cost": _cost(run),
    "Settings": markdown_table(("field", "value"), settings),
    "How to reproduce": _again(run),
  }
  if members := _mailbox_members(run.workdir):
    sections["Who met"] = members
  if sample := _sample(run.workdir):
    sections["A sample"] = indented(sample)
  lines = [_summary(run), ""]
  for title, body in sections.items():
    text = [*body] or ["None yet."]
    lines += [f"## {title}", "", *text, ""]
  title = f"{run.record['method']} on {run.record['corpus_name']}"
  return write_page(run.workdir, title, lines)
