r"""Trains many runs from one config, and compares their results.

  python -m experiments.sweep --workdir=runs/ablation --processes=2 \
    --config=experiments/configs/compression.py \
    --config.base.total_steps=200

A sweep is a grid of fields, a list of runs with names, fields and seeds, or
both (docs/commands.md). Each run is a process of its own, on this machine or on
Slurm (--slurm). A finished run is a line of WORKDIR/runs.csv, and its
evaluations are lines of WORKDIR/evaluations.csv. The same command again keeps
finished runs, continues interrupted runs and repeats failed runs. If the
repository has finished runs of a sweep (field `rows`), a new work directory
begins with these runs:

  python -m experiments.sweep --workdir=runs/convergence_small \
    --config=experiments/configs/convergence.py:small --report_only
"""

import functools
import pathlib
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import app, flags

from experiments.runtime import (
  command_line,
  config_flag,
  parts_flag,
  workdir_flag,
)
from experiments.runtime.command_line import StoppedError

if TYPE_CHECKING:
  from experiments.sweeps.clocks import SweepClock, Times
  from experiments.sweeps.runs import SweepRun
  from experiments.sweeps.training import Training

_ROOT = pathlib.Path(__file__).parents[1]
# Errors that a mistake in a config raises.
_MISTAKES = (ValueError, TypeError, OSError, KeyError)

flags.adopt_module_key_flags(config_flag)
flags.adopt_module_key_flags(workdir_flag)
_PROCESSES = flags.DEFINE_integer(
  "processes", 1, "How many runs at once, each a process.", lower_bound=1
)
_SLURM = flags.DEFINE_string(
  "slurm",
  "",
  "Run on Slurm, --processes jobs at once, with these options of srun:"
  " '--partition=gpu --gpus=1 --time=120'.",
)
_ONLY = flags.DEFINE_multi_string(
  "only", [], "Name of a run to train; may be repeated. Default: all."
)
_MAX_MINUTES = flags.DEFINE_float(
  "max_minutes",
  None,
  "Stop after this many minutes. The same command then continues each run"
  " from its last checkpoint.",
  lower_bound=0.0,
)
_REPORT_ONLY = flags.DEFINE_bool("report_only", False, "Train nothing.")


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Trains the runs of a sweep that are not finished, and reports on all runs.

  With --only, just the named runs are trained. With --report_only, nothing is
  trained.
  """
  command_line.refuse_arguments(argv)
  parts_flag.register()
  from experiments.sweeps import finished

  sweep = config_flag.CONFIG.value.to_dict()
  config_file, argument = config_flag.file_and_argument()
  name = pathlib.Path(config_file).stem
  if argument:
    name += f"_{argument}"
  committed_rows = _committed_rows(sweep)
  runs = _checked_runs(sweep, name, committed_rows)
  workdir = workdir_flag.writable(workdir_flag.WORKDIR.value, "sweep")
  # This import loads JAX and takes seconds, so mistakes are found before it.
  from experiments.sweeps.training import Training

  training = Training(
    workdir,
    finished.Rows(workdir / "runs.csv", name, committed_rows),
    sweep=sweep,
    parts_files=[*parts_flag.PARTS.value, config_file],
  )
  # A wrong clock is found before anything begins.
  clocks, times = _clocks_and_times(sweep, runs)
  # SIGTERM acts as Ctrl-C does.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  is_late = False
  try:
    if not _REPORT_ONLY.value:
      is_late = _train(training, runs)
    _write_page(
      name=name,
      sweep=sweep,
      runs=runs,
      training=training,
      clocks=clocks,
      times=times,
    )
  except KeyboardInterrupt:
    raise StoppedError(
      "interrupted: the same command goes on from here",
      command_line.INTERRUPTED,
    ) from None
  if training.failed:
    first = training.failed[0]
    raise StoppedError(
      f"{len(training.failed)} runs failed, first {first['run']}:"
      f" {first['reason']} (log: {first['log']})"
    )
  if is_late:
    raise StoppedError(
      f"--max_minutes={_MAX_MINUTES.value:g} are over: the same command goes"
      " on",
      command_line.TRY_AGAIN,
    )


def _committed_rows(sweep: Mapping[str, Any]) -> pathlib.Path | None:
  """Returns the file of finished runs that a sweep names; None: it names none.

  Raises UsageError if a field of the sweep has a wrong type, or if the file is
  missing.
  """
  from dilocox_jax.checks import require
  from experiments.sweeps.runs import check_fields

  with command_line.usage_errors("--config: "):
    check_fields(sweep)
    if not sweep.get("rows"):
      return None
    path = _ROOT / sweep["rows"]
    # Without this file all runs would be trained again.
    require(path.is_file(), f"rows: {path} is not a file")
    return path


def _checked_runs(
  sweep: Mapping[str, Any], name: str, committed_rows: pathlib.Path | None
) -> "list[SweepRun]":
  """Returns the runs of a sweep; if it lists none, those of `committed_rows`.

  Raises UsageError if the config or --only is wrong.
  """
  from dilocox_jax.checks import known
  from experiments.sweeps import finished
  from experiments.sweeps.runs import runs_of

  with command_line.usage_errors("--config: ", _MISTAKES):
    settings = []
    if committed_rows:
      settings = finished.Rows(committed_rows, name).settings
    runs = runs_of(sweep, settings)
    if not runs:
      raise ValueError("the sweep has no runs: set its `grid` or its `runs`")
    names = list(dict.fromkeys(run.name for run in runs))
    for chosen_name in _ONLY.value:
      known("run", chosen_name, names)
    if not _REPORT_ONLY.value:
      from experiments.sweeps.training import check_names  # It loads JAX.

      check_names(runs)
  return runs


def _clocks_and_times(
  sweep: Mapping[str, Any], runs: "Sequence[SweepRun]"
) -> "tuple[dict[str, SweepClock], dict[str, dict[str, Times]]]":
  """Returns a sweep's clocks by name, and the times of its runs on them.

  A clock is a simulated cluster. The times are by setting of a run, and then by
  name of a clock. Raises UsageError if a clock is wrong, or does not fit a run.
  """
  from experiments.sweeps import page
  from experiments.sweeps.clocks import clocks_of

  with command_line.usage_errors("--config: ", _MISTAKES):
    clocks = clocks_of(sweep.get("clocks", ()))
    return clocks, page.times_of(runs, clocks)


def _train(training: "Training", runs: "Sequence[SweepRun]") -> bool:
  """Trains the runs of --only (default: all) that are not finished yet.

  Returns whether --max_minutes were over before all of them had ended.
  """
  chosen_runs = runs
  if _ONLY.value:
    chosen_runs = [run for run in runs if run.name in _ONLY.value]
  return training.train_for(
    chosen_runs,
    num_processes=_PROCESSES.value,
    slurm=_SLURM.value,
    max_minutes=_MAX_MINUTES.value,
  )


def _write_page(
  name: str,
  sweep: Mapping[str, Any],
  runs: "Sequence[SweepRun]",
  training: "Training",
  clocks: "Mapping[str, SweepClock]",
  times: "Mapping[str, Mapping[str, Times]]",
) -> None:
  """Writes and prints the report on the runs that have ended."""
  from rich.console import Console

  from dilocox_jax.report.comparison import Page
  from experiments.sweeps import page

  if _REPORT_ONLY.value:
    # The committed runs may have read another version of the text than this
    # machine has.
    lines = training.rows.on_one_text(runs)
  else:
    lines = [training.row(run) for run in runs]
  notes = [f"- {note}" for note in sweep.get("notes", ())]
  sweep_page = Page(
    title=f"Sweep: {name}",
    frame=page.frame(
      sweep=sweep,
      runs=runs,
      lines=lines,
      rows=training.rows,
      clocks=clocks,
      times=times,
    ),
    intro=[page.intro(runs, lines, training.rows), *notes],
    failed=training.failed,
  )
  path = sweep_page.write(training.workdir, command_line.typed_command())
  sweep_page.print(Console())
  print(f"runs: {training.rows.source}\nreport: {path}")


def _check_field(path: str) -> None:
  """Raises ValueError if no sweep can have the field `path` (dotted name).

  A name that begins with `base` or `grid` is checked as a whole. Of any other
  name only the first part is checked.
  """
  from experiments.sweeps import runs  # Only a mistake needs it this early.

  runs.check_field(path)


_parse_flags = functools.partial(
  config_flag.parse_flags,
  default_file=config_flag.CONFIGS / "compression.py",
  check_field=_check_field,
)

if __name__ == "__main__":
  app.run(main, flags_parser=_parse_flags)
