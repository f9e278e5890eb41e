"""Runs an ablation: a grid or list of settings, one table, one picture.

  python -m experiments.ablate
  --config=experiments/configs/ablate_compression.py --workdir=runs/ablation
  --processes=2 --config.base.total_steps=200

Every setting is a run in its own directory below WORKDIR/runs. The same
command again keeps what is finished, goes on with what was interrupted and
tries again what failed; a changed config keeps the runs that it still has.
"""

import contextlib
import pathlib
import shlex
import signal
import sys

from absl import flags
from rich.console import Console

from experiments.runtime import command_line

_DEFAULT_CONFIG = (
  pathlib.Path(__file__).parent / "configs" / "ablate_compression.py"
)


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_config(_DEFAULT_CONFIG)
  command_line.define_workdir()
  flags.DEFINE_integer(
    "processes", 1, "How many runs at once, each a process.", lower_bound=1
  )


def _check_field(path: str) -> None:
  from experiments.sweeps import grid  # Only a mistake needs it this early.

  grid.check_ablation_field(path)


def main(values: flags.FlagValues) -> None:
  """Runs what is not finished and reports on everything."""
  from experiments.sweeps import grid

  try:
    trials = grid.trials(values.config.to_dict())
    _check_what_they_name(trials)
  except (ValueError, TypeError, OSError) as error:
    raise command_line.UsageError(f"--config: {error}") from error
  workdir = command_line.writable(values.workdir)
  from experiments.runtime import job_pool

  jobs = [_job(trial, workdir, job_pool.Job) for trial in trials]
  waiting = [job for job in jobs if not job.is_done]
  print(
    f"{len(trials)} runs, {len(trials) - len(waiting)} of them finished before"
  )
  signal.signal(signal.SIGTERM, _interrupt)
  try:
    failures = job_pool.JobPool(waiting, values.processes).run()
  except KeyboardInterrupt:
    raise command_line.StoppedError(
      "interrupted: the same command goes on from here",
      command_line.INTERRUPTED,
    ) from None
  _report(trials, jobs, failures, workdir)
  if failures:
    raise command_line.StoppedError(
      f"{len(failures)} of {len(trials)} runs failed; their reasons are above"
    )


def _check_what_they_name(trials) -> None:
  """Looks for optimizers and texts, which only their libraries know."""
  from dilocox_jax.data import sources
  from dilocox_jax.optimizers import named_optimizer

  optimizers, texts = {}, {}
  for trial in trials:
    config, data = trial.config, trial.config.data
    optimizers.setdefault(config.inner.optimizer, (trial.name, "inner"))
    optimizers.setdefault(config.outer.optimizer, (trial.name, "outer"))
    text = (data.source, data.glob, data.validation_fraction)
    texts.setdefault(text, trial.name)
  for optimizer, (name, section) in optimizers.items():
    with _of_run(f"{name!r}: {section}."):
      named_optimizer(optimizer, 1.0)
  for (source, pattern, fraction), name in texts.items():
    with _of_run(f"{name!r}: data."):
      sources.load_corpus(source, glob=pattern, validation_fraction=fraction)


@contextlib.contextmanager
def _of_run(which: str):
  try:
    yield
  except ValueError as error:
    raise ValueError(f"run {which}{error}") from error


def _interrupt(*_: object) -> None:
  raise KeyboardInterrupt


def _job(trial, workdir: pathlib.Path, make):
  """The trial's process; its directory may carry an earlier name."""
  runs = workdir / "runs"
  found = sorted(runs.glob(f"*-{trial.digest}"))
  run = found[0] if found else runs / trial.directory
  return make(
    name=f"{trial.name}, seed {trial.config.seed}",
    workdir=run,
    log=workdir / "logs" / f"{run.name}.log",
    command=[
      *(sys.executable, "-m", "experiments.train"),
      *trial.arguments,
      f"--workdir={run}",
    ],
    total_steps=trial.config.total_steps,
  )


def _report(trials, jobs, failures, workdir: pathlib.Path) -> None:
  from dilocox_jax import report
  from experiments.sweeps import grid

  varied = grid.varied(trials)
  outcomes = [
    report.TrialOutcome(
      name=trial.name,
      seed=trial.config.seed,
      workdir=job.workdir,
      changed={grid.short(k): v for k, v in trial.changed.items()},
      settings={path: grid.setting(trial, path) for path in varied},
      times_fewer_bytes=trial.times_fewer_bytes,
      failure=failures.get(job.workdir, ""),
      log=job.log,
    )
    for trial, job in zip(trials, jobs, strict=True)
  ]
  command = shlex.join(["python", "-m", "experiments.ablate", *sys.argv[1:]])
  page = report.write_ablation(outcomes, workdir, command)
  report.print_ablation(outcomes, Console())
  print(f"report: {page}")


if __name__ == "__main__":
  command_line.main(main, define_flags, _check_field)
