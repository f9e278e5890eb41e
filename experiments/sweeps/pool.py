"""Runs jobs as processes, on this machine or on Slurm, a few at a time.

A process that crashes takes no other with it, and its memory and its compiled
programs go when it ends. Each writes to a log file, saves when it is asked to
stop, and goes on from its checkpoint another time. On Slurm the process is
`srun`, which waits for a job and hands signals and the exit code on.
"""

import concurrent.futures
import math
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dilocox_jax import files
from experiments.runtime import process_group
from experiments.runtime.command_line import UsageError

_POLL_S = 0.2
_LATE = "stopped"  # Reason of a job that was asked to stop.


class Job(NamedTuple):
  """One run that a process brings to its end.

  Attributes:
    name: Name of the run, for people.
    log: File to which the process writes.
    command: Command line of the process.
    root: Folder above the log that the user names; by default its own folder.
  """

  name: str
  log: pathlib.Path
  command: Sequence[str]
  root: pathlib.Path | None = None


class Pool:
  """Runs jobs, a few at a time, until all have ended or the time is over."""

  def __init__(
    self, processes: int, slurm: str = "", deadline_s: float = math.inf
  ):
    """Starts nothing yet.

    Args:
      processes: How many jobs run at once.
      slurm: Options of srun, such as "--partition=gpu --gpus=1 --time=120"; ""
        for processes on this machine.
      deadline_s: When to stop (seconds of the monotonic clock).

    Raises:
      UsageError: If there is no srun, and slurm needs it.
    """
    self._processes = processes
    self._deadline_s = deadline_s
    if slurm:
      if not shutil.which("srun"):
        raise UsageError("--slurm needs the program srun, which is not here")
      self._prefix = ["srun", *shlex.split(slurm)]
      self._limits = {}
    else:
      self._prefix = []
      # Divides this machine among the processes.
      self._limits = process_group.thread_limits(processes)
    self._stop = threading.Event()

  @property
  def is_late(self) -> bool:
    """Whether the time is over."""
    return time.monotonic() >= self._deadline_s

  def run(self, jobs: Sequence[Job], ended: Callable[[int, str], None]) -> None:
    """Runs jobs.

    Args:
      jobs: The jobs in order.
      ended: Called in this thread for each job that has ended, with its number
        and the reason why it failed, or "" if it did not. It is not called for
        jobs that were stopped.
    """
    threads = concurrent.futures.ThreadPoolExecutor(self._processes)
    numbers = {}
    for number, job in enumerate(jobs):
      numbers[threads.submit(self._run, job)] = number
    try:
      for done in concurrent.futures.as_completed(numbers):
        reason = done.result()
        if reason != _LATE:
          ended(numbers[done], reason)
    finally:
      self._stop.set()
      threads.shutdown(cancel_futures=True)

  def _is_over(self) -> bool:
    return self._stop.is_set() or self.is_late

  def _run(self, job: Job) -> str:
    """Runs a job as a process.

    Returns:
      Why it failed; "" if it did not; `_LATE` if it was stopped.
    """
    if self._is_over():
      return _LATE
    root = job.root or job.log.parent
    root.mkdir(parents=True, exist_ok=True)
    files.folder_below(root, *job.log.parent.relative_to(root).parts)
    with files.opened_to_append(job.log, root=root) as log:
      start_bytes = log.tell()
      process = subprocess.Popen(
        [*self._prefix, *job.command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=self._limits | os.environ,
      )
    while process.poll() is None and not self._is_over():
      time.sleep(_POLL_S)
    if process.poll() is None:
      process.terminate()
    code = process.wait()
    if self._is_over() and code:
      return _LATE
    return _reason(code, job.log.read_bytes()[start_bytes:])


def _reason(code: int, text: bytes) -> str:
  """Returns why a process failed, in one line; empty if it did not."""
  if code == 0:
    return ""
  lines = [line for line in text.decode(errors="replace").splitlines() if line]
  errors = [line for line in lines if "error: " in line]
  if errors:
    return errors[-1].partition("error: ")[2]
  if code < 0:
    return f"killed by {signal.Signals(-code).name}"
  return lines[-1].strip() if lines else f"exit code {code}"
