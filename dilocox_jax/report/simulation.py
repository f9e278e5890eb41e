"""Writes the page of a simulated run: costs, links, and a Gantt chart.

Nothing on this page is measured. Every row says whether it follows from the
config, from the cluster or from a formula. The simulator computes times in two
independent ways, by formula and with an event engine, and the page shows both.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from dilocox_jax.metrics.lines import Directory, write_atomically, write_json
from dilocox_jax.report import style, units
from dilocox_jax.report.page import picture, write_page
from dilocox_jax.report.text_tables import markdown_table, terminal_table

# Largest number of bars in the chart. With more, a reader could not tell them
# apart.
_MOST_BARS = 4000


@dataclasses.dataclass(frozen=True)
class Bar:
  """One bar of the Gantt chart.

  Attributes:
    track: Name of the replica or route that was busy.
    lane: Row within the track; bars that overlap have different lanes.
    start_s: Simulated time at which the bar starts (s).
    end_s: Simulated time at which the bar ends (s).
    kind: "steps", "codec" or "exchange".
  """

  track: str
  lane: int
  start_s: float
  end_s: float
  kind: str


@dataclasses.dataclass(frozen=True)
class SimulatedRun:
  """The contents of the page of a simulated run.

  Attributes:
    title: Names of the method and the cluster.
    quantities: Rows of the table of costs: name, value with its unit, and
      where the value comes from, e.g. "derived: formula".
    links: (goodput in bit/s, bytes carried, share of time in use) by name of
      the link.
    numbers: Costs as plain numbers, for JSON.
    notes: Sentences about the assumptions of the simulation.
    bars: Bars of the chart, from the start of the run.
    trace: The same in the format of Chrome's tracing tool.
  """

  title: str
  quantities: Sequence[tuple[str, str, str]]
  links: Mapping[str, tuple[float, float, float]]
  numbers: Mapping[str, object]
  notes: Sequence[str]
  bars: Sequence[Bar] = ()
  trace: Mapping[str, object] = dataclasses.field(default_factory=dict)


_KINDS = {
  "steps": "inner steps",
  "exchange": "exchange (one bar per message)",
  "codec": "codec",
}


def gantt(run: SimulatedRun) -> Figure:
  """Draws bars over time, one row per lane, in one colour per kind.

  The text at the right end of a row says for which share of the time the row is
  busy.
  """
  bars = run.bars[:_MOST_BARS]
  rows: dict[tuple[str, int], int] = {}
  for bar in sorted(bars, key=lambda b: (b.kind == "exchange", b.track)):
    rows.setdefault((bar.track, bar.lane), len(rows))
  end_s = max(bar.end_s for bar in bars)
  busy_s = dict.fromkeys(rows, 0.0)
  for bar in bars:
    busy_s[bar.track, bar.lane] += bar.end_s - bar.start_s
  height = 1.6 + 0.32 * len(rows)
  title = _gantt_title(run, bars, end_s)
  figure, (ax,) = style.frame(1, title, (9.6, min(height, 12.0)))
  divisor, unit = units.time_unit(end_s)
  # A white edge as wide as a short bar would hide it.
  inches_s = 0.7 * figure.get_size_inches()[0] / end_s
  for (kind, name), colour in zip(_KINDS.items(), style.COLOURS, strict=False):
    shown = [bar for bar in bars if bar.kind == kind]
    if shown:
      places = [rows[bar.track, bar.lane] for bar in shown]
      lengths = [(bar.end_s - bar.start_s) / divisor for bar in shown]
      starts = [bar.start_s / divisor for bar in shown]
      inches = inches_s * min(bar.end_s - bar.start_s for bar in shown)
      look: dict[str, Any] = {"color": colour, "edgecolor": "white"}
      look["linewidth"] = min(0.4, 6 * inches)
      ax.barh(places, lengths, left=starts, label=name, **look)
  names = [track if not lane else "" for track, lane in rows]
  ax.set_yticks(range(len(rows)), names)
  for key, row in rows.items():
    share = f" {units.human_share(busy_s[key] / end_s)} busy"
    where = {"xycoords": ("axes fraction", "data"), "va": "center"}
    ax.annotate(share, (1, row), fontsize=8, color=style.GREY, **where)
  ax.invert_yaxis()
  ax.set_xlim(0, end_s / divisor)
  style.label(ax, "derived: event engine", f"simulated time ({unit})")
  style.legend(figure, ax, 3)
  return figure


def _gantt_title(run: SimulatedRun, bars: Sequence[Bar], end_s: float) -> str:
  """Returns the title, which says how much of the time replicas compute."""
  steps = [bar for bar in bars if bar.kind == "steps"]
  replicas = {bar.track for bar in steps}
  if not replicas:
    return f"The first {units.human_time(end_s)} of {run.title}"
  computing_s = sum(bar.end_s - bar.start_s for bar in steps)
  share = units.human_share(computing_s / (len(replicas) * end_s))
  first = units.human_time(end_s)
  return f"{run.title}: replicas compute {share} of the first {first}"


_COST_COLUMNS = ("quantity", "value", "kind")
_LINK_COLUMNS = ("link", "goodput", "bytes carried", "share of time in use")


def write_simulation(
  run: SimulatedRun, out_dir: Directory, command: str = ""
) -> pathlib.Path:
  """Writes `report.md`, the numbers `simulation.json`, chart and trace.

  Args:
    run: Results of the simulation.
    out_dir: Directory to write into.
    command: Command line to show on the page.

  Returns:
    Path of `report.md`.

  Raises:
    RecordError: If a file cannot be written.
  """
  out_dir = pathlib.Path(out_dir)
  lines = ["Everything on this page is simulated; nothing was measured.", ""]
  lines += ["## Cost", "", *markdown_table(_COST_COLUMNS, run.quantities)]
  links = []
  for name, (goodput_bps, carried_bytes, share) in run.links.items():
    goodput = f"{units.human_bytes(goodput_bps / 8)}/s"
    carried = units.human_bytes(round(carried_bytes))
    links.append((name, goodput, carried, f"{share:.1%}"))
  lines += ["", "## Links", "", *markdown_table(_LINK_COLUMNS, links)]
  if run.bars:
    chart = picture(gantt(run), out_dir, "gantt", "Gantt")
    lines += ["", "## Start of the run", "", *chart]
    lines += ["`trace.json` can be opened in Perfetto or chrome://tracing."]
    write_atomically(out_dir / "trace.json", json.dumps(run.trace))
  lines += ["", "## Assumptions", "", *(f"- {note}" for note in run.notes)]
  write_json(out_dir / "simulation.json", dict(run.numbers))
  return write_page(out_dir, run.title, lines, command)


def print_simulation(run: SimulatedRun, console: Console) -> None:
  """Prints the table of costs on a terminal."""
  rows = run.quantities
  console.print(terminal_table(_COST_COLUMNS, rows, (0, 2), title=run.title))
