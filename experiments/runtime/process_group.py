"""Runs a group of processes that end together.

Either all processes succeed, or all are ended because one of them failed. Only
process 0 writes to the terminal directly. The group reads the warnings of the
other processes and shows them with the number of their process. After a
failure it shows no more warnings. JAX prints many lines when other processes
end, and these would hide the one line that says which process failed first.

Processes that run side by side share the cores of this machine. XLA starts one
thread for each core, and two processes with two threads each on two cores
mostly wait for each other: training `tiny` twice at once is nearly twice as
fast if each process has one core (measured).
"""

import collections
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from experiments.runtime.command_line import STOP_CODES, TRY_AGAIN

_POLL_S = 0.1
# The first process that ends may have ended only because another one failed.
# The failed process waits for the others before it ends
# (`coordinator_store.wait_for_end`), so it may end this many seconds later.
_SETTLE_S = 7.0
_END_S = 5.0  # Time for reading the last lines of an ended process.
# A process that ends like this may have ended only because another one did.
_CONSEQUENCES = (TRY_AGAIN, -signal.SIGABRT)


@dataclasses.dataclass(frozen=True)
class Failure:
  """Describes why a group of processes ended.

  Attributes:
    reason: One line that says which process failed, and how.
    exit_code: Exit code as a shell reports it, e.g. 137 after SIGKILL.
    is_from_outside: Whether something outside the process ended it, such as a
      signal or the end of another process.
    is_stop: Whether the process saved and stopped because a signal asked for
      it.
  """

  reason: str
  exit_code: int
  is_from_outside: bool = False
  is_stop: bool = False


class Member:
  """One process of a group.

  Attributes:
    number: Number of the process, from 0.
  """

  def __init__(
    self,
    number: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    keep_open: Sequence[int] = (),
  ):
    """Describes the process without starting it.

    Args:
      number: Number of the process, from 0.
      command: Command line, one string for each argument.
      environment: All environment variables of the process.
      keep_open: File descriptors that the process inherits.
    """
    self.number, self._command = number, list(command)
    self._environment, self._keep_open = dict(environment), keep_open
    self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    self._last: collections.deque[str] = collections.deque(maxlen=50)
    self._reader: threading.Thread | None = None

  def start(self) -> None:
    """Starts the process. Only process 0 writes to the terminal."""
    hidden = self.number > 0
    self._process = subprocess.Popen(
      self._command,
      env=self._environment,
      pass_fds=self._keep_open,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL if hidden else None,
      stderr=subprocess.PIPE if hidden else None,
      text=hidden,
      errors="replace" if hidden else None,
    )
    if self._process.stderr:
      self._reader = threading.Thread(
        target=self._read, args=(self._process.stderr,), daemon=True
      )
      self._reader.start()

  def _read(self, stream: IO[str]) -> None:
    """Reads standard error to its end; a thread runs this."""
    with stream:
      for line in stream:
        self._lines.put(line.rstrip("\n"))

  def new_lines(self) -> list[str]:
    """Returns the lines that standard error got since the last call."""
    lines = [self._lines.get() for _ in range(self._lines.qsize())]
    self._last.extend(lines)
    return lines

  @property
  def exit_code(self) -> int | None:
    """Exit code as `subprocess` reports it, or None while the process runs."""
    return self._process.poll()

  def failure(self) -> Failure:
    """Returns why the process failed. It must have failed before the call."""
    self.new_lines()
    name, code = f"process {self.number}", self._process.returncode
    reason = f"{name} failed with exit code {code} (see above)"
    if code == -signal.SIGABRT:
      reason = f"{name} was aborted, probably because another process ended"
    elif code < 0:
      reason = f"{name} was killed by {signal.Signals(-code).name}"
    elif errors := self._errors():
      # The line already has the number of the process.
      reason = errors[-1].removeprefix("error: ")
    exit_code = 128 - code if code < 0 else code
    is_from_outside = code < 0 or code == TRY_AGAIN
    return Failure(reason, exit_code, is_from_outside, code in STOP_CODES)

  def _errors(self) -> list[str]:
    return [line for line in self._last if line.startswith("error: ")]

  def show(self, lines: Sequence[str]) -> None:
    """Prints lines on standard error with the number of the process."""
    name = f"process {self.number}: "
    for line in lines:
      print(name + line.removeprefix(name), file=sys.stderr)

  def show_traceback(self) -> None:
    """Prints the last lines of standard error, unless one is an error line."""
    if not self._errors():
      self.show(list(self._last))

  def send_signal(self, signal_number: int) -> None:
    """Sends a signal to the process, if it has not ended."""
    if self.exit_code is None:
      self._process.send_signal(signal_number)

  def wait(self) -> None:
    """Waits until the process has ended and its last lines are read."""
    self._process.wait()
    if self._reader:
      self._reader.join(_END_S)


class Group:
  """The processes of one run."""

  def __init__(self, members: Sequence[Member]):
    """Groups processes that are not started yet.

    Args:
      members: The processes in the order of their numbers.
    """
    self._members = members
    self._started: list[Member] = []

  def send_signal(self, signal_number: int) -> None:
    """Sends a signal to every process that runs."""
    for member in self._started:
      member.send_signal(signal_number)

  def run(self) -> Failure | None:
    """Starts all processes and waits until all have ended.

    No process runs any longer when this call ends, even if it raises.

    Returns:
      None if all processes succeeded, else why they failed.
    """
    try:
      for member in self._members:
        member.start()
        self._started.append(member)
      failed = self._first_failed()
    finally:
      # The processes are killed. SIGTERM would ask them to save, and a save
      # needs the process that has failed.
      for member in self._started:
        member.send_signal(signal.SIGKILL)
      for member in self._started:
        member.wait()
    if failed is None:
      for member in self._members:
        member.show(member.new_lines())
      return None
    failure = failed.failure()
    failed.show_traceback()
    return failure

  def _first_failed(self) -> Member | None:
    """Waits until all processes have succeeded or one has failed.

    Returns:
      The process that failed or stopped, or None if all have succeeded.
    """
    while True:
      lines = [member.new_lines() for member in self._members]
      codes = [member.exit_code for member in self._members]
      # A process that was asked to stop may end before the process that writes
      # the checkpoint. So its exit code does not end the others.
      if any(code and code not in STOP_CODES for code in codes):
        return self._cause()
      for member, new_lines in zip(self._members, lines, strict=True):
        member.show(new_lines)
      if None not in codes:
        return next((m for m in self._members if m.exit_code), None)
      time.sleep(_POLL_S)

  def _cause(self) -> Member:
    """Returns the process that failed first.

    A process that ended because of another one is returned only if no other
    failure is seen within `_SETTLE_S` seconds.
    """
    deadline = time.monotonic() + _SETTLE_S
    while True:
      failed = [member for member in self._members if member.exit_code]
      causes = [
        member for member in failed if member.exit_code not in _CONSEQUENCES
      ]
      have_all_failed = len(failed) == len(self._members)
      if causes or have_all_failed or time.monotonic() > deadline:
        return (causes or failed)[0]
      time.sleep(_POLL_S)


def divided_cores(count: int) -> list[list[int]]:
  """Returns the cores of each process; all cores for each if there are too few.

  Args:
    count: Number of processes.
  """
  cores = _usable_cores()
  share = len(cores) // count
  if share == 0:
    return [cores] * count
  return [cores[i * share : (i + 1) * share] for i in range(count)]


def thread_limits(count: int) -> dict[str, str]:
  """Returns environment variables that limit threads to a share of the cores.

  Args:
    count: Number of processes; each has at least one thread.
  """
  threads = max(1, len(_usable_cores()) // count)
  return dict.fromkeys(("NPROC", "OMP_NUM_THREADS"), str(threads))


def limits_beside_exchange(count: int, xla_flags: str = "") -> dict[str, str]:
  """Returns limits for processes that exchange while they compute.

  A process needs two of XLA's threads, because a program that waits for a link
  holds one. With one core a process the second must not share its matrix
  products, which would only wait for each other.

  Args:
    count: Number of processes.
    xla_flags: Value of XLA_FLAGS so far.
  """
  own = thread_limits(count)
  if own["NPROC"] != "1":
    return own
  flags = f"{xla_flags} --xla_cpu_multi_thread_eigen=false".strip()
  return dict.fromkeys(own, "2") | {"XLA_FLAGS": flags}


def pin(process_id: int, own: list[int]) -> None:
  """Binds a process to its cores, if the system can.

  Args:
    process_id: Id of a process that has just started. Threads that it already
      has are not bound.
    own: Cores of the process.
  """
  if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(process_id, own)


def _usable_cores() -> list[int]:
  """Returns the cores that this process may use, which may not be all."""
  if hasattr(os, "sched_getaffinity"):
    return sorted(os.sched_getaffinity(0))
  return list(range(os.cpu_count() or 1))
