"""The bench `pipeline` draws pipeline schedules and counts their ticks.

It measures nothing and does not load JAX. It uses the same lists of ticks as
the train step and the simulator. A backward takes as long as two forwards, and
activations arrive without delay.
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
from dilocox_jax.report.text_tables import terminal_table
from dilocox_jax.report.units import human_share
from experiments.benchmarks.record import keep_record
from experiments.runtime.command_line import UsageError

# The unit of time is one forward, so a backward takes 2 units.
TIMES = TickTimes(1, 2)
# Colours of the actions by their first letters, which the chart shows.
COLOURS = {name[0].upper(): c for name, c in DIRECTION_COLOURS.items()}


def pipelines(
  names: Sequence[str], num_stages: int, num_micro_batches: int, chunks: int
) -> list[Pipeline]:
  """Returns one pipeline for each different schedule name.

  Args:
    names: Names of schedules; a name may be repeated.
    num_stages: Number of stages of a pipeline.
    num_micro_batches: Number of micro-batches of a step.
    chunks: Number of model chunks of a stage in the schedule "interleaved".
      The other schedules have one chunk a stage.

  Raises:
    UsageError: If a schedule is impossible with these sizes. The message names
      the other schedules.
  """
  schedules = []
  for name in dict.fromkeys(names):
    per_stage = chunks if name == "interleaved" else 1
    try:
      pipeline = Pipeline(name, num_stages, num_micro_batches, per_stage)
    except ValueError as error:
      others = [f"--schedule={other}" for other in names if other != name]
      instead = f"; or take {' '.join(others)}" if others else ""
      raise UsageError(f"{error}{instead}") from error
    schedules.append(pipeline)
  return schedules


def cells(table: Timetable) -> list[list[str]]:
  """Returns a short text for the action of each stage in each tick.

  "F3" is the forward of micro-batch 3 (the first micro-batch is 0) in the
  stage's first chunk. "B0''" is the backward of micro-batch 0 in the stage's
  third chunk. "." means that the stage is idle.

  Returns:
    One list for each stage, with one text for each tick.
  """
  return [
    [
      "." if action == "idle" else action[0].upper() + f"{batch}" + "'" * chunk
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
  """Returns lines of text that draw a timetable, one line for each stage.

  A timetable that is too wide for a line is drawn in pieces of equal length.
  Example: 26 ticks of 4 columns in a terminal of 80 columns make two pieces of
  13 ticks.

  Args:
    table: The timetable.
    columns: Largest number of columns of a line.
  """
  rows = cells(table)
  width = 1 + max(len(cell) for row in rows for cell in row)
  margin = len(f"stage {table.num_stages - 1}  ")
  ticks_per_line = max(1, (columns + 1 - margin) // width)
  num_pieces = -(-table.num_ticks // ticks_per_line)
  piece = -(-table.num_ticks // num_pieces)
  lines = []
  for first in range(0, table.num_ticks, piece):
    if num_pieces > 1:
      last = min(first + piece, table.num_ticks) - 1
      lines.append(Text(f"ticks {first} to {last}", style="dim"))
    for stage, row in enumerate(rows):
      line = Text(f"stage {stage}".ljust(margin))
      for cell in row[first : first + piece]:
        line.append(cell.ljust(width), style=COLOURS.get(cell[0], "dim"))
      line.rstrip()
      lines.append(line)
  if num_pieces > 1:
    needed = margin + width * table.num_ticks - 1
    hint = (
      f"in one piece: {needed} columns are needed, or fewer --micro_batches"
    )
    lines.append(Text(hint, style="dim"))
  return lines


def counts(pipeline: Pipeline, table: Timetable) -> dict:
  """Returns the numbers of one schedule, by name of the JSON file's field.

  Times are counted in forwards of one stage.
  """
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
  """Draws schedules, and writes bench_pipeline.json and bench_pipeline.png.

  Args:
    workdir: Directory to which both files are written.
    names: Names of schedules, from `PIPELINES`.
    num_stages: Number of stages of a pipeline.
    num_micro_batches: Number of micro-batches of a step.
    chunks: Number of model chunks of a stage in the schedule "interleaved".

  Returns:
    The content of bench_pipeline.json.

  Raises:
    UsageError: If a schedule is impossible with these sizes.
  """
  console = Console()
  schedules = pipelines(names, num_stages, num_micro_batches, chunks)
  results = {}
  for pipeline in schedules:
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
  path = keep_record(workdir, "pipeline", record, _table(schedules, results))
  figure_path = path.with_suffix(".png")
  save_figure(pipeline_figure(schedules, TIMES, "forwards"), figure_path)
  print(f"figure:  {figure_path}")
  return record


def _table(schedules: Sequence[Pipeline], results: dict) -> Table:
  """Returns a terminal table with one row for each schedule.

  Args:
    schedules: The schedules, in the order of the rows.
    results: `counts` of each schedule, by its name.
  """
  header = ("schedule", "ticks", "idle\nticks", "free\nstep", "idle\nshare")
  header += ("lockstep\nstep", "peak activations\nby stage")
  cells = [
    (
      pipeline.name,
      f"{results[pipeline.name]['ticks']}",
      f"{results[pipeline.name]['idle_ticks']}",
      f"{results[pipeline.name]['step_forwards']:.4g}",
      human_share(results[pipeline.name]["idle_fraction"]),
      f"{results[pipeline.name]['lockstep_step_forwards']:.4g}",
      held_activations(pipeline),
    )
    for pipeline in schedules
  ]
  return terminal_table(
    header,
    cells,
    title="Derived numbers; a step is counted in forwards of one stage",
    caption="free step: stages wait only for data. lockstep step: all stages"
    " end each tick together. peak: micro-batches that a stage holds at once",
  )
