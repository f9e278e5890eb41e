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

from dilocox_jax.report import curves, style
from dilocox_jax.report.convergence.comparison import (
  MethodResult,
  seconds_to,
)
from dilocox_jax.report.spread import standard_error
from dilocox_jax.simulate.presets import cluster_presets
from dilocox_jax.simulate.transfer import NCCL
from experiments.configs import convergence_small
from experiments.sweeps import page, required_runs, run_maker, sweep_spec
from experiments.sweeps.results import Results

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
PAIRS = {
  "overlap_loco": "allreduce_muon_average",
  "muloco": "allreduce_muon",
}


def read() -> dict[str, MethodResult]:
  """Returns the committed runs by name, with times by round trip in ms."""
  sweep = sweep_spec.sweep(convergence_small.get_config().to_dict())
  with tempfile.TemporaryDirectory() as folder:
    sweep = dataclasses.replace(
      sweep,
      methods=tuple(m for m in sweep.methods if m.name in METHODS),
      clusters={str(each): _clock(folder, each) for each in ROUND_TRIPS},
      equal_time={},
      claims=(),
      gaps={},
    )
    required = required_runs.RequiredRuns(sweep)
    results = Results(DOCS / "results" / "convergence_small.csv", sweep.base)
    runs = run_maker.KeptRuns(results, DOCS / "results", any_text=True)
    required.loss_of = runs.loss
    found = page.Gathered(required, runs).comparison("convergence_small", "")
  return {entry.name: entry for entry in found.entries}


def _clock(folder: str, round_trip_ms: int) -> sweep_spec.SweepClock:
  """Returns the preset `1gbit` with another round trip, and NCCL's rings."""
  values = cluster_presets()["1gbit"]
  values["every_site"]["rtt"] = f"{round_trip_ms} ms"
  path = pathlib.Path(folder) / f"{round_trip_ms}.json"
  path.write_text(json.dumps(values))
  return sweep_spec.SweepClock(str(path), 0.03, transport=NCCL)


def seconds(entry: MethodResult, round_trip_ms: int) -> dict[int, float]:
  """Returns the simulated seconds to `TARGET` by seed, where a curve is."""
  clock = str(round_trip_ms)
  return {
    trace.seed: seconds_to(trace, clock, TARGET)
    for trace in entry.traces
    if trace.points
  }


def ratios(
  entries: Mapping[str, MethodResult],
  name: str,
  round_trip_ms: int,
  other: str = "",
) -> list[float]:
  """Returns how many times sooner than AllReduce a method is, by seed.

  Args:
    entries: Methods by name.
    name: Key of `PAIRS`.
    round_trip_ms: One of `ROUND_TRIPS`.
    other: Which AllReduce; by default that of `PAIRS`.
  """
  own = seconds(entries[name], round_trip_ms)
  base = seconds(entries[other or PAIRS[name]], round_trip_ms)
  return [base[seed] / own[seed] for seed in sorted(own.keys() & base.keys())]


def ratio_text(values: list[float]) -> str:
  """Formats a mean ratio with its standard error or its single seed."""
  mean, error = statistics.mean(values), standard_error(values)
  if len(values) == 1:
    return f"{mean:.1f} (one seed)"
  return f"{mean:.2f} ± {error:.2f} ({len(values)} seeds)"


def curve(entry: MethodResult) -> curves.Curve:
  """Returns the mean over seeds, with a band from the lowest to the highest."""
  traces = [t.points for t in entry.traces if t.points]
  points = list(zip(*traces, strict=True))
  losses = [[point.loss for point in each] for each in points]
  count = "one seed" if len(traces) == 1 else f"{len(traces)} seeds"
  return curves.Curve(
    entry.name,
    [each[0].seconds[str(SHOWN)] for each in points],
    [statistics.mean(each) for each in losses],
    [min(each) for each in losses],
    [max(each) for each in losses],
    f"{METHODS[entry.name]} ({count})",
  )


def _draw_curves(ax: Axes, entries: Mapping[str, MethodResult]) -> None:
  drawn = [curve(entries[name]) for name in METHODS]
  curves.draw_curves(ax, drawn, list(METHODS), "allreduce_muon_average")
  caption = f"{SHOWN} ms; loss measured (mean, band: all seeds), time simulated"
  style.label(ax, caption, "simulated time (s, log scale)", style.LOSS_AXIS)
  style.log_axis(ax, (1, 2, 5), "{:,g}".format)
  ax.set_xlim(8, 320)
  ax.set_ylim(1.15, 2.0)
  ax.axhline(TARGET, color=style.GREY, linewidth=0.8, dashes=(4, 3))


def _draw_ratios(ax: Axes, entries: Mapping[str, MethodResult]) -> None:
  """One bar a round trip and method: how many times sooner, with its error."""
  width = 0.38
  for number, name in enumerate(PAIRS):
    by_trip = [ratios(entries, name, each) for each in ROUND_TRIPS]
    means = [statistics.mean(each) for each in by_trip]
    places = [i + (number - 0.5) * width for i in range(len(means))]
    errors = [standard_error(each) for each in by_trip]
    colour = style.COLOURS[(0, 2)[number]]
    ax.bar(places, means, width, yerr=errors, color=colour, alpha=0.85)
    for place, values in zip(places, by_trip, strict=True):
      text = ratio_text(values).partition(" (")[0]
      look = {"ha": "center", "va": "bottom", "fontsize": 8}
      ax.annotate(text, (place, statistics.mean(values)), **look)
  ax.axhline(1, color=style.GREY, linewidth=0.8, dashes=(4, 3))
  ax.set_xticks(range(len(ROUND_TRIPS)), [f"{t} ms" for t in ROUND_TRIPS])
  ax.margins(y=0.08)
  caption = (
    "simulated; AllReduce with the same average (one seed), or both without one"
    " (3 seeds, ± standard error)"
  )
  vertical = f"times sooner at {TARGET} than AllReduce"
  style.label(ax, caption, "round trip on 1 Gbit/s", vertical)


def main() -> None:
  """Writes the figure beside this file."""
  entries = read()
  (ratio,) = ratios(entries, "overlap_loco", SHOWN)
  title = (
    f"On 1 Gbit/s and {SHOWN} ms overlap_loco is {ratio:.1f} times sooner at a"
    f" loss of {TARGET} than AllReduce with the same average (one seed)"
  )
  figure, (left, right) = style.frame(2, title, size=(10.4, 4.8))
  _draw_curves(left, entries)
  _draw_ratios(right, entries)
  style.legend(figure, left, 2)
  figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=110)
  for each in ROUND_TRIPS:
    for name, label in METHODS.items():
      times = ", ".join(
        f"{value:.1f} s (seed {seed})"
        for seed, value in seconds(entries[name], each).items()
      )
      print(f"{each} ms, {label}: {TARGET} after {times}")
    for name, other in PAIRS.items():
      text = ratio_text(ratios(entries, name, each))
      print(f"{each} ms, {name} against {other}: {text}")
    one_sided = ratios(entries, "overlap_loco", each, "allreduce_muon")
    print(f"{each} ms, an average on one side: {ratio_text(one_sided)}")


if __name__ == "__main__":
  main()
