"""Runs as processes of their own, here or on Slurm, a few at a time.

A process that crashes takes no other with it, and its memory and its compiled
programs go when it ends. Each writes to a log file, saves when it is asked to
stop, and goes on from its checkpoint another time.
"""

import concurrent.futures
import dataclasses
import math
import os
import pathlib
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dilocox_jax import files
from dilocox_jax.checks import extra_package
from experiments.runtime import process_group
from experiments.runtime.command_line import UsageError

_POLL_S = 0.2
LATE = "stopped"  # Reason of a job that was asked to stop.


@dataclasses.dataclass(frozen=True)
class Job:
  """One run that a process brings to its end.

  Attributes:
    name: Name of the run, for people.
    log: File to which the process writes.
    command: Command line of the process.
  """

  name: str
  log: pathlib.Path
  command: Sequence[str]


class Pool:
  """Runs jobs, so many at a time, until all have ended or time is over."""

  def __init__(
    self, processes: int, slurm: str = "", deadline_s: float = math.inf
  ):
    """Starts nothing yet.

    Args:
      processes: How many jobs run at once.
      slurm: Parameters of Slurm jobs, such as "partition=gpu,timeout_min=60";
        "" for processes on this machine.
      deadline_s: When to stop (seconds of the monotonic clock).

    Raises:
      UsageError: If submitit is not installed, or a parameter is wrong.
    """
    self._processes, self._deadline_s = processes, deadline_s
    self._slurm = _slurm_submit(slurm) if slurm else None
    self._stop = threading.Event()
    self._cores: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for own in process_group.divided_cores(processes):
      self._cores.put(own)

  @property
  def is_late(self) -> bool:
    """Whether the time is over."""
    return time.monotonic() >= self._deadline_s

  def run(self, jobs: Sequence[Job], ended: Callable[[int, str], None]) -> None:
    """Runs jobs.

    Args:
      jobs: The jobs in order.
      ended: Is called in this thread with the number of each job that has
        ended and the reason why it failed; empty: it did not. Jobs that were
        stopped are left out.
    """
    threads = concurrent.futures.ThreadPoolExecutor(self._processes)
    one = self._on_slurm if self._slurm else self._here
    numbers = {threads.submit(one, job): n for n, job in enumerate(jobs)}
    try:
      for done in concurrent.futures.as_completed(numbers):
        if (reason := done.result()) != LATE:
          ended(numbers[done], reason)
    finally:
      self._stop.set()
      threads.shutdown(cancel_futures=True)

  def _is_over(self) -> bool:
    return self._stop.is_set() or self.is_late

  def _here(self, job: Job) -> str:
    """Runs a job as a process; returns why it failed."""
    if self._is_over():
      return LATE
    own = self._cores.get()
    environment = process_group.thread_limits(self._processes)
    if self._processes > 1:  # One process takes most of a GPU's memory.
      environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with files.opened_to_append(job.log) as log:
      start_bytes = log.tell()
      process = subprocess.Popen(
        list(job.command),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment | os.environ,
      )
    process_group.pin(process.pid, own)
    while process.poll() is None and not self._is_over():
      time.sleep(_POLL_S)
    if process.poll() is None:
      process.terminate()
    code = process.wait()
    self._cores.put(own)
    if self._is_over() and code:
      return LATE
    return _reason(code, job.log.read_bytes()[start_bytes:])

  def _on_slurm(self, job: Job) -> str:
    """Runs a job on Slurm; returns why it failed."""
    assert self._slurm
    if self._is_over():
      return LATE
    submitted = self._slurm(job.command)
    while not submitted.done() and not self._is_over():
      time.sleep(_POLL_S)
    if not submitted.done():
      submitted.cancel()
      return LATE
    error = submitted.exception()
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with files.opened_to_append(job.log) as log:
      log.write((submitted.stdout() or "").encode())
      log.write((submitted.stderr() or "").encode())
    return _reason(int(bool(error)), str(error or "").encode())


def _slurm_submit(text: str) -> Callable[[Sequence[str]], Any]:
  """Returns what submits a command, for parameters such as "a=1,b=c"."""
  try:
    submitit = extra_package("submitit", "--slurm", "slurm")
    parameters: Mapping[str, Any] = dict(
      part.split("=", 1) for part in text.split(",")
    )
    folder = parameters.pop("folder", "slurm_logs")  # pyright: ignore
    where = parameters.pop("cluster", "slurm")  # pyright: ignore
    executor = submitit.AutoExecutor(folder, cluster=where)
    numbers = {k: int(v) if v.isdigit() else v for k, v in parameters.items()}
    executor.update_parameters(**numbers)
  except (ValueError, NameError, RuntimeError) as error:
    raise UsageError(f"--slurm={text}: {error}") from error

  def submit(command: Sequence[str]) -> Any:
    task = submitit.helpers.CommandFunction(list(command), verbose=False)
    return executor.submit(task)

  return submit


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
