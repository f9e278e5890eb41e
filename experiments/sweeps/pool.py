"""Runs jobs as processes, on this machine or on Slurm, a few at a time.

A process that crashes does not end the others. Each process writes to a log
file. On Slurm the process is `srun`, which waits for the Slurm job, passes
signals on to it, and exits with its exit code.
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
from experiments.runtime.command_line import UsageError, usage_errors

_POLL_S = 0.2  # Time between two looks at a process (seconds).
# Result of a job that was stopped, in place of the reason why it failed.
_STOPPED = "stopped"


class Job(NamedTuple):
  """A command to run as a process.

  Attributes:
    name: Name for messages, such as "diloco 2x4, seed 0".
    log: File to which the output of the process is appended.
    command: Command line of the process.
    root: Folder above the log. No folder between them may be a symbolic link.
      None: the folder of the log.
  """

  name: str
  log: pathlib.Path
  command: Sequence[str]
  root: pathlib.Path | None = None


class Pool:
  """Runs jobs, a few at a time, until all have ended or a deadline comes.

  Attributes:
    cores: Number of CPU cores that a job can use; 0 if unknown, as on Slurm.
  """

  def __init__(
    self, processes: int, slurm: str = "", deadline_s: float = math.inf
  ):
    """Prepares the pool, and starts no process yet.

    Args:
      processes: Number of jobs that run at once.
      slurm: Options of srun, such as "--partition=gpu --gpus=1 --time=120"; ""
        for processes on this machine.
      deadline_s: Value of `time.monotonic` at which jobs are stopped (seconds);
        infinity: never.

    Raises:
      UsageError: If `slurm` is given and this machine has no srun, or if a
        quotation mark in it has no partner.
    """
    self._processes = processes
    self._deadline_s = deadline_s
    if slurm:
      if not shutil.which("srun"):
        raise UsageError("--slurm needs the program srun, which is not here")
      with usage_errors("--slurm: "):
        self._prefix = ["srun", *shlex.split(slurm)]
      self._limits = {}
      self.cores = 0
    else:
      self._prefix = []
      # Divides this machine among the processes.
      self._limits = process_group.thread_limits(processes)
      self.cores = max(1, process_group.usable_cores() // processes)
    self._stop = threading.Event()

  @property
  def is_late(self) -> bool:
    """Whether the deadline has passed."""
    return time.monotonic() >= self._deadline_s

  def run(self, jobs: Sequence[Job], ended: Callable[[int, str], None]) -> None:
    """Runs jobs, and returns when all have ended or were stopped.

    Jobs are stopped (SIGTERM) at the deadline. They are also stopped if this
    call is interrupted, if `ended` raises an error, or if a job cannot be
    started. A pool can be used once: a second call would start no jobs.

    Args:
      jobs: The jobs, in the order in which they start.
      ended: Called in this thread for each job that has ended, with its index
        in `jobs` and the reason why it failed ("" if it did not fail). It is
        not called for jobs that were stopped or never started.

    Raises:
      OSError: If a command cannot be started, if a log cannot be opened, or if
        a folder of a log is a link.
    """
    threads = concurrent.futures.ThreadPoolExecutor(self._processes)
    index_by_future = {}
    for index, job in enumerate(jobs):
      index_by_future[threads.submit(self._run, job)] = index
    try:
      for future in concurrent.futures.as_completed(index_by_future):
        reason = future.result()
        if reason != _STOPPED:
          ended(index_by_future[future], reason)
    finally:
      self._stop.set()
      threads.shutdown(cancel_futures=True)

  def _must_stop(self) -> bool:
    """Returns whether jobs have to stop, and no other job may start."""
    return self._stop.is_set() or self.is_late

  def _run(self, job: Job) -> str:
    """Runs a job as a process, and waits until the process has ended.

    Returns why the job failed, "" if it did not fail, or `_STOPPED` if it was
    stopped or not started because jobs have to stop.
    """
    if self._must_stop():
      return _STOPPED
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
        env=self._limits | os.environ,  # The user's own limits win.
      )
    while process.poll() is None and not self._must_stop():
      time.sleep(_POLL_S)
    if process.poll() is None:
      process.terminate()
    code = process.wait()
    # A job that ended with code 0 just before it had to stop has ended.
    if self._must_stop() and code:
      return _STOPPED
    return _reason(code, job.log.read_bytes()[start_bytes:])


def _reason(code: int, text: bytes) -> str:
  """Returns why a process failed, in one line; "" if its exit code is 0.

  The reason is the last "error: ..." in its output, or else the signal that
  killed it, or else its last line, or else its exit code.
  """
  if code == 0:
    return ""
  all_lines = text.decode(errors="replace").splitlines()
  lines = [line.strip() for line in all_lines if line.strip()]
  reasons = [line.partition("error: ")[2] for line in lines]
  reasons = [reason for reason in reasons if reason]
  if reasons:
    return reasons[-1]
  if code < 0:
    return f"killed by {_signal_name(-code)}"
  return lines[-1] if lines else f"exit code {code}"


def _signal_name(number: int) -> str:
  """Returns the name of a signal, or "signal 40" if it has no name."""
  try:
    return signal.Signals(number).name
  except ValueError:
    return f"signal {number}"
