"""Brings planned runs to their end and keeps what they found.

Each is a process of `experiments.train` in its own directory, and its line is
written the moment it has ended. A run that diverges is a finding like any
other; one that fails otherwise is tried again the next time.
"""

import collections
import functools
import json
import pathlib
import re
import shutil
import sys
from collections.abc import Sequence

from dilocox_jax.config import RunConfig
from dilocox_jax.data import sources
from dilocox_jax.report.run import load_run
from experiments.runtime import job_pool
from experiments.sweeps import grid
from experiments.sweeps.required_run import RequiredRun
from experiments.sweeps.results import ResultRow, Results, evaluations, row_of

_DIVERGED = re.compile(r"is not finite (at|after) step")


@functools.cache
def _digest(source: str, pattern: str, fraction: float, seed: int) -> str:
  found = sources.load_corpus(
    source, glob=pattern, seed=seed, validation_fraction=fraction
  )
  return found.digest


def corpus_digest(config: RunConfig) -> str:
  """The digest of the text that a run would see here."""
  data = config.data
  seed = config.seed if data.source == "synthetic" else 0
  return _digest(data.source, data.glob, data.validation_fraction, seed)


class RunMaker:
  """RequiredRun runs, their directories and their lines."""

  def __init__(self, results: Results, workdir: pathlib.Path, any_text: bool):
    """Takes what there is.

    Args:
      results: Where lines are kept.
      workdir: Where the directories are.
      any_text: Whether lines on a text other than the one here count too;
        nothing can be run then.
    """
    self._results, self._workdir = results, workdir
    self._any_text = any_text

  def row(self, planned: RequiredRun) -> ResultRow | None:
    """The line of a run, if it has ended."""
    digest, rows = self._results.digest(planned.config), self._results.rows
    if not self._any_text:
      return rows.get((digest, corpus_digest(planned.config)))
    text = self._usual_text(planned)
    return rows.get((digest, text)) if text else None

  def elsewhere(self, planned: Sequence[RequiredRun]) -> int:
    """How many missing runs have a line, but on another text."""
    known = {digest for digest, _ in self._results.rows}
    missing = self.missing(planned)
    return sum(self._results.digest(each.config) in known for each in missing)

  def _usual_text(self, planned: RequiredRun) -> str | None:
    """The text of most lines: losses on different ones do not compare."""
    by_seed = planned.config.data.source == "synthetic"
    texts = collections.Counter(
      row.corpus
      for row in self._results.rows.values()
      if not by_seed or row.seed == planned.seed
    )
    return max(texts, key=texts.__getitem__, default=None)

  def loss(self, planned: RequiredRun) -> float | None:
    """Its final loss; None if it has not ended, NaN if it diverged."""
    row = self.row(planned)
    return row.final_loss if row else None

  def missing(self, planned: Sequence[RequiredRun]) -> list[RequiredRun]:
    """Runs without a line, each once."""
    by_digest = {self._results.digest(p.config): p for p in reversed(planned)}
    return [p for p in reversed(by_digest.values()) if self.row(p) is None]

  def make(
    self, planned: Sequence[RequiredRun], processes: int, deadline_s: float
  ) -> tuple[list[str], bool]:
    """Makes what is missing.

    Args:
      planned: The runs.
      processes: How many at once.
      deadline_s: When to stop (by the monotonic clock).

    Returns:
      Why runs failed, and whether time was over before the end.
    """
    jobs = {self._job(each).workdir: each for each in self.missing(planned)}
    waiting = []
    for path, each in jobs.items():
      job = self._job(each)
      if job.is_done:  # Its line was lost, or is that of another file.
        self._keep(each, path)
      else:
        waiting.append(job)
    failures = []

    def ended(job: job_pool.Job, reason: str) -> str:
      if reason and not _DIVERGED.search(reason):
        failures.append(f"{job.name}: {reason} (log: {job.log})")
        return ""  # As the batch puts it.
      row = self._keep(jobs[job.workdir], job.workdir, reason)
      return f"diverged: {reason}" if reason else f"loss {row.final_loss:.4f}"

    work = job_pool.JobPool(
      waiting, processes, ended=ended, deadline_s=deadline_s
    )
    work.run()
    return failures, bool(self.missing(planned)) and work.is_late

  def _job(self, planned: RequiredRun) -> job_pool.Job:
    config = planned.config
    # Texts differ between machines, and a directory may outlive its own.
    digest, text = self._results.digest(config), corpus_digest(config)[:6]
    name = f"{planned.method}-seed{config.seed}-{digest}-{text}"
    workdir = self._workdir / "runs" / name
    trial = grid.Trial(planned.method, planned.changed, config)
    return job_pool.Job(
      name=f"{planned.task} of {planned.method}, seed {config.seed}",
      workdir=workdir,
      log=self._workdir / "logs" / f"{name}.log",
      command=[
        *(sys.executable, "-m", "experiments.train"),
        *trial.arguments,
        f"--workdir={workdir}",
      ],
      total_steps=config.total_steps,
    )

  def _keep(
    self, planned: RequiredRun, workdir: pathlib.Path, failure: str = ""
  ) -> ResultRow:
    """Writes a run's line; its state, much larger, is not needed any more."""
    run, digest = load_run(workdir), self._results.digest(planned.config)
    row = row_of(
      run,
      failure,
      stage=planned.task,
      method=planned.method,
      seed=planned.seed,
      digest=digest,
      changed=json.dumps(dict(planned.changed), sort_keys=True),
      total_steps=planned.config.total_steps,
    )
    # Of tuning nothing but the end counts, so it has no curve.
    has_curve = bool(planned.config.evaluation.interval_steps)
    self._results.add(row, evaluations(run, digest) if has_curve else [])
    shutil.rmtree(workdir / "checkpoints", ignore_errors=True)
    return row
