"""Draws the figure of the README from the committed runs.

  python -m docs.figures.loss_by_time

It reads docs/results, trains nothing, and takes less than a minute.
"""

import pathlib
import statistics
from collections.abc import Sequence

from dilocox_jax.report import curves, style
from dilocox_jax.report.convergence.comparison import (
  Comparison,
  MethodResult,
  mean_seconds_to,
)
from experiments.configs import convergence_small
from experiments.sweeps import page, required_runs, run_maker, sweep_spec
from experiments.sweeps.results import Results

DOCS = pathlib.Path(__file__).parents[1]
CLOCK = "1gbit"
TARGET = 1.5
# Names in the sweep, and what the legend calls them. The first two are those
# of the title, and the thickest.
METHODS = {
  "allreduce_muon": "AllReduce, Muon",
  "overlap_loco": "overlap_loco, Muon",
  "muloco": "MuLoCo (Muon)",
  "dilocox_continue_1gbit": "DiLoCoX (continue), AdamW",
  "diloco_cold": "DiLoCo, AdamW",
  "allreduce": "AllReduce, AdamW",
}


def read() -> Comparison:
  """Returns the committed runs, joined with simulated times."""
  sweep = sweep_spec.sweep(convergence_small.get_config().to_dict())
  required = required_runs.RequiredRuns(sweep)
  results = Results(DOCS / "results" / "convergence_small.csv", sweep.base)
  runs = run_maker.KeptRuns(results, DOCS / "results", any_text=True)
  required.loss_of = runs.loss
  return page.Gathered(required, runs).comparison("convergence_small", "")


def curve(entry: MethodResult) -> curves.Curve:
  """Returns the mean over seeds, with a band from the lowest to the highest."""
  points = list(zip(*(t.points for t in entry.traces), strict=True))
  losses = [[point.loss for point in each] for each in points]
  return curves.Curve(
    entry.name,
    [each[0].seconds[CLOCK] for each in points],
    [statistics.mean(each) for each in losses],
    [min(each) for each in losses],
    [max(each) for each in losses],
    METHODS[entry.name],
  )


def seconds_to_target(entries: Sequence[MethodResult]) -> dict[str, float]:
  """Returns the simulated seconds to `TARGET`, by the simulator of today."""
  return {each.name: mean_seconds_to(each, CLOCK, TARGET) for each in entries}


def main() -> None:
  """Writes the figure beside this file."""
  entries = {entry.name: entry for entry in read().entries}
  shown = [entries[name] for name in METHODS]
  seconds = seconds_to_target(shown)
  ratio = seconds["allreduce_muon"] / seconds["overlap_loco"]
  title = (
    f"At 1 Gbit/s overlap_loco is {ratio:.1f} times sooner than AllReduce "
    f"at a loss of {TARGET}"
  )
  figure, (ax,) = style.frame(1, title, size=(8.4, 4.8))
  drawn = [curve(entry) for entry in shown]
  curves.draw_curves(ax, drawn, list(METHODS), "allreduce_muon")
  caption = "loss measured (3 seeds: mean and range), time simulated"
  horizontal = "simulated time (s, log scale); codecs count as free"
  style.label(ax, caption, horizontal, style.LOSS_AXIS)
  style.log_axis(ax, (1, 2, 5), "{:,g}".format)
  ax.set_xlim(10, 320)
  ax.set_ylim(1.15, 2.0)
  ax.axhline(TARGET, color=style.GREY, linewidth=0.8, dashes=(4, 3))
  style.legend(figure, ax, 3)
  figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=110)
  for name, each in seconds.items():
    print(f"{METHODS[name]}: loss {TARGET} after {each:.1f} s (simulated)")


if __name__ == "__main__":
  main()
