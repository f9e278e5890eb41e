"""Trains the runs of a sweep that have no line yet.

A run that diverges is a result like any other. A run that fails otherwise is
tried again the next time.
"""

import contextlib
import functools
import pathlib
import re
import sys
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
    rows: Lines of the runs that have ended.
    failed: Run, reason and log of each that failed.
  """

  def __init__(
    self, workdir: pathlib.Path, rows: Rows, parts_files: Sequence[str] = ()
  ):
    """Looks for nothing yet.

    Args:
      workdir: Directories of runs are in WORKDIR/runs, what their processes
        print in WORKDIR/logs.
      rows: Lines of the runs that have ended.
      parts_files: Files that the process of a run runs first, because they may
        register parts that the run has.
    """
    self._workdir, self._parts_files = workdir, parts_files
    self.rows = rows
    self.failed: list[dict[str, str]] = []

  def row(self, run: SweepRun) -> RunRow | None:
    """Returns the line of a run on the text that is here."""
    return self.rows.row(run, corpus_digest(run.config))

  def train(self, runs: Sequence[SweepRun], pool: Pool, processes: int) -> None:
    """Trains runs that have no line yet, each once, in order.

    Args:
      runs: The runs.
      pool: Where they run.
      processes: How many run at once.
    """
    num_cores = max(1, usable_cores() // processes)
    missing = [run for run in runs if self.row(run) is None]
    print(f"{len(runs)} runs, {len(missing)} to do")
    jobs = [self._job(run) for run in missing]
    ended = 0

    def end(number: int, reason: str) -> None:
      nonlocal ended
      ended += 1
      run, job = missing[number], jobs[number]
      found = self._keep(run, reason, num_cores) or f"failed: {reason}"
      if found.startswith("failed"):
        failure = {"run": job.name, "reason": reason, "log": str(job.log)}
        self.failed.append(failure)
        found += f" (log: {job.log})"
      line = f"run {ended} of {len(jobs)}, {job.name}: {found}"
      print(printable(line), flush=True)

    pool.run(jobs, end)

  def _directory(self, run: SweepRun) -> pathlib.Path:
    # It is found by the digests at the end of its name, as the name before them
    # may change. Texts differ between machines.
    key = f"{run.digest}-{corpus_digest(run.config)[:6]}"
    runs = self._workdir / "runs"
    found = sorted(runs.glob(f"*-{key}"))
    return found[0] if found else runs / f"{run.label}-{key}"

  def _job(self, run: SweepRun) -> Job:
    name = self._directory(run).name
    workdir = work_directory.check_subfolder(self._workdir, "runs", name)
    work_directory.check_subfolder(self._workdir, "logs")
    return Job(
      name=f"{run.name}, seed {run.seed}",
      log=self._workdir / "logs" / f"{workdir.name}.log",
      command=[
        *(sys.executable, "-m", "experiments.train"),
        *run.arguments,
        *(f"--parts={path}" for path in self._parts_files),
        *(f"--workdir={workdir}", "--sample_tokens=0"),
      ],
      root=self._workdir,
    )

  def _keep(self, run: SweepRun, reason: str, num_cores: int) -> str:
    """Writes a run's line; returns what it found, or "" if it failed."""
    if reason and not _DIVERGED.search(reason):
      return ""
    workdir = self._directory(run)
    found = load_run(workdir)
    row = row_of(found, run, reason, num_cores)
    self.rows.add(row, curve_of(found, row))
    # They are much larger than the rest.
    with contextlib.suppress(OSError):
      files.remove_folder(self._workdir, "runs", workdir.name, "checkpoints")
    return f"diverged: {reason}" if reason else f"loss {row.loss:.4f}"
