"""The main loop of both sweep binaries: make what is missing, then report.

A sweep is a list of tasks that depend on each other, e.g. tuning before
results. Every task needs some runs. A run that is there already is not made
again, so the same command goes on after any interruption.
"""

import contextlib
import math
import pathlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from absl import flags

from experiments.runtime import command_line
from experiments.runtime.command_line import StoppedError, UsageError

# In --help, flags are listed under the program that asks for them, not here.
flags.disclaim_key_flags()

# Name of a task, its runs, and why other runs cannot be listed yet.
Task = tuple[str, Sequence, Sequence[str]]


def define_flags(default_config: pathlib.Path) -> None:
  """Defines the flags that all sweeps have.

  Args:
    default_config: Config file that is taken without --config.
  """
  command_line.define_config(default_config)
  command_line.define_workdir()
  flags.DEFINE_integer(
    "processes", 1, "How many runs at once, each a process.", lower_bound=1
  )


def path_of(config_file: str) -> str:
  """Returns the path of the sweep's config file, which may register parts.

  Args:
    config_file: Value of --config; in FILE:TEXT the text is an argument.
  """
  return config_file.partition(":")[0]


@contextlib.contextmanager
def config_errors() -> Iterator[None]:
  """Turns what is wrong with a sweep's config into one line for its user."""
  try:
    yield
  except KeyError as error:
    raise UsageError(f"--config: no field {error}") from error
  except (ValueError, TypeError, OSError) as error:
    raise UsageError(f"--config: {error}") from error


def run_sweep(
  maker,
  tasks: Iterable[Task],
  report: Callable[[], None],
  *,
  processes: int,
  max_minutes: float | None = None,
  lock: contextlib.AbstractContextManager | None = None,
  trains: bool = True,
) -> None:
  """Makes the runs that are missing, task by task, and reports on all.

  Args:
    maker: The sweep's `RunMaker`.
    tasks: The tasks in order. A task is asked for only when the one before is
      over, since its runs may depend on losses of the earlier ones.
    report: Writes the report, whatever has been made.
    processes: How many runs to make at once.
    max_minutes: When to stop (minutes from now); None: at the end.
    lock: Is held while runs are made, so that no two sweeps make the same.
    trains: Whether to make runs; if not, they are counted only.

  Raises:
    StoppedError: Runs failed, the time is over, runs could not be listed, or
      the sweep was interrupted.
  """
  signal.signal(signal.SIGTERM, _interrupt)
  minutes = math.inf if max_minutes is None else max_minutes
  deadline_s = time.monotonic() + 60 * minutes
  lacking: list[str] = []
  runs, is_late = (), False
  try:
    with lock or contextlib.nullcontext():
      for task, runs, reasons in tasks:
        lacking += [reason for reason in reasons if reason not in lacking]
        print(f"{task}: {len(runs)} runs, {maker.to_do(runs)}")
        if trains:
          is_late = maker.make(runs, processes, deadline_s)
        if maker.failures or is_late:
          break
    report()
  except KeyboardInterrupt:
    raise StoppedError(
      "interrupted: the same command goes on from here",
      command_line.INTERRUPTED,
    ) from None
  if maker.failures:
    job, reason = maker.failures[0]
    raise StoppedError(
      f"{len(maker.failures)} of {len(runs)} runs failed, first {job.name}:"
      f" {reason} (log: {job.log})"
    )
  if is_late:
    raise StoppedError(
      f"--max_minutes={minutes:g} are over: the same command goes on",
      command_line.TRY_AGAIN,
    )
  if lacking and trains:
    raise StoppedError("; ".join(lacking))


def _interrupt(*_: object) -> None:
  raise KeyboardInterrupt
