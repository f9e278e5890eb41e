"""Charts of pipeline schedules, drawn to scale.

A table says how long a step is, a chart shows where stages wait. A schedule is
drawn with stages that run freely, as in papers, and once more in lockstep, as
in one compiled program, if that takes longer. All panels share one axis, so
their lengths can be compared by eye.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from dilocox_jax.plan.pipeline.orders import Tick
from dilocox_jax.plan.pipeline.timeline import (
  Pipeline,
  TickTimes,
  peak_activations,
  timeline,
)
from dilocox_jax.plan.pipeline.timetable import ACTIONS, timetable
from dilocox_jax.report import style

DIRECTION_COLOURS = {
  "forward": style.COLOURS[0],
  "backward": style.COLOURS[1],
  "input_gradient": style.COLOURS[4],
  "weight_gradient": style.COLOURS[2],
}
IDLE_COLOUR = "#F1F1F1"
WIDTH_INCHES = 12.8
ROW_INCHES = 0.24
DIGIT_INCHES = 0.07


@dataclasses.dataclass(frozen=True)
class Chart:
  """Contents of one panel; "seconds" may stand for any unit of time.

  Attributes:
    pipeline: Schedule of the pipeline.
    is_lockstep: Whether all stages start each tick together.
    step_s: Length of the step (s).
    cells: Stage, tick, start (s) and length (s) of every action.
  """

  pipeline: Pipeline
  is_lockstep: bool
  step_s: float | int
  cells: tuple[tuple[int, Tick, float, float], ...]

  @property
  def idle_fraction(self) -> float:
    """Share of the time of all stages in which they do nothing."""
    busy_s = sum(length_s for *_, length_s in self.cells)
    return 1 - busy_s / (self.step_s * self.pipeline.num_stages)


def free_chart(pipeline: Pipeline, times: TickTimes) -> Chart:
  """Returns the chart in which each action starts as early as possible."""
  run = timeline(pipeline, times)
  cells = []
  for stage, order in enumerate(pipeline.orders):
    spans_s = zip(run.starts_s[stage], run.ends_s[stage], strict=True)
    for tick, (start_s, end_s) in zip(order, spans_s, strict=True):
      cells.append((stage, tick, float(start_s), float(end_s - start_s)))
  return Chart(pipeline, False, run.step_s, tuple(cells))


def lockstep_chart(pipeline: Pipeline, times: TickTimes) -> Chart:
  """Returns the chart of the timetable, in which stages wait for each tick."""
  table = timetable(pipeline)
  lengths_s = table.tick_lengths_s(times)
  starts_s = np.cumsum(lengths_s) - lengths_s
  cells = []
  for at, stage in np.argwhere(table.action).tolist():
    numbers = table.micro_batch[at, stage], table.chunk[at, stage]
    tick = Tick(ACTIONS[table.action[at, stage]], *map(int, numbers))
    length_s = times.work_s(tick.direction) / table.num_chunks
    cells.append((stage, tick, float(starts_s[at]), float(length_s)))
  return Chart(pipeline, True, table.lockstep_step_s(times), tuple(cells))


def pipeline_figure(
  pipelines: Sequence[Pipeline], times: TickTimes, unit: str = "seconds"
) -> Figure:
  """Draws one panel per schedule, and one more where lockstep takes longer.

  Args:
    pipelines: Schedules, at least one, with equal numbers of stages and
      micro-batches.
    times: Durations of the actions.
    unit: Unit of these durations.
  """
  charts, alike = [], set()
  for pipeline in pipelines:
    free = free_chart(pipeline, times)
    lockstep = lockstep_chart(pipeline, times)
    if math.isclose(free.step_s, lockstep.step_s):
      alike.add(free)
    charts += [free] if free in alike else [free, lockstep]
  longest_s = max(chart.step_s for chart in charts)
  stages = pipelines[0].num_stages
  height = 1.5 + len(charts) * (ROW_INCHES * stages + 0.32)
  figure = Figure((WIDTH_INCHES, height), style.DPI, layout="constrained")
  figure.get_layout_engine().set(w_pad=0.1, h_pad=0.05)  # pyright: ignore
  figure.suptitle(_title(charts), x=0.02, ha="left", fontweight="bold")
  panels = figure.subplots(len(charts), 1, sharex=True, squeeze=False)[:, 0]
  for ax, chart in zip(panels, charts, strict=True):
    _draw(ax, chart, longest_s)
    _caption(ax, chart, unit, chart in alike)
  what = f"{unit} from the start of the step, derived"
  panels[-1].set_xlabel(what, fontsize=9)
  _legend(figure, charts)
  return figure


def _title(charts: Sequence[Chart]) -> str:
  pipeline = charts[0].pipeline
  free = [chart for chart in charts if not chart.is_lockstep]
  idle = sorted((round(c.idle_fraction, 9), c.pipeline.name) for c in free)
  finding = "work by stage and time"
  if len(idle) > 1 and idle[0][0] < idle[1][0]:
    finding = f"{idle[0][1]} waits least"
  stages = f"{pipeline.num_stages} stages"
  return f"{stages}, {pipeline.num_micro_batches} micro-batches: {finding}"


def _draw(ax: Axes, chart: Chart, longest_s: float | int) -> None:
  stages = chart.pipeline.num_stages
  for stage in range(stages):
    idle = Rectangle((0, stage - 0.44), chart.step_s, 0.88, color=IDLE_COLOUR)
    ax.add_patch(idle)
  inches_s = 0.9 * WIDTH_INCHES / longest_s
  # The widest number decides, so cells of one length all have numbers or none.
  digits = len(str(chart.pipeline.num_micro_batches - 1))
  for stage, tick, start_s, length_s in chart.cells:
    inches = length_s * inches_s
    colour = _colour(tick, chart.pipeline.chunks_per_stage)
    look = {"facecolor": colour, "edgecolor": "white"}
    look["linewidth"] = min(0.6, 6 * inches)
    ax.add_patch(Rectangle((start_s, stage - 0.44), length_s, 0.88, **look))
    if inches > digits * DIGIT_INCHES:
      luminance = float(np.dot(colour, (0.299, 0.587, 0.114)))
      look = {"ha": "center", "va": "center", "fontsize": 7}
      look["color"] = "black" if luminance > 0.55 else "white"
      middle_s = start_s + length_s / 2
      ax.text(middle_s, stage + 0.02, str(tick.micro_batch), **look)
  ax.set_xlim(0, longest_s)
  ax.set_ylim(stages - 0.5, -0.5)
  ax.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
  ax.tick_params(labelsize=8, length=0, labelcolor=style.GREY)
  ax.spines[:].set_visible(False)


def _colour(tick: Tick, num_chunks: int) -> tuple[float, float, float]:
  """Returns the colour of the direction, lighter for later chunks."""
  light = 0.5 * tick.chunk / max(1, num_chunks - 1)
  parts = to_rgb(DIRECTION_COLOURS[tick.direction])
  red, green, blue = (part + light * (1 - part) for part in parts)
  return red, green, blue


def _caption(ax: Axes, chart: Chart, unit: str, loses_nothing: bool) -> None:
  pipeline = chart.pipeline
  name = pipeline.name
  if pipeline.chunks_per_stage > 1:
    name += f" of {pipeline.chunks_per_stage} chunks a stage"
  how = "in lockstep" if chart.is_lockstep else "each stage freely"
  how += " or in lockstep" if loses_nothing else ""
  text = f"{how}: {chart.step_s:.4g} {unit}, {chart.idle_fraction:.0%} idle"
  if not chart.is_lockstep:
    held = held_activations(pipeline)
    text += f"; stages hold up to {held} micro-batches"
  style.caption(ax, f"{name}, {text}")


def held_activations(pipeline: Pipeline) -> str:
  """Returns the largest number of held micro-batches of each stage as text."""
  peaks = peak_activations(pipeline)
  return " ".join(f"{peak / pipeline.chunks_per_stage:.3g}" for peak in peaks)


def _legend(figure: Figure, charts: Sequence[Chart]) -> None:
  used = {tick.direction for chart in charts for _, tick, *_ in chart.cells}
  patches = [
    Patch(color=colour, label=direction.replace("_", " "))
    for direction, colour in DIRECTION_COLOURS.items()
    if direction in used
  ]
  if any(chart.pipeline.chunks_per_stage > 1 for chart in charts):
    later = Tick("forward", 0, 1)
    patches.append(Patch(color=_colour(later, 2), label="lighter: later chunk"))
  patches.append(Patch(color=IDLE_COLOUR, label="idle"))
  style.legend_below(figure, patches, len(patches))
