"""Trains the runs of a sweep that have not ended yet.

A run that has reached its last step, or that diverged, gets a line in runs.csv.
A run that failed for another reason gets no line, so the same command, started
again, trains it again.
"""

import contextlib
import functools
import math
import pathlib
import re
import sys
import time
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dilocox_jax import files
from dilocox_jax.checks import in_front, printable
from dilocox_jax.config import RunConfig
from dilocox_jax.config.sections import DataConfig
from dilocox_jax.metrics import work_directory
from dilocox_jax.report.run import load_run
from dilocox_jax.training import run_text
from experiments.runtime.running import check_optimizers
from experiments.sweeps.finished import Rows
from experiments.sweeps.pool import Job, Pool
from experiments.sweeps.rows import RunRow, evaluations_of, row_of
from experiments.sweeps.runs import SweepRun, baseline_of, text_of

# Words of the error with which `training` stops a run that diverged.
_DIVERGED = re.compile(r"is not finite (at|after) step")


@functools.cache
def _text_digest(data: DataConfig, seed: int) -> str:
  """Returns the digest of a text. Each text is read once.

  `seed` is the seed of a synthetic text.
  """
  return run_text.text_of(data, seed).digest


def corpus_digest(config: RunConfig) -> str:
  """Returns the digest of the text that a run would read on this machine.

  Raises:
    ValueError: If this machine does not have the text. The message is one line.
  """
  data, seed = text_of(config)
  return _text_digest(data, seed)


def check_names(runs: Iterable[SweepRun]) -> None:
  """Checks that the optimizers and the texts of runs exist.

  The check of a config (`from_mapping`) does not find these mistakes.

  Raises:
    ValueError: If an optimizer cannot be built or a text does not exist. The
      message is one line, which names the run and the section of the config.
  """
  for run in runs:
    with in_front(f"run {run.name!r}: "):
      check_optimizers(run.config)
    with in_front(f"run {run.name!r}: data: "):
      corpus_digest(run.config)


class Training:
  """The training of a sweep's runs, in its work directory.

  Attributes:
    workdir: The work directory. Directories of runs are in WORKDIR/runs, and
      the output of their processes is in WORKDIR/logs.
    rows: Files with the lines of the runs that have ended.
    failed: "run", "reason" and "log" of each run that has failed since this
      object was made; runs that diverged do not count.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    rows: Rows,
    sweep: Mapping[str, Any] = types.MappingProxyType({}),
    parts_files: Sequence[str] = (),
  ):
    """Prepares the training, and trains nothing yet.

    Args:
      workdir: The work directory.
      rows: Files with the lines of the runs that have ended.
      sweep: The sweep's config, which names the baselines.
      parts_files: Python files that register the user's own models, codecs etc.
        (`--parts`). The process of each run executes them first.
    """
    self.workdir = workdir
    self.rows = rows
    self._sweep = sweep
    self._parts_files = parts_files
    self.failed: list[dict[str, str]] = []

  def row(self, run: SweepRun) -> RunRow | None:
    """Returns the line of runs.csv of a finished run.

    The result is None if the run has not ended on the text that this machine
    has.
    """
    return self.rows.row(run, corpus_digest(run.config))

  def train_for(
    self,
    runs: Sequence[SweepRun],
    *,
    num_processes: int,
    slurm: str,
    max_minutes: float | None,
  ) -> bool:
    """Trains the runs that have not ended yet, for a limited time.

    Args:
      runs: Runs of the sweep, ended or not.
      num_processes: Number of runs that train at once.
      slurm: Options of srun; "" for processes on this machine.
      max_minutes: Time after which runs save and stop (minutes); None: no
        limit.

    Returns:
      Whether the time was over before all runs had ended.

    Raises:
      BusyError: If another sweep trains in the same work directory.
      UsageError: If `slurm` is given and this machine has no srun, or if a
        quotation mark in it has no partner.
      RefusedError: If a folder of the work directory is a link.
      RecordError: If runs.csv or evaluations.csv cannot be written.
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
      self.train(runs, pool)
    return pool.is_late and any(self.row(run) is None for run in runs)

  def train(self, runs: Sequence[SweepRun], pool: Pool) -> None:
    """Trains the runs that have not ended yet, each once, in order.

    A run that ends or diverges is added to `rows`. A run that fails for another
    reason is added to `failed`. A line is printed for each of these runs.

    Args:
      runs: Runs of the sweep, ended or not.
      pool: Runs the processes; it must be new.

    Raises:
      RefusedError: If a folder of the work directory is a link.
      RecordError: If runs.csv or evaluations.csv cannot be written.
    """
    missing_runs = [run for run in runs if self.row(run) is None]
    print(f"{len(runs)} runs, {len(missing_runs)} to do")
    jobs = [self._job(run) for run in missing_runs]
    num_ended = 0

    def report_end(number: int, failure: str) -> None:
      nonlocal num_ended
      num_ended += 1
      job = jobs[number]
      outcome = self._record(missing_runs[number], failure, pool.cores)
      if not outcome:
        log = str(job.log)
        self.failed.append({"run": job.name, "reason": failure, "log": log})
        outcome = f"failed: {failure} (log: {log})"
      line = f"run {num_ended} of {len(jobs)}, {job.name}: {outcome}"
      print(printable(line), flush=True)

    pool.run(jobs, report_end)

  def _directory(self, run: SweepRun) -> pathlib.Path:
    """Returns the directory of a run, which need not exist yet.

    An existing directory is found by the digests of config and text in its
    name.
    """
    key = f"{run.digest}-{corpus_digest(run.config)[:6]}"
    folder = self.workdir / "runs"
    # The label may have changed since the directory was made.
    earlier = sorted(folder.glob(f"*-{key}"))
    return earlier[0] if earlier else folder / f"{run.label}-{key}"

  def _job(self, run: SweepRun) -> Job:
    """Returns the job that trains a run.

    Raises RefusedError if a folder of the run is a link.
    """
    name = self._directory(run).name
    run_directory = work_directory.check_subfolder(self.workdir, "runs", name)
    work_directory.check_subfolder(self.workdir, "logs")
    return Job(
      name=f"{run.name}, seed {run.seed}",
      log=self.workdir / "logs" / f"{name}.log",
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
    """Adds an ended run to `rows`, and removes the checkpoints of the run.

    A run whose process failed is added only if the run diverged. Returns text
    with the run's loss, or why it diverged; "" if the run was not added.
    """
    if failure and not _DIVERGED.search(failure):
      return ""
    run_directory = self._directory(run)
    loaded_run = load_run(run_directory)
    baseline = baseline_of(self._sweep, run.name)
    row = row_of(
      loaded_run,
      run,
      study=self.rows.study,
      baseline="" if baseline == run.name else baseline,
      failure=failure,
      cores=num_cores,
    )
    self.rows.add(row, evaluations_of(loaded_run, row))
    # Checkpoints are much larger than everything else.
    with contextlib.suppress(OSError):
      files.remove_folder(
        self.workdir, "runs", run_directory.name, "checkpoints"
      )
    return f"diverged: {failure}" if failure else f"loss {row.loss:.4f}"
