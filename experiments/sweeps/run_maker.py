"""Makes the runs of a sweep, each as a process in a directory of its own.

An ablation keeps its run directories. A convergence sweep keeps one line of a
CSV for every run, written the moment the run has ended; a run that diverges is
a result like any other there. A run that fails otherwise is tried again the
next time.
"""

import collections
import dataclasses
import functools
import json
import pathlib
import re
import shutil
import sys
from collections.abc import Iterable, Sequence

from dilocox_jax.checks import in_front
from dilocox_jax.config import RunConfig
from dilocox_jax.config.sections import DataConfig
from dilocox_jax.config.unread import changed_options
from dilocox_jax.optimizers import named_optimizer
from dilocox_jax.report.run import load_run
from dilocox_jax.training import run_text
from experiments.runtime import cores, job_pool
from experiments.sweeps.results import ResultRow, Results, evaluations, row_of
from experiments.sweeps.run_spec import RequiredRun, run_digest

_DIVERGED = re.compile(r"is not finite (at|after) step")


@functools.cache
def _text_digest(data: DataConfig, seed: int) -> str:
  return run_text.text_of(data, seed).digest


def corpus_digest(config: RunConfig) -> str:
  """Returns the digest of the text that a run would train on here."""
  data = config.data
  seed = config.seed if data.source == "synthetic" else 0
  # How the text is cut into batches does not matter.
  text = dataclasses.replace(data, batch_size=1, sequence_length=1)
  return _text_digest(text, seed)


def check_names(runs: Iterable[RequiredRun]) -> None:
  """Looks up optimizers and texts, which only their libraries know.

  Raises:
    ValueError: One line that names the run, the section and what is wrong.
  """
  for run in runs:
    with in_front(f"run {run.name!r}: inner."):
      inner = run.config.inner
      named_optimizer(inner.optimizer, 1.0, changed_options(inner))
    with in_front(f"run {run.name!r}: outer."):
      named_optimizer(run.config.outer.optimizer, 1.0)
    with in_front(f"run {run.name!r}: data."):
      corpus_digest(run.config)


class RunMaker:
  """The runs of a sweep, kept as directories below a work directory.

  Attributes:
    failures: Jobs that failed, with the reason in one line.
  """

  def __init__(self, workdir: pathlib.Path, parts_files: Sequence[str] = ()):
    """Looks for runs.

    Args:
      workdir: Directories of runs are in WORKDIR/runs, what their processes
        print in WORKDIR/logs.
      parts_files: Files that the process of a run runs first, because they may
        register parts that the run has.
    """
    self._workdir, self._parts_files = workdir, parts_files
    self.failures: list[tuple[job_pool.Job, str]] = []

  def digest(self, run: RequiredRun) -> str:
    """Returns the digits that tell a run from all others."""
    # Only fields that are not at their defaults count, so a field that a later
    # version adds does not make the runs of an ablation anew.
    return run_digest(run.config, counted=())

  def is_made(self, run: RequiredRun) -> bool:
    """Whether nothing is left to do for a run."""
    return self.job(run).is_done

  def to_do(self, runs: Sequence[RequiredRun]) -> str:
    """Says how many of some runs are missing."""
    return f"{len(self.missing(runs))} to do"

  def keep(
    self, run: RequiredRun, job: job_pool.Job, reason: str, num_cores: int
  ) -> str:
    """Keeps what a run that has ended found; here its directory is enough.

    Args:
      run: The run.
      job: Its process.
      reason: Why it failed, in one line; empty if it did not.
      num_cores: Cores that the process had; 0 if that is not known.

    Returns:
      One line on the result; empty if there is none beyond success or failure.
    """
    del run, job, reason, num_cores
    return ""

  def missing(self, runs: Sequence[RequiredRun]) -> list[RequiredRun]:
    """Returns the runs that are still to be made, each once, in order."""
    by_digest: dict[str, RequiredRun] = {}
    for run in runs:
      by_digest.setdefault(self.digest(run), run)
    return [run for run in by_digest.values() if not self.is_made(run)]

  def job(self, run: RequiredRun) -> job_pool.Job:
    """Returns the process that makes a run.

    A run's directory is found by the digests at the end of its name: what is
    before them may have another spelling since.
    """
    # Texts differ between machines, and a directory may outlive its own.
    key = f"{self.digest(run)}-{corpus_digest(run.config)[:6]}"
    runs = self._workdir / "runs"
    directories = sorted(runs.glob(f"*-{key}"))
    workdir = directories[0] if directories else runs / f"{run.label}-{key}"
    return job_pool.Job(
      name=f"{run.task} of {run.name}, seed {run.seed}",
      workdir=workdir,
      log=self._workdir / "logs" / f"{workdir.name}.log",
      command=[
        *(sys.executable, "-m", "experiments.train"),
        *run.arguments,
        *(f"--parts={path}" for path in self._parts_files),
        *(f"--workdir={workdir}", "--sample_tokens=0"),
      ],
      total_steps=run.config.total_steps,
    )

  def make(
    self, runs: Sequence[RequiredRun], processes: int, deadline_s: float
  ) -> bool:
    """Makes the runs that are missing.

    Args:
      runs: Runs of a task.
      processes: How many to make at once.
      deadline_s: When to stop (seconds of the monotonic clock).

    Returns:
      Whether the time was over before all were made.
    """
    num_cores = len(cores.divided(processes)[0])
    by_workdir: dict[pathlib.Path, RequiredRun] = {}
    waiting = []
    for run in self.missing(runs):
      job = self.job(run)
      by_workdir[job.workdir] = run
      if job.is_done:  # Its line was lost, or is in another file.
        self.keep(run, job, "", 0)
      else:
        waiting.append(job)

    def ended(job: job_pool.Job, reason: str) -> str:
      result = self.keep(by_workdir[job.workdir], job, reason, num_cores)
      if reason and not result:
        self.failures.append((job, reason))
      return result

    pool = job_pool.JobPool(
      waiting, processes, ended=ended, deadline_s=deadline_s
    )
    pool.run()
    return pool.is_late and bool(self.missing(runs))


class KeptRuns(RunMaker):
  """The runs of a convergence sweep, kept as lines of a CSV.

  Attributes:
    results: The lines.
  """

  def __init__(
    self,
    results: Results,
    workdir: pathlib.Path,
    any_text: bool,
    parts_files: Sequence[str] = (),
  ):
    """Looks for lines.

    Args:
      results: Where the lines are kept.
      workdir: Where the directories are.
      any_text: Whether lines on a text other than the one here count too, as
        in a report. No run can be made then.
      parts_files: Files that the process of a run runs first.
    """
    super().__init__(workdir, parts_files)
    self.results, self._any_text = results, any_text

  def digest(self, run: RequiredRun) -> str:
    """Returns the digest of a run as the CSV has it."""
    return self.results.digest(run.config)

  def is_made(self, run: RequiredRun) -> bool:
    """Whether a run has its line."""
    return self.row(run) is not None

  def to_do(self, runs: Sequence[RequiredRun]) -> str:
    """Says how many runs are missing, and how many only on this text."""
    digests = {digest for digest, _ in self.results.rows}
    missing = self.missing(runs)
    count = sum(self.digest(run) in digests for run in missing)
    elsewhere = f" ({count} of these have lines, on another text)"
    return f"{len(missing)} to do{elsewhere if count else ''}"

  def row(self, run: RequiredRun) -> ResultRow | None:
    """Returns the line of a run, if it has ended."""
    text = (
      self._usual_text(run) if self._any_text else corpus_digest(run.config)
    )
    return self.results.rows.get((self.digest(run), text))

  def _usual_text(self, run: RequiredRun) -> str:
    """The text of most lines: losses on different texts do not compare."""
    by_seed = run.config.data.source == "synthetic"
    texts = collections.Counter(
      row.corpus
      for row in self.results.rows.values()
      if not by_seed or row.seed == run.seed
    )
    return max(texts, key=texts.__getitem__, default="")

  def loss(self, run: RequiredRun) -> float | None:
    """Returns the final loss; None: not ended yet, NaN: diverged."""
    row = self.row(run)
    return row.final_loss if row else None

  def keep(
    self, run: RequiredRun, job: job_pool.Job, reason: str, num_cores: int
  ) -> str:
    """Writes a run's line and removes its state, which is much larger."""
    if reason and not _DIVERGED.search(reason):
      return ""
    found, digest = load_run(job.workdir), self.digest(run)
    row = row_of(
      found,
      reason,
      stage=run.task,
      method=run.name,
      seed=run.seed,
      digest=digest,
      changed=json.dumps(dict(run.changed), sort_keys=True),
      total_steps=run.config.total_steps,
      cores=num_cores,
    )
    # Only the end of a tuning run counts, so it has no curve.
    has_curve = bool(run.config.evaluation.interval_steps)
    self.results.add(row, evaluations(found, digest) if has_curve else [])
    shutil.rmtree(job.workdir / "checkpoints", ignore_errors=True)
    return f"diverged: {reason}" if reason else f"loss {row.final_loss:.4f}"
