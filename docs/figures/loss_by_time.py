"""Draws the figure of the README from the committed runs.

  python -m docs.figures.loss_by_time

It reads docs/results, trains nothing, and takes less than a minute. Two methods
are compared only if both keep an average of their parameters or neither does.
"""

import dataclasses
import json
import pathlib
import statistics
import tempfile
from collections.abc import Mapping

from matplotlib.axes import Axes

from dilocox_jax.report import panels, style
from dilocox_jax.report.frame import Setting, standard_error
from dilocox_jax.simulate.cluster_file import cluster_presets
from dilocox_jax.simulate.transfer import NCCL
from experiments.configs import convergence
from experiments.sweeps import page, rows, runs
from experiments.sweeps.clocks import SweepClock

DOCS = pathlib.Path(__file__).parents[1]
TARGET = 1.5
# Round trips (ms), and the one of the cluster `1gbit`, whose curves are drawn.
ROUND_TRIPS = (0, 10, 40)
SHOWN = 40
# Names in the sweep, and what the legend calls them. All have Muon.
METHODS = {
  "allreduce_muon_average": "AllReduce, average",
  "overlap_loco": "overlap_loco, average",
  "allreduce_muon": "AllReduce, no average",
  "muloco": "MuLoCo, no average",
}
# Who is compared with whom: the same inner optimizer, the same average.
PAIRS = {"overlap_loco": "allreduce_muon_average", "muloco": "allreduce_muon"}


def read() -> dict[str, Setting]:
  """Returns the committed runs by name, with times by round trip in ms."""
  sweep = convergence.get_config("small").to_dict()
  kept = rows.Rows(DOCS.parent / sweep["rows"])
  chosen = [row for row in kept.runs.values() if row.name in METHODS]
  given = [(name, own) for name, own in kept.settings if name in METHODS]
  with tempfile.TemporaryDirectory() as folder:
    clocks = {str(each): _clock(folder, each) for each in ROUND_TRIPS}
    listed = runs.runs_of(sweep, given)
    times = page.times_of(listed, clocks)
    found = page.frame(sweep, listed, chosen, kept, clocks, times)
  return {setting.name: setting for setting in found.settings}


def _clock(folder: str, round_trip_ms: int) -> SweepClock:
  """Returns the preset `1gbit` with another round trip, and NCCL's rings."""
  values = cluster_presets()["1gbit"]
  values["every_site"]["rtt"] = f"{round_trip_ms} ms"
  path = pathlib.Path(folder) / f"{round_trip_ms}.json"
  path.write_text(json.dumps(values))
  return SweepClock(str(path), 0.03, transport=NCCL)


def seconds(entry: Setting, round_trip_ms: int) -> dict[int, float]:
  """Returns the simulated seconds to `TARGET` by seed, where a curve is."""
  found = entry.seconds_to(str(round_trip_ms), TARGET)
  seeds = [trace.seed for trace in entry.traces if trace.points]
  return dict(zip(seeds, found, strict=True))


def ratios(
  entries: Mapping[str, Setting], name: str, round_trip_ms: int
) -> list[float]:
  """Returns how many times sooner than AllReduce a method is, by seed.

  Args:
    entries: Methods by name.
    name: Key of `PAIRS`.
    round_trip_ms: One of `ROUND_TRIPS`.
  """
  own = seconds(entries[name], round_trip_ms)
  base = seconds(entries[PAIRS[name]], round_trip_ms)
  return [base[seed] / own[seed] for seed in sorted(own.keys() & base.keys())]


def ratio_text(values: list[float]) -> str:
  """Formats a mean ratio with its standard error or its single seed."""
  mean = statistics.mean(values)
  error = standard_error(values)
  if len(values) == 1:
    return f"{mean:.1f} (one seed)"
  return f"{mean:.2f} ± {error:.2f} ({len(values)} seeds)"


def _draw_curves(ax: Axes, entries: Mapping[str, Setting]) -> None:
  drawn = []
  for name, label in METHODS.items():
    count = len(entries[name].curves)
    seeds = "one seed" if count == 1 else f"{count} seeds"
    own = panels.curve(entries[name], str(SHOWN), 1.0, count)
    drawn.append(dataclasses.replace(own, label=f"{label} ({seeds})"))
  panels.draw_curves(ax, drawn, list(METHODS))
  caption = f"{SHOWN} ms; loss measured (mean, band: all seeds), time simulated"
  style.label(ax, caption, "", style.LOSS_AXIS)
  style.cost_axis(ax, (8, 320), "simulated time (s)")
  ax.set_xlim(8, 320)
  ax.set_ylim(1.15, 2.0)
  style.mark(ax, TARGET, f"loss {TARGET}")


def _draw_ratios(ax: Axes, entries: Mapping[str, Setting]) -> None:
  """One bar a round trip and method: how many times sooner, with its error."""
  width = 0.38
  own = style.looks(list(PAIRS))
  for number, name in enumerate(PAIRS):
    by_trip = [ratios(entries, name, each) for each in ROUND_TRIPS]
    means = [statistics.mean(each) for each in by_trip]
    places = [i + (number - 0.5) * width for i in range(len(means))]
    errors = [standard_error(each) for each in by_trip]
    look = {"color": own[name]["color"], "alpha": 0.85}
    ax.bar(places, means, width, yerr=errors, **look)
    for place, values in zip(places, by_trip, strict=True):
      text = ratio_text(values).partition(" (")[0]
      place_text = {"ha": "center", "va": "bottom", "fontsize": 8}
      ax.annotate(text, (place, statistics.mean(values)), **place_text)
  style.mark(ax, 1, "")
  ax.set_xticks(range(len(ROUND_TRIPS)), [f"{t} ms" for t in ROUND_TRIPS])
  ax.margins(y=0.08)
  caption = (
    "simulated; AllReduce with the same average (one seed), or both without one"
    " (3 seeds, ± standard error)"
  )
  vertical = f"times sooner than AllReduce\nat a loss of {TARGET}"
  style.label(ax, caption, "round trip on 1 Gbit/s", vertical)


def main() -> None:
  """Writes the figure beside this file."""
  entries = read()
  (ratio,) = ratios(entries, "overlap_loco", SHOWN)
  title = (
    f"On 1 Gbit/s and {SHOWN} ms overlap_loco is {ratio:.1f} times sooner at a"
    f" loss of {TARGET} than AllReduce (0.86 M parameters, Muon and the same"
    " average on both sides, one seed)"
  )
  figure, (left, right) = style.frame(2, title, size=(10.4, 4.8))
  _draw_curves(left, entries)
  _draw_ratios(right, entries)
  style.legend(figure, left, 2)
  figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=110)
  for each in ROUND_TRIPS:
    for name, other in PAIRS.items():
      text = ratio_text(ratios(entries, name, each))
      print(f"{each} ms, {name} against {other}: {text}")


if __name__ == "__main__":
  main()
