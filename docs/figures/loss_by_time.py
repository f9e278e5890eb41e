"""Draws the figure of the README from the committed runs.

  python -m docs.figures.loss_by_time

The figure shows the loss against simulated time for two methods: AllReduce and
`overlap_loco`. Both have Muon, the same average of their parameters, the same
batches and the same seeds. AllReduce has a momentum of 0.9, which suits it
better than 0.95. The script trains nothing and takes less than a minute.
"""

import json
import pathlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from dilocox_jax.config import RunConfig
from dilocox_jax.report import panels, style
from dilocox_jax.report.frame import Setting, standard_error
from dilocox_jax.simulate.cluster_file import cluster_presets
from dilocox_jax.simulate.transfer import NCCL
from experiments.configs import convergence
from experiments.sweeps import page, runs
from experiments.sweeps.clocks import SweepClock
from experiments.sweeps.finished import Rows
from experiments.sweeps.tables import COMMITTED

PICTURE = pathlib.Path(__file__).with_suffix(".png")
SWEEP = "muon"
METHOD = "overlap_loco"
BASELINE = "allreduce_muon_average, momentum of nine tenths"
TARGET = 1.5  # The loss that both methods are timed to (nats a token).
# Round trips of the link (ms). The curves are drawn for the last one.
ROUND_TRIPS = (0, 10, 40)
DRAWN_ROUND_TRIP = 40
STEP_S = 0.03  # Stated: a replica takes so long on two CPU cores.


def _committed_rows() -> Rows:
  return Rows(COMMITTED, f"convergence_{SWEEP}")


def _runs(committed: Rows) -> list[runs.SweepRun]:
  """Returns the runs of both methods, one for each seed."""
  settings = [
    (name, values)
    for name, values in committed.settings
    if name in (METHOD, BASELINE)
  ]
  sweep = convergence.get_config(SWEEP).to_dict()
  return runs.runs_of(sweep, settings)


def configs() -> dict[str, RunConfig]:
  """Returns the config of each method's first run, by name."""
  configs_by_name: dict[str, RunConfig] = {}
  for run in _runs(_committed_rows()):
    configs_by_name.setdefault(run.name, run.config)
  return configs_by_name


def read() -> dict[str, Setting]:
  """Returns both methods by name, timed for each round trip.

  Only seeds of which both methods have a curve are kept. The clock of a round
  trip is named after its milliseconds, such as "40".
  """
  committed = _committed_rows()
  sweep_runs = _runs(committed)
  rows_by_run = {
    (row.setting, row.seed): row for row in committed.runs.values()
  }
  common_seeds = set.intersection(
    *(
      {
        row.seed
        for row in rows_by_run.values()
        if row.setting == name and committed.evaluations(row)
      }
      for name in (METHOD, BASELINE)
    )
  )
  sweep_runs = [run for run in sweep_runs if run.seed in common_seeds]
  with tempfile.TemporaryDirectory() as folder:
    clocks = {str(each): _clock(folder, each) for each in ROUND_TRIPS}
    frame = page.frame(
      sweep=convergence.get_config(SWEEP).to_dict(),
      runs=sweep_runs,
      lines=[rows_by_run[run.name, run.seed] for run in sweep_runs],
      rows=committed,
      clocks=clocks,
      times=page.times_of(sweep_runs, clocks),
    )
  return {setting.name: setting for setting in frame.settings}


def _clock(folder: str, round_trip_ms: int) -> SweepClock:
  """Returns the preset `1gbit` with another round trip, and NCCL's rings."""
  values = cluster_presets()["1gbit"]
  values["every_site"]["rtt"] = f"{round_trip_ms} ms"
  path = pathlib.Path(folder) / f"{round_trip_ms}.json"
  path.write_text(json.dumps(values))
  return SweepClock(str(path), STEP_S, transport=NCCL)


def seconds_to_target(setting: Setting, round_trip_ms: int) -> dict[int, float]:
  """Returns the simulated seconds until `TARGET` is reached, by seed."""
  seconds = setting.seconds_to(str(round_trip_ms), TARGET)
  seeds = [each.seed for each in setting.seed_runs if each.points]
  return dict(zip(seeds, seconds, strict=True))


def step_of_allreduce_s(
  settings: Mapping[str, Setting], round_trip_ms: int
) -> float:
  """Returns the simulated seconds of one step of AllReduce."""
  setting = settings[BASELINE]
  # AllReduce has no flush, so its run takes as long as its steps.
  return setting.seconds[str(round_trip_ms)] / setting.seed_runs[0].steps


def ratios(
  settings: Mapping[str, Setting], round_trip_ms: int
) -> Sequence[float]:
  """Returns how many times sooner the method reaches `TARGET`, by seed."""
  own = seconds_to_target(settings[METHOD], round_trip_ms)
  base = seconds_to_target(settings[BASELINE], round_trip_ms)
  return [base[seed] / own[seed] for seed in sorted(own.keys() & base.keys())]


def mean_seconds(
  settings: Mapping[str, Setting], round_trip_ms: int
) -> tuple[float, float]:
  """Returns the mean seconds to `TARGET` of the method and of AllReduce."""
  own = seconds_to_target(settings[METHOD], round_trip_ms)
  base = seconds_to_target(settings[BASELINE], round_trip_ms)
  return statistics.fmean(own.values()), statistics.fmean(base.values())


def ratio_text(values: Sequence[float]) -> str:
  """Formats a mean ratio with its standard error, if it has one."""
  mean = f"{statistics.fmean(values):.1f}"
  if len(values) == 1:
    return f"{mean} (one seed)"
  return f"{mean} ± {standard_error(values):.2f} ({len(values)} seeds)"


def _draw_curves(ax: Axes, settings: Mapping[str, Setting]) -> None:
  names = (BASELINE, METHOD)
  labels = {BASELINE: "AllReduce", METHOD: "overlap_loco, 1 bit a value"}
  looks = style.looks(list(names))
  for name in names:
    setting = settings[name]
    curve = panels.curve(
      setting, str(DRAWN_ROUND_TRIP), 1.0, len(setting.curves)
    )
    color = looks[name]["color"]
    ax.plot(curve.x, curve.y, color=color, linewidth=2, label=labels[name])
    if curve.low:
      ax.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.15)


def _draw_arrow(
  ax: Axes, settings: Mapping[str, Setting], ratio: float
) -> None:
  """Draws an arrow between the times at which both reach `TARGET`."""
  own_s, base_s = mean_seconds(settings, DRAWN_ROUND_TRIP)
  ax.annotate(
    "",
    xy=(own_s, TARGET),
    xytext=(base_s, TARGET),
    arrowprops={"arrowstyle": "->", "linewidth": 1.6, "color": style.GRAY},
  )
  ax.annotate(
    f"{ratio:.1f} times sooner",
    (base_s, TARGET),
    (8, 2),
    textcoords="offset points",
    fontsize=11,
    fontweight="bold",
  )


def draw(settings: Mapping[str, Setting]) -> None:
  """Writes the figure beside this file.

  Args:
    settings: Both methods by name (`read`).
  """
  ratio = statistics.fmean(ratios(settings, DRAWN_ROUND_TRIP))
  title = (
    f"Over 1 Gbit/s overlap_loco reaches the same loss {ratio:.1f} times sooner"
    " than AllReduce"
  )
  figure, (ax,) = style.frame(1, title, size=(8.0, 4.4))
  _draw_curves(ax, settings)
  _draw_arrow(ax, settings, ratio)
  ax.set_xlim(0, 180)
  ax.set_ylim(1.15, 2.4)
  num_seeds = len(settings[METHOD].curves)
  seeds = "one seed"
  if num_seeds > 1:
    seeds = f"{num_seeds} seeds (mean and band)"
  caption = (
    f"loss measured: 0.86 M parameters, two replicas, {seeds}; time simulated:"
    f" round trip of {DRAWN_ROUND_TRIP} ms"
  )
  style.label(ax, caption, "simulated time (s)", style.LOSS_AXIS)
  style.legend(figure, ax, 2)
  figure.savefig(PICTURE, dpi=110)


def main() -> None:
  """Draws the figure, and prints how many times sooner for each round trip."""
  settings = read()
  draw(settings)
  for round_trip_ms in ROUND_TRIPS:
    own_s, base_s = mean_seconds(settings, round_trip_ms)
    print(
      f"{round_trip_ms} ms: {ratio_text(ratios(settings, round_trip_ms))} times"
      f" sooner ({own_s:.1f} s for {base_s:.1f} s)"
    )


if __name__ == "__main__":
  main()
