r"""Trains many runs from one config, and compares what they found.

  python -m experiments.sweep --workdir=runs/ablation --processes=2 \
    --config=experiments/configs/compression.py \
    --config.base.total_steps=200

These are twenty runs, ten minutes on two CPU cores. A sweep is a grid of
fields, or a list of runs with names, fields and seeds (docs/commands.md), here
or on Slurm (--slurm), each a process of its own. A finished run is a line of
WORKDIR/NAME.csv, its evaluations are lines of WORKDIR/NAME_curves.csv. The same
command again keeps what is finished, goes on with what was interrupted and
tries again what failed. Sweeps whose rows are committed begin with them:

  python -m experiments.sweep --workdir=runs/convergence_small \
    --config=experiments/configs/convergence.py:small --report_only
"""

import math
import pathlib
import signal
import time

from absl import flags
from ml_collections import config_flags

from dilocox_jax import files
from dilocox_jax.metrics import work_directory
from experiments.runtime import command_line
from experiments.runtime.command_line import StoppedError

# What a mistake in a config raises.
_WRONG = ValueError, TypeError, OSError, KeyError
_ROOT = pathlib.Path(__file__).parents[1]


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_config(command_line.CONFIGS / "compression.py")
  command_line.define_workdir()
  flags.DEFINE_integer(
    "processes", 1, "How many runs at once, each a process.", lower_bound=1
  )
  flags.DEFINE_string(
    "slurm",
    "",
    "Run on Slurm, --processes jobs at once, with these options of srun:"
    " '--partition=gpu --gpus=1 --time=120'.",
  )
  flags.DEFINE_multi_string(
    "only", [], "Name of a run to train; may be repeated. Default: all."
  )
  flags.DEFINE_float(
    "max_minutes",
    None,
    "Stop after this many minutes. The same command then continues each run"
    " from its last checkpoint.",
    lower_bound=0.0,
  )
  flags.DEFINE_bool("report_only", False, "Train nothing.")


def check_field(path: str) -> None:
  """Raises ValueError if a sweep's config has no such field."""
  from experiments.sweeps import runs  # Only a mistake needs it this early.

  runs.check_field(path)


def main(values: flags.FlagValues) -> None:
  """Makes the runs that are missing and reports on all."""
  from dilocox_jax.checks import known
  from experiments.sweeps import rows, runs

  sweep = values.config.to_dict()
  file = config_flags.get_config_filename(values["config"])
  path, _, argument = file.partition(":")
  name = "_".join(filter(None, [pathlib.Path(path).stem, argument]))
  with command_line.usage_errors("--config: ", _WRONG):
    start = _ROOT / sweep["rows"] if sweep.get("rows") else None
    listed = runs.runs_of(sweep, rows.Rows(start).settings if start else ())
    if not listed:
      raise ValueError("the sweep has no runs: set its `grid` or its `runs`")
    for each in values.only:
      known("run", each, list(dict.fromkeys(run.name for run in listed)))
    # Only a config without mistakes is worth waiting for JAX.
    from experiments.sweeps import page
    from experiments.sweeps.clocks import clock_of
    from experiments.sweeps.training import Training, check_names

    if not values.report_only:
      check_names(listed)
  workdir = command_line.writable(values.workdir, "sweep")
  found = rows.Rows(workdir / f"{name}.csv", start)
  training = Training(workdir, found, [*values.parts, path])
  with command_line.usage_errors("--config: ", _WRONG):
    # A wrong clock is found before anything begins.
    clocks = {x["name"]: clock_of(x) for x in sweep.get("clocks", ())}
    times = page.times_of(listed, clocks)
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  is_late = False
  try:
    if not values.report_only:
      chosen = [r for r in listed if r.name in values.only or not values.only]
      is_late = _train(values, training, chosen)
    _write_page(name, values, sweep, listed, training, (clocks, times))
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
    over = f"--max_minutes={values.max_minutes:g} are over"
    raise StoppedError(
      f"{over}: the same command goes on", command_line.TRY_AGAIN
    )


def _train(values: flags.FlagValues, training, runs) -> bool:
  """Trains what has no line yet; returns whether time was over before."""
  from experiments.sweeps.pool import Pool

  minutes = math.inf if values.max_minutes is None else values.max_minutes
  deadline_s = time.monotonic() + 60 * minutes
  pool = Pool(values.processes, values.slurm, deadline_s)
  lock = training.rows.path.with_suffix(".lock")
  with work_directory.locked(
    lock, f"another sweep is at {values.workdir}: wait for it"
  ):
    files.remove_partial(values.workdir)
    training.train(runs, pool, values.processes)
  return pool.is_late and any(training.row(run) is None for run in runs)


def _write_page(name: str, values, sweep, listed, training, known) -> None:
  """Writes and prints the report on what there is.

  Args:
    name: Name of the sweep.
    values: The flags.
    sweep: Its config.
    listed: Its runs.
    training: What trained them.
    known: Clocks by name, and the times of all settings on them.
  """
  from rich.console import Console

  from dilocox_jax.report.comparison import Page
  from experiments.sweeps import page

  if values.report_only:  # Lines on another text than the one here count, too.
    found = training.rows.on_one_text(listed)
  else:
    found = [training.row(run) for run in listed]
  notes = [f"- {note}" for note in sweep.get("notes", ())]
  written = Page(
    f"Sweep: {name}",
    page.frame(sweep, listed, found, training.rows, *known),
    [page.intro(listed, found, training.rows), *notes],
    training.failed,
  )
  path = written.write(values.workdir, command_line.own_command())
  written.print(Console())
  print(f"runs: {training.rows.source}\nreport: {path}")


if __name__ == "__main__":
  command_line.main(main, define_flags, check_field)
