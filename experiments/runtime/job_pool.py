"""Runs as processes of their own, a few at a time, each with its own cores.

A process that crashes takes no other with it, and its memory and its compiled
programs go when it ends. Each writes to a log file that is locked as long as
the process lives. If only the parent is killed, its processes go on: a pool
that is started again finds the lock, makes the other runs, and continues that
run when the lock is free.

joblib and submitit are not used, because neither pins the cores of each process
and hands a lock down to it that outlives the parent; resuming is the run's own
affair, by its checkpoints.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from rich import progress
from rich.console import Console

from dilocox_jax import files
from dilocox_jax.metrics import read_rows
from dilocox_jax.report.page import PAGE
from experiments.runtime import cores, file_lock
from experiments.runtime.command_line import StoppedError

_POLL_S = 0.25


@dataclasses.dataclass(frozen=True)
class Job:
  """One run that a process brings to its end.

  Attributes:
    name: Name of the run, for people.
    workdir: Directory of the run.
    log: File to which the process writes.
    command: Command line of the process.
    total_steps: Inner steps of the run.
  """

  name: str
  workdir: pathlib.Path
  log: pathlib.Path
  command: Sequence[str]
  total_steps: int

  @property
  def is_done(self) -> bool:
    """Whether the run has ended and its report is there."""
    rows = read_rows(self.workdir / "metrics.jsonl")
    is_ended = any(row.get("kind") == "final" for row in rows)
    return is_ended and (self.workdir / PAGE).exists()

  @property
  def step(self) -> int:
    """The number of inner steps that are finished."""
    rows = read_rows(self.workdir / "metrics.jsonl")
    return max((row["step"] for row in rows), default=0)


class _Process:
  """A job that is running."""

  def __init__(self, job: Job, own_cores: list[int], environment: dict):
    self.job, self.own_cores = job, own_cores
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with files.opened_to_append(job.log) as log:
      file_lock.lock(
        log, "another process is still at this run: waiting for it"
      )
      self.log_start_bytes = log.tell()
      self.process = subprocess.Popen(
        list(job.command),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
      )
    cores.pin(self.process.pid, own_cores)

  def reason(self) -> str:
    """Returns why the job failed, in one line; empty if it did not."""
    code = self.process.returncode
    if code == 0:
      return ""
    text = self.job.log.read_bytes()[self.log_start_bytes :].decode(
      errors="replace"
    )
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    if errors:
      return errors[-1].removeprefix("error: ")
    if code < 0:
      return f"killed by {signal.Signals(-code).name}"
    return lines[-1].strip() if lines else f"exit code {code}"

  def ask_to_stop(self) -> None:
    if self.process.poll() is None:
      self.process.terminate()


class JobPool:
  """Jobs that wait, run and have ended, with the bar that shows them."""

  def __init__(
    self,
    jobs: Sequence[Job],
    processes: int,
    *,
    ended: Callable[[Job, str], str] = lambda job, reason: "",
    deadline_s: float = math.inf,
  ):
    """Starts nothing yet.

    Args:
      jobs: Jobs that are not done yet, in order.
      processes: How many jobs run at once.
      ended: Is called with every job that has ended and why it failed (empty:
        it did not). Returns what to print; empty for the usual line.
      deadline_s: When to stop jobs that still run (seconds of the monotonic
        clock). They go on from their checkpoints another time.
    """
    self._ended, self._deadline_s = ended, deadline_s
    self._waiting = list(jobs)
    self._processes = processes
    self._free_cores = cores.divided(processes)
    self._running: list[_Process] = []
    self._told: set[pathlib.Path] = set()
    self._first = {job.workdir: job.step for job in jobs}
    self._ended_steps = 0
    self._count = len(jobs)
    self._bar = progress.Progress(
      progress.TextColumn("[bold]{task.description}"),
      progress.BarColumn(),
      progress.TaskProgressColumn(),
      progress.TextColumn("{task.fields[status]}"),
      progress.TimeElapsedColumn(),
      progress.TimeRemainingColumn(),
      progress.TextColumn("left"),
      speed_estimate_period=3600,  # A short one would show compiling only.
      disable=not Console().is_terminal,
    )
    total = sum(self._left(job) for job in jobs)
    self._task = self._bar.add_task("runs", total=total, status="")

  def _left(self, job: Job) -> int:
    return job.total_steps - min(self._first[job.workdir], job.total_steps)

  @property
  def is_late(self) -> bool:
    """Whether the deadline has passed."""
    return time.monotonic() >= self._deadline_s

  def run(self) -> None:
    """Runs all jobs, or as many as end before the deadline."""
    with self._bar, contextlib.ExitStack() as stack:
      stack.callback(self._stop)
      while (self._waiting or self._running) and not self.is_late:
        self._start()
        self._show()
        if self._running or self._waiting:
          time.sleep(_POLL_S)
        self._collect()
      self._show()

  def _start(self) -> None:
    environment = cores.limits(self._processes) | os.environ
    # By default one process takes most of a GPU's memory for itself.
    if self._processes > 1:
      environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for job in list(self._waiting):
      if not self._free_cores:
        return
      own = self._free_cores.pop()
      try:
        self._running.append(_Process(job, own, environment))
      except StoppedError as error:
        self._free_cores.append(own)
        self._tell_once(job, error)
      else:
        self._waiting.remove(job)

  def _tell_once(self, job: Job, error: StoppedError) -> None:
    if job.workdir not in self._told:
      self._told.add(job.workdir)
      self._print(f"{job.name}: {error} (log: {job.log})")

  def _collect(self) -> None:
    for running in list(self._running):
      if running.process.poll() is not None:
        self._running.remove(running)
        self._free_cores.append(running.own_cores)
        self._end(running.job, running.reason())

  def _end(self, job: Job, reason: str) -> None:
    self._ended_steps += self._left(job)
    done = self._count - len(self._waiting) - len(self._running)
    result = f"failed: {reason} (log: {job.log})" if reason else "done"
    result = self._ended(job, reason) or result
    self._print(f"run {done} of {self._count}, {job.name}: {result}")

  def _print(self, line: str) -> None:
    self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

  def _show(self) -> None:
    steps = self._ended_steps
    for running in self._running:
      job = running.job
      steps += max(min(job.step, job.total_steps) - self._first[job.workdir], 0)
    names = ", ".join(running.job.name for running in self._running)
    self._bar.update(self._task, completed=steps, status=names)

  def _stop(self) -> None:
    # All at once: Ctrl-C has reached them too, and a signal that comes a second
    # later would end them without a save.
    for running in self._running:
      running.ask_to_stop()
    for running in self._running:
      running.process.wait()
