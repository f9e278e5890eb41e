"""Writes the page of one run: results, figures, cost, and how to reproduce it.

The page must be enough to judge its numbers. So it says how they were obtained,
for example that they are measured, derived or simulated.
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
from dilocox_jax.config.run import changed_settings
from dilocox_jax.metrics.lines import (
  Directory,
  RecordError,
  make_directory,
  one_line,
  read_rows,
  write_atomically,
)
from dilocox_jax.metrics.recorder import MAILBOX_LOG
from dilocox_jax.report import expected_gap, figures, units
from dilocox_jax.report.escape import code, fenced, indented, markdown
from dilocox_jax.report.html import html_page
from dilocox_jax.report.run import LoadedRun, load_run
from dilocox_jax.report.tables import markdown_table

PAGE = "report.md"
HTML_PAGE = "report.html"  # The same page as one file, pictures inside.
FIGURES = "figures"  # Folder of the page's pictures.
SAMPLE = "sample.txt"  # Written by experiments.sample.
_LONGEST_SAMPLE = 2**24  # Bytes. A longer file is no sample of ours.
# Function that draws a figure of a run, and the figure's caption, by file name.
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
  """Saves a figure for a page, and returns the lines that show it there.

  Args:
    figure: Matplotlib figure.
    out_dir: Directory of the page. The figure goes to its folder `figures/`.
    name: File name without suffix.
    caption: Text that replaces the picture if the picture cannot be shown.

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
  """Removes pictures of an earlier page that the new page does not show.

  `names` are file names without suffix. Raises RecordError if that fails.
  """
  for name in names:
    path = out_dir / FIGURES / f"{name}.png"
    with one_line(path, "remove"):
      path.unlink(missing_ok=True)


def write_page(
  out_dir: pathlib.Path, title: str, lines: Sequence[str], command: str = ""
) -> pathlib.Path:
  """Writes `report.md`, and the same page as `report.html`.

  Args:
    out_dir: Directory of the page, which has the pictures already.
    title: Title of the page, as plain text.
    lines: Lines below title and command, in Markdown.
    command: Command line to show below the title; "": none.

  Returns:
    Path of `report.md`.

  Raises:
    RecordError: If a file cannot be written, or a picture cannot be read.
  """
  start = [f"# {markdown(title)}", ""]
  if command:
    start += [*indented(command), ""]
  text = "\n".join([*start, *lines]).rstrip() + "\n"
  write_atomically(out_dir / PAGE, text)
  write_atomically(out_dir / HTML_PAGE, html_page(title, text, out_dir))
  return out_dir / PAGE


def _summary(run: LoadedRun) -> str:
  """Returns the first paragraph: what was trained, and which loss it has."""
  record = run.record
  replicas = "one replica"
  if record["num_replicas"] != 1:
    replicas = f"{record['num_replicas']} replicas"
  tokens = units.human_tokens(run.tokens)
  if run.uses_mailbox:
    tokens += " of this replica"
  training = (
    f"{code(record['method'])} trained {record['parameter_count']:,} parameters"
    f" on {replicas} for {run.steps:,} steps ({tokens})."
  )
  if run.result is None:
    return f"{training} There is no validation yet."
  other_units = f", perplexity {run.perplexity:,.4g}"
  if math.isfinite(run.bits_per_byte):
    other_units += f", {units.human_loss(run.bits_per_byte)} bits a byte"
  start = "The final"
  if not run.finished:
    start = "The run has not ended. So far the"
  return (
    f"{training} {start} validation loss is"
    f" **{units.human_loss(run.validation_loss)}** nats a token{other_units}"
    " (measured) on"
    f" the corpus {markdown(record['corpus_name'])} with digest"
    f" {code(record['corpus_digest'])}. Compare losses only if the digests are"
    f" equal. Each replica sent {units.human_bytes(run.total_sent_bytes)}"
    " (derived from the plan)."
  )


def _results(run: LoadedRun) -> list[str]:
  """Returns the table of losses, bytes, steps and tokens."""
  losses = {}
  if run.result:
    losses = {
      "validation loss, outer parameters": run.result.outer_loss,
      "validation loss, replicas' mean": run.result.mean_loss,
      "validation loss, replica 0": run.result.replica_loss,
      "loss on the judge text (held-out files that only the last evaluation"
      " reads)": run.result.judge_loss,
    }
  if run.rounds:
    losses["training loss, last round"] = run.rounds[-1].loss
  rows = []
  for name, loss in losses.items():
    if not math.isnan(loss):
      rows.append((name, units.human_loss(loss), "measured"))
  sent = units.human_bytes(run.total_sent_bytes)
  rows.append(("bytes sent by one replica", sent, "derived"))
  rows.append(("inner steps", f"{run.steps:,}", "counted"))
  tokens = f"tokens, {run.counted_replicas}"
  rows.append((tokens, f"{run.tokens:,}", "counted"))
  return markdown_table(("quantity", "value", "kind"), rows)


def _cost(run: LoadedRun) -> Iterator[str]:
  """Yields the table of wall times, and sentences about them."""
  seconds_by_event = collections.defaultdict(list)
  for timing in run.timings:
    seconds_by_event[timing.event].append(timing.wall_s)
  rows = []
  for event, seconds in sorted(seconds_by_event.items()):
    rows.append((event, len(seconds), f"{math.fsum(seconds):.1f}"))
  rows.append(("all", len(run.timings), f"{run.wall_s:.1f}"))
  yield from markdown_table(("event", "times", "wall time (s)"), rows)
  yield ""
  if math.isfinite(run.tokens_per_s):
    yield (
      f"Throughput of the rounds: {run.tokens_per_s:,.0f} tokens/s of"
      f" {run.counted_replicas}."
    )
  yield (
    f"All times were measured on {code(run.record['platform'])}. A run that was"
    " resumed counts only the work that it kept."
  )
  for text in _link(run):
    yield ""
    yield text


def _link(run: LoadedRun) -> Iterator[str]:
  """Yields sentences about bytes on the link, and about waiting for exchanges.

  There are none for a run that has measured neither.
  """
  link_bytes = math.fsum(timing.link_bytes for timing in run.timings)
  if run.total_sent_bytes and math.isfinite(link_bytes):
    yield (
      f"The kernel counted {units.human_bytes(round(link_bytes))} on the link"
      " of process 0 (measured),"
      f" {link_bytes / run.total_sent_bytes:.3f} times what"
      " the plan says that a replica sends."
    )
  waits = [
    timing.exposed_s
    for timing in run.timings
    if math.isfinite(timing.exposed_s)
  ]
  if waits:
    yield (
      "After its inner steps, a round waited"
      f" {statistics.median(waits):.3f} s for its exchange (median, measured),"
      f" and {max(waits):.3f} s at most."
    )


def _mailbox_members(workdir: pathlib.Path) -> list[str]:
  """Returns lines about the events (exchanges) of a mailbox, if there are any.

  They name the replicas whose messages each event averaged or left out, and
  count requests to the mailbox. If an event has several rows, the last counts.
  Raises RecordError if a row is damaged.
  """
  rows = read_rows(workdir / MAILBOX_LOG)
  try:
    with in_front(f"{workdir / MAILBOX_LOG} has a damaged row: "):
      for row in rows:
        _check_mailbox_row(row)
  except ValueError as error:
    raise RecordError(str(error)) from error
  if not rows:
    return []
  rows_by_event = {row["event"]: row for row in rows}
  lines = markdown_table(
    ("events", "averaged (measured)", "left out"), _event_spans(rows_by_event)
  )
  usage = dict(rows[-1]["usage"])
  written = units.human_bytes(usage.pop("bytes_up", 0))
  read = units.human_bytes(usage.pop("bytes_down", 0))
  requests = ", ".join(f"{number:,} {kind}" for kind, number in usage.items())
  return [
    *lines,
    "",
    f"Since its last start this replica made {requests} requests, wrote"
    f" {written} and read {read} (measured, snapshots and manifests included).",
  ]


def _sample(workdir: pathlib.Path) -> str:
  """Returns the text that the model wrote to `sample.txt`.

  The result is "" if the file is missing, too large or a link.
  """
  # A link would let anybody who can write in the directory show any file of
  # this machine on the page, so it does not count as a sample.
  with one_line(workdir / SAMPLE, "read"):
    folder = files.opened_root(workdir)
    try:
      content = files.read_file(folder, SAMPLE, at_most=_LONGEST_SAMPLE)
    finally:
      os.close(folder)
  return (content or b"").decode(errors="replace")


def _check_mailbox_row(row: dict[str, Any]) -> None:
  """Raises ValueError unless a row of mailbox.jsonl has what the page reads."""
  of_type("event", row.get("event"), int)
  for name in of_type("members", row.get("members"), list):
    of_type("members", name, str)
  for reason in of_type("left_out", row.get("left_out"), dict).values():
    of_type("left_out", reason, str)
  for count in of_type("usage", row.get("usage"), dict).values():
    of_type("usage", count, int)


def _event_spans(
  rows_by_event: dict[int, Any],
) -> Iterator[tuple[str, str, str]]:
  """Yields the rows of the table of events (exchanges through a mailbox).

  Consecutive events with one outcome share a row: ("3 to 7", "a, b", "c: too
  late").
  """

  def outcome(event: int) -> tuple[str, str]:
    row = rows_by_event[event]
    members = ", ".join(row["members"]) or "nobody"
    reasons = "; ".join(
      f"{name}: {reason}" for name, reason in row["left_out"].items()
    )
    return members, reasons

  events = sorted(rows_by_event)
  for (members, reasons), group in itertools.groupby(events, outcome):
    span = list(group)
    numbers = f"{span[0]}"
    if len(span) > 1:
      numbers = f"{span[0]} to {span[-1]}"
    yield numbers, members, reasons


def _how_to_reproduce(run: LoadedRun) -> Iterator[str]:
  """Yields Markdown lines that tell how to repeat a run.

  They are the command, the versions, and what the config does not contain:
  overrides, values chosen for the device, and starts with another command or
  platform.
  """
  record = run.record
  method = record["method"]
  command = record.get("command") or (
    f"python -m experiments.train --config.sync.method={shlex.quote(method)}"
    f" --workdir=runs/{method.partition('(')[0]}"
  )
  yield from fenced(command)
  yield ""
  yield (
    "`config.json` in this directory holds all settings of the run (the last"
    " table of this page). Pass settings that differ from the config file as"
    " `--config.section.field=value`."
  )
  yield ""
  versions = sorted(record["versions"].items())
  versions.append(("source", record["source_revision"] or "unknown"))
  yield from markdown_table(("what", "version"), versions)
  # The frozen weights of adapters are not named: the settings decide them.
  overrides = [
    name
    for name in record.get("overrides", ())
    if not name.startswith("frozen")
  ]
  if overrides:
    names = markdown(", ".join(overrides))
    yield ""
    yield f"Overrides of the settings: {names}."
  # Bytes are planned with the codec of the config, not that of an override.
  if "exchange" in overrides:
    yield "Bytes are those of the codec in the settings."
  chosen = record.get("chosen_for_device")
  if chosen:
    values = ", ".join(
      code(f"{field}={value}") for field, value in sorted(chosen.items())
    )
    yield ""
    yield f"Left open by the config, chosen for the device: {values}."
  earlier_starts = record.get("earlier_starts")
  if earlier_starts:
    yield ""
    yield (
      "Parts of this run were started in another way"
      f" ({len(earlier_starts)} earlier"
      " starts with another command, platform, source revision or choice for"
      " the device). `run.json` lists them."
    )


def _changed_settings(run: LoadedRun) -> list[str]:
  """Returns the settings that differ from the defaults, as a Markdown table.

  The method and the number of steps are compared with the defaults of
  `RunConfig`, all other settings with those of a run with this method and
  number of steps.
  """
  rows = []
  for field, (value, default) in changed_settings(run.config).items():
    # None leaves the value to the method, the model or the devices.
    default_text = "automatic" if default is None else code(str(default))
    rows.append((code(field), code(str(value)), default_text))
  if not rows:
    return ["All settings have their defaults."]
  return markdown_table(("field", "value", "default"), rows)


def _all_settings(run: LoadedRun) -> list[str]:
  """Returns the table of all settings."""
  rows = [
    (code(field), code(str(value))) for field, value in flat(run.config).items()
  ]
  return markdown_table(("field", "value"), rows)


def _draw(run: LoadedRun) -> Iterator[str]:
  """Draws the figures of a run, and yields the lines that show them.

  If the run has no values for a figure, that of an earlier report is removed.
  """
  for name, (draw, caption) in _FIGURES.items():
    figure = draw(run)
    if figure is None:
      remove_pictures(run.workdir, [name])
      continue
    yield from picture(figure, run.workdir, name, caption)
    yield f"*{caption}*"
    yield ""


def write_report(workdir: Directory) -> pathlib.Path:
  """Writes the report of a run, which need not have ended.

  The report is `report.md` with the pictures in `figures/`, and the same page
  as the single file `report.html`.

  Args:
    workdir: Run directory.

  Returns:
    Path of `report.md`.

  Raises:
    RecordError: If the directory is not a run directory, or if one of its files
      is damaged or cannot be read or written.
  """
  try:
    run = load_run(workdir)
  except ValueError as error:
    raise RecordError(
      f"there is no report: {error}; checkpoints and metrics stay as they are"
    ) from error
  sections: dict[str, Iterable[str]] = {
    "Results": _results(run),
    **expected_gap.section(run),
    "What differs from the defaults": _changed_settings(run),
    "Figures": _draw(run),
    "What it cost": _cost(run),
    "How to reproduce": _how_to_reproduce(run),
  }
  mailbox_members = _mailbox_members(run.workdir)
  if mailbox_members:
    sections["Who met"] = mailbox_members
  sample = _sample(run.workdir)
  if sample:
    sections["A sample"] = indented(sample)
  sections["All settings"] = _all_settings(run)
  lines = [_summary(run), ""]
  for title, body in sections.items():
    # `list` runs the generators, so the figures are drawn and saved here.
    body_lines = list(body) or ["None yet."]
    lines += [f"## {title}", "", *body_lines, ""]
  title = f"{run.record['method']} on {run.record['corpus_name']}"
  return write_page(run.workdir, title, lines)
