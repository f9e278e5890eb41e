"""Trains the runs of a sweep that have no line yet.

A run that diverges is a result like any other. A run that fails otherwise is
tried again the next time.
"""

import contextlib
import functools
import math
import pathlib
import re
import sys
import time
from collections.abc import Iterable, Sequence

from dilocox_jax import files
from dilocox_jax.checks import in_front, printable
from dilocox_jax.config import RunConfig
from dilocox_jax.config.sections import DataConfig
from dilocox_jax.metrics import work_directory
from dilocox_jax.report.run import load_run
from dilocox_jax.training import run_text
from experiments.runtime.process_group import usable_cores
from experiments.runtime.running import check_optimizers
from experiments.sweeps.pool import Job, Pool
from experiments.sweeps.rows import Rows, RunRow, curve_of, row_of
from experiments.sweeps.runs import SweepRun, text_of

_DIVERGED = re.compile(r"is not finite (at|after) step")


@functools.cache
def _text_digest(data: DataConfig, seed: int) -> str:
  return run_text.text_of(data, seed).digest


def corpus_digest(config: RunConfig) -> str:
  """Returns the digest of the text that a run would train on here."""
  return _text_digest(*text_of(config))


def check_names(runs: Iterable[SweepRun]) -> None:
  """Looks up optimizers and texts, which only their libraries know.

  Raises:
    ValueError: One line that names the run, the section and what is wrong.
  """
  for run in runs:
    with in_front(f"run {run.name!r}: "):
      check_optimizers(run.config)
    with in_front(f"run {run.name!r}: data: "):
      corpus_digest(run.config)


class Training:
  """The runs of a sweep below its work directory.

  Attributes:
    workdir: The work directory. Directories of runs are in WORKDIR/runs; their
      processes print into WORKDIR/logs.
    rows: Lines of the runs that have ended.
    failed: Run, reason and log of each run that failed.
  """

  def __init__(
    self, workdir: pathlib.Path, rows: Rows, parts_files: Sequence[str] = ()
  ):
    """Trains nothing yet.

    Args:
      workdir: The work directory.
      rows: Lines of the runs that have ended.
      parts_files: Files that the process of a run runs first, because they may
        register parts that the run has.
    """
    self.workdir = workdir
    self.rows = rows
    self._parts_files = parts_files
    self.failed: list[dict[str, str]] = []

  def row(self, run: SweepRun) -> RunRow | None:
    """Returns the line of a run on the text that this machine has."""
    return self.rows.row(run, corpus_digest(run.config))

  def train_for(
    self,
    runs: Sequence[SweepRun],
    *,
    num_processes: int,
    slurm: str,
    max_minutes: float | None,
  ) -> bool:
    """Trains runs that have no line yet, for some time at most.

    Args:
      runs: The runs.
      num_processes: How many run at once.
      slurm: Options of srun; "" for processes on this machine.
      max_minutes: Time after which runs are stopped; None: no limit.

    Returns:
      Whether the time was over before all runs had ended.

    Raises:
      BusyError: If another sweep is at work in the directory.
    """
    deadline_s = math.inf
    if max_minutes is not None:
      deadline_s = time.monotonic() + 60 * max_minutes
    pool = Pool(num_processes, slurm, deadline_s)
    with work_directory.locked(
      self.rows.path.with_suffix(".lock"),
      f"another sweep is at {self.workdir}: wait for it",
    ):
      files.remove_partial(self.workdir)
      self.train(runs, pool, num_processes)
    return pool.is_late and any(self.row(run) is None for run in runs)

  def train(
    self, runs: Sequence[SweepRun], pool: Pool, num_processes: int
  ) -> None:
    """Trains runs that have no line yet, each once, in order.

    Args:
      runs: The runs.
      pool: Runs their processes.
      num_processes: How many run at once.
    """
    num_cores = max(1, usable_cores() // num_processes)
    missing_runs = [run for run in runs if self.row(run) is None]
    print(f"{len(runs)} runs, {len(missing_runs)} to do")
    jobs = [self._job(run) for run in missing_runs]
    num_ended = 0

    def end(number: int, failure: str) -> None:
      nonlocal num_ended
      num_ended += 1
      job = jobs[number]
      finding = self._record(missing_runs[number], failure, num_cores)
      if not finding:
        log = str(job.log)
        self.failed.append({"run": job.name, "reason": failure, "log": log})
        finding = f"failed: {failure} (log: {log})"
      line = f"run {num_ended} of {len(jobs)}, {job.name}: {finding}"
      print(printable(line), flush=True)

    pool.run(jobs, end)

  def _directory(self, run: SweepRun) -> pathlib.Path:
    """Returns the directory of a run, which need not exist yet.

    The digests of config and text at the end of its name tell an earlier one,
    as the label before them may change. Texts differ between machines.
    """
    key = f"{run.digest}-{corpus_digest(run.config)[:6]}"
    folder = self.workdir / "runs"
    earlier = sorted(folder.glob(f"*-{key}"))
    return earlier[0] if earlier else folder / f"{run.label}-{key}"

  def _job(self, run: SweepRun) -> Job:
    """Returns the process that trains a run."""
    name = self._directory(run).name
    run_directory = work_directory.check_subfolder(self.workdir, "runs", name)
    work_directory.check_subfolder(self.workdir, "logs")
    return Job(
      name=f"{run.name}, seed {run.seed}",
      log=self.workdir / "logs" / f"{run_directory.name}.log",
      command=[
        sys.executable,
        "-m",
        "experiments.train",
        *run.arguments,
        *(f"--parts={path}" for path in self._parts_files),
        f"--workdir={run_directory}",
        "--sample_tokens=0",
      ],
      root=self.workdir,
    )

  def _record(self, run: SweepRun, failure: str, num_cores: int) -> str:
    """Adds the line of a run that has ended to the rows.

    Args:
      run: The run.
      failure: Why its process failed; "" if it did not.
      num_cores: Number of CPU cores that it had.

    Returns:
      The loss, or that the run diverged; "" if it failed and has no line.
    """
    if failure and not _DIVERGED.search(failure):
      return ""
    run_directory = self._directory(run)
    loaded_run = load_run(run_directory)
    row = row_of(loaded_run, run, failure=failure, cores=num_cores)
    self.rows.add(row, curve_of(loaded_run, row))
    # Checkpoints are much larger than everything else.
    with contextlib.suppress(OSError):
      files.remove_folder(
        self.workdir, "runs", run_directory.name, "checkpoints"
      )
    return f"diverged: {failure}" if failure else f"loss {row.loss:.4f}"
