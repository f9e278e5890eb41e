"""A simulated run: what it costs, on which links, and a picture of its start.

Nothing here was measured. Every table says what follows from the config, from
the cluster, and from formulas, and the two paths of the simulator stand side
by side, so that a reader sees how far they may be trusted.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from dilocox_jax.metrics.lines import Directory, write_atomically, write_json
from dilocox_jax.report import style, units
from dilocox_jax.report.page import PAGE, save_figure
from dilocox_jax.report.text_tables import markdown_table

# Bars that are drawn; more cannot be told apart.
_MOST_BARS = 4000


@dataclasses.dataclass(frozen=True)
class Bar:
  """Something that took time.

  Attributes:
    track: Where: a replica, or a route.
    lane: Row within the track.
    start_s: When it began.
    end_s: When it ended.
    kind: "steps", "codec" or "exchange".
  """

  track: str
  lane: int
  start_s: float
  end_s: float
  kind: str


@dataclasses.dataclass(frozen=True)
class SimulatedCost:
  """A row of the table: what, how much, and how it is known."""

  name: str
  value: str
  kind: str


@dataclasses.dataclass(frozen=True)
class SimulatedRun:
  """All that a page says.

  Attributes:
    title: Method and cluster.
    quantities: Costs, in the order of the table.
    links: Link to (capacity in bit/s, bytes carried, share of time in use).
    numbers: The same as plain numbers, for JSON.
    notes: Sentences about what was assumed.
    bars: What happened at the start of the run.
  """

  title: str
  quantities: Sequence[SimulatedCost]
  links: Mapping[str, tuple[float, float, float]]
  numbers: Mapping[str, object]
  notes: Sequence[str]
  bars: Sequence[Bar]


def gantt(run: SimulatedRun) -> Figure:
  """Bars over time, a row a lane; compute and exchanges in two colours."""
  bars = run.bars[:_MOST_BARS]
  rows: dict[tuple[str, int], int] = {}
  for bar in sorted(bars, key=lambda b: (b.kind == "exchange", b.track)):
    rows.setdefault((bar.track, bar.lane), len(rows))
  height = 1.6 + 0.32 * len(rows)
  figure, (ax,) = style.frame(
    1, f"The first seconds of {run.title}", (9.6, min(height, 12.0))
  )
  colours = dict(
    zip(("steps", "exchange", "codec"), style.COLOURS, strict=False)
  )
  names = {"steps": "inner steps", "exchange": "exchange", "codec": "codec"}
  for kind, colour in colours.items():
    mine = [bar for bar in bars if bar.kind == kind]
    if mine:
      ax.barh(
        [rows[bar.track, bar.lane] for bar in mine],
        [bar.end_s - bar.start_s for bar in mine],
        left=[bar.start_s for bar in mine],
        color=colour,
        edgecolor="white",
        linewidth=0.4,
        label=names[kind],
      )
  labels = [track if not lane else "" for track, lane in rows]
  ax.set_yticks(range(len(rows)), labels)
  ax.invert_yaxis()
  ax.set_xlabel("simulated time (s)")
  style.caption(ax, "derived: event engine")
  style.legend(figure, ax, 3)
  return figure


def _link_rows(run: SimulatedRun) -> list[tuple[str, str, str, str]]:
  return [
    (
      name,
      f"{units.human_bytes(bps / 8)}/s",
      units.human_bytes(round(carried)),
      f"{share:.1%}",
    )
    for name, (bps, carried, share) in run.links.items()
  ]


_LINK_COLUMNS = ("link", "goodput", "bytes carried", "share of time in use")


def write_simulation(
  run: SimulatedRun, out_dir: Directory, command: str = ""
) -> pathlib.Path:
  """Writes report.md, simulation.json and the figure.

  Args:
    run: What to say.
    out_dir: Where.
    command: The command line, for the record.

  Returns:
    Path of the page.

  Raises:
    RecordError: The disk refused.
  """
  out_dir = pathlib.Path(out_dir)
  lines = [f"# {run.title}", "", *([f"    {command}", ""] if command else [])]
  lines += ["Simulated: nothing on this page was measured.", ""]
  rows = [(q.name, q.value, q.kind) for q in run.quantities]
  lines += ["## Cost", "", *markdown_table(("quantity", "value", "kind"), rows)]
  lines += ["", "## Links", "", *markdown_table(_LINK_COLUMNS, _link_rows(run))]
  if run.bars:
    save_figure(gantt(run), out_dir / "figures" / "gantt.png")
    lines += ["", "## Start of the run", "", "![Gantt](figures/gantt.png)", ""]
    lines += ["`trace.json` opens in Perfetto or chrome://tracing."]
  lines += ["", "## Assumed", "", *(f"- {note}" for note in run.notes)]
  write_json(out_dir / "simulation.json", dict(run.numbers))
  write_atomically(out_dir / PAGE, "\n".join(lines).rstrip() + "\n")
  return out_dir / PAGE


def print_simulation(run: SimulatedRun, console: Console) -> None:
  """Prints the table of costs."""
  table = Table(title=run.title, title_justify="left")
  table.add_column("quantity")
  table.add_column("value", justify="right")
  table.add_column("kind")
  for each in run.quantities:
    table.add_row(each.name, each.value, each.kind)
  console.print(table)
