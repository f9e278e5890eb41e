"""The bench `pipeline`: what every schedule does, drawn and counted.

Nothing is measured here. The lists of ticks are those that the train step runs
and the simulator times, for a backward that takes as long as two forwards and
activations that travel in no time. JAX is not loaded.
"""

import pathlib
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dilocox_jax.plan.pipeline.timeline import (
  Pipeline,
  TickTimes,
  peak_activations,
  timeline,
)
from dilocox_jax.plan.pipeline.timetable import ACTIONS, Timetable, timetable
from dilocox_jax.report.page import save_figure
from dilocox_jax.report.pipeline_chart import (
  DIRECTION_COLOURS,
  held_activations,
  pipeline_figure,
)
from experiments.benchmarks.record import keep_record
from experiments.runtime.command_line import UsageError

# One forward is the unit of time.
TIMES = TickTimes(1, 2)
LETTERS = {
  "idle": ".",
  "forward": "F",
  "backward": "B",
  "input_gradient": "I",
  "weight_gradient": "W",
}


def pipelines(
  names: Sequence[str], num_stages: int, num_micro_batches: int, chunks: int
) -> list[Pipeline]:
  """Returns the schedules to show, each once; others have one chunk a stage.

  Raises:
    UsageError: One of them is impossible. The message names the others.
  """
  shown = []
  for name in dict.fromkeys(names):
    per_stage = chunks if name == "interleaved" else 1
    try:
      shown.append(Pipeline(name, num_stages, num_micro_batches, per_stage))
    except ValueError as error:
      others = [f"--schedule={other}" for other in names if other != name]
      instead = f"; or take {' '.join(others)}" if others else ""
      raise UsageError(f"{error}{instead}") from error
  return shown


def cells(table: Timetable) -> list[list[str]]:
  """Returns what each stage does in each tick: "F3", or "." when it is idle.

  "F3" is the forward of micro-batch 3 (the first is 0) in the stage's first
  chunk, "B0''" the backward of micro-batch 0 in its third chunk.
  """
  return [
    [
      LETTERS[action] + (f"{batch}" + "'" * chunk) * (action != "idle")
      for action, batch, chunk in zip(
        (ACTIONS[index] for index in table.action[:, stage]),
        table.micro_batch[:, stage].tolist(),
        table.chunk[:, stage].tolist(),
        strict=True,
      )
    ]
    for stage in range(table.num_stages)
  ]


def chart(table: Timetable, columns: int) -> list[Text]:
  """Returns lines that draw a timetable, one for each stage.

  A timetable that is too wide is drawn in pieces of equal length. Example: 26
  ticks of 4 columns in a terminal of 80 make two pieces of 13 ticks.

  Args:
    table: The timetable.
    columns: Most columns of a line.
  """
  rows = cells(table)
  width = 1 + max(len(cell) for row in rows for cell in row)
  margin = len(f"stage {table.num_stages - 1}  ")
  fitting = max(1, (columns + 1 - margin) // width)
  num_pieces = -(-table.num_ticks // fitting)
  piece = -(-table.num_ticks // num_pieces)
  lines = []
  for first in range(0, table.num_ticks, piece):
    if num_pieces > 1:
      last = min(first + piece, table.num_ticks) - 1
      lines.append(Text(f"ticks {first} to {last}", style="dim"))
    for stage, row in enumerate(rows):
      line = Text(f"stage {stage}".ljust(margin))
      for cell in row[first : first + piece]:
        line.append(cell.ljust(width), style=_style(cell))
      line.rstrip()
      lines.append(line)
  if num_pieces > 1:
    needed = margin + width * table.num_ticks - 1
    hint = f"in one piece: {needed} columns, or fewer --micro_batches"
    lines.append(Text(hint, style="dim"))
  return lines


def _style(cell: str) -> str:
  for direction, colour in DIRECTION_COLOURS.items():
    if cell.startswith(LETTERS[direction]):
      return colour
  return "dim"


def counts(pipeline: Pipeline, table: Timetable) -> dict:
  """Returns what is said of one schedule; forwards are the unit of time."""
  run = timeline(pipeline, TIMES)
  return {
    "ticks": table.num_ticks,
    "idle_ticks": table.idle_ticks,
    "idle_fraction": run.bubble_fraction,
    "step_forwards": float(run.step_s),
    "lockstep_step_forwards": table.lockstep_step_s(TIMES),
    "peak_activations": [
      peak / pipeline.chunks_per_stage for peak in peak_activations(pipeline)
    ],
    "saved_slots": table.num_saved_slots,
  }


def run_schedules(
  workdir: pathlib.Path,
  names: Sequence[str],
  num_stages: int,
  num_micro_batches: int,
  chunks: int,
) -> dict:
  """Draws the schedules, writes bench_pipeline.json and bench_pipeline.png.

  Args:
    workdir: Directory of the files.
    names: Some of `PIPELINES`.
    num_stages: Stages of a pipeline.
    num_micro_batches: Micro-batches of a step.
    chunks: Model chunks of a stage, for interleaved.

  Returns:
    The content of bench_pipeline.json.

  Raises:
    UsageError: One of the schedules is impossible with these sizes.
  """
  console = Console()
  shown = pipelines(names, num_stages, num_micro_batches, chunks)
  results = {}
  for pipeline in shown:
    table = timetable(pipeline)
    results[pipeline.name] = counts(pipeline, table)
    console.print(Text(f"\n{pipeline.name}", style="bold"))
    for line in chart(table, console.width):
      console.print(line, no_wrap=True)
  record = {
    "label": "derived: a backward takes two forwards, a hop no time",
    "num_stages": num_stages,
    "num_micro_batches": num_micro_batches,
    "schedules": results,
  }
  path = keep_record(workdir, "pipeline", record, _table(shown, results))
  figure = path.with_suffix(".png")
  save_figure(pipeline_figure(shown, TIMES, "forwards"), figure)
  print(f"figure:  {figure}")
  return record


def _table(shown: Sequence[Pipeline], results: dict) -> Table:
  table = Table(
    *("schedule", "ticks", "idle\nticks", "free\nstep", "idle\nshare"),
    *("lockstep\nstep", "peak activations\nby stage"),
    title="Derived; steps are counted in forwards of one stage",
    caption="peak: micro-batches that each stage holds at once",
  )
  for column in table.columns[1:]:
    column.justify = "right"
  for pipeline in shown:
    row = results[pipeline.name]
    table.add_row(
      pipeline.name,
      f"{row['ticks']}",
      f"{row['idle_ticks']}",
      f"{row['step_forwards']:.4g}",
      f"{row['idle_fraction']:.1%}",
      f"{row['lockstep_step_forwards']:.4g}",
      held_activations(pipeline),
    )
  return table
