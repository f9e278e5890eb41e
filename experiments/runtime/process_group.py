"""Runs a group of processes that end together.

Either all processes succeed, or all are ended: because one of them failed, or
because the program that started them was killed.

Only process 0 writes to the terminal directly. The warnings of the other
processes go to files, and this program shows them with the number of the
process. Once a process has failed, it shows no more warnings: JAX prints many
lines in the other processes then, which would hide the line that says which
process failed first.

Processes that run side by side share the cores of this machine. XLA starts one
thread for each core, and two processes with two threads each on two cores
mostly wait for each other: training `tiny` twice at once is nearly twice as
fast if each process has one core (measured).
"""

import collections
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.runtime import stop_signals
from experiments.runtime.command_line import (
  COMMAND_VARIABLE,
  STOP_CODES,
  TRY_AGAIN,
  StoppedError,
  typed_command,
)
from experiments.runtime.ends_with_parent import ending_with_this_process

_POLL_S = 0.1  # Time between two looks at the processes (seconds).
# The first process that ends may have ended only because another one failed.
# The failed process waits for the others before it ends
# (`coordinator_store.wait_for_end`), so it may end this many seconds later.
_SETTLE_S = 7.0
# A process that ends like this may have ended only because another one did.
_CONSEQUENCES = (TRY_AGAIN, -signal.SIGABRT)


class Failure(NamedTuple):
  """The reason for which a group of processes ended.

  Attributes:
    reason: One line that says which process failed, and how.
    exit_code: Exit code of the process as a shell reports it, e.g. 137 after
      SIGKILL.
    is_from_outside: Whether something outside the process ended it, such as a
      signal or the end of another process.
    is_stop: Whether the process saved its state and stopped because a signal
      asked it to.
  """

  reason: str
  exit_code: int
  is_from_outside: bool
  is_stop: bool


class Member:
  """One process of a group.

  Attributes:
    number: Number of the process, from 0.
    errors: File that gets the standard error of the process. It stays empty for
      process 0, which writes to the terminal.
    last: Last 50 lines of the file that were read.
  """

  def __init__(
    self,
    number: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    keep_open: Sequence[int] = (),
  ):
    """Stores what is needed to start the process. Nothing is started yet.

    Args:
      number: Number of the process, from 0.
      command: Command line, one string for each argument.
      environment: All environment variables of the process.
      keep_open: File descriptors that the process inherits.
    """
    self.number = number
    self.errors = tempfile.TemporaryFile()
    self.last: collections.deque[str] = collections.deque(maxlen=50)
    self._command = list(command)
    self._environment = dict(environment)
    self._keep_open = keep_open
    self._process: subprocess.Popen[bytes] | None = None
    self._num_bytes_read = 0

  def start(self) -> None:
    """Starts the process.

    The process is killed if this program ends first.
    """
    hidden = self.number > 0
    self._process = subprocess.Popen(
      ending_with_this_process(self._command),
      env=self._environment,
      pass_fds=self._keep_open,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL if hidden else None,
      stderr=self.errors if hidden else None,
    )

  def new_lines(self) -> list[str]:
    """Returns the lines that the process wrote to standard error.

    Only lines since the last call are returned. A last line that may still grow
    is returned by a later call.
    """
    has_ended = self.exit_code is not None
    file = self.errors.fileno()
    num_new_bytes = os.fstat(file).st_size - self._num_bytes_read
    text = os.pread(file, num_new_bytes, self._num_bytes_read)
    if not has_ended:  # The last line may still grow.
      text = text[: text.rfind(b"\n") + 1]
    self._num_bytes_read += len(text)
    lines = text.decode(errors="replace").splitlines()
    self.last.extend(lines)
    return lines

  @property
  def exit_code(self) -> int | None:
    """Exit code as `subprocess` reports it; None while the process runs."""
    return self._process.poll() if self._process else None

  def failure(self) -> Failure:
    """Returns why the process failed. Call it only after a failure."""
    self.new_lines()
    code = self.exit_code or 0
    return Failure(
      reason=self._reason(code),
      exit_code=128 - code if code < 0 else code,
      is_from_outside=code < 0 or code == TRY_AGAIN,
      is_stop=code in STOP_CODES,
    )

  def _reason(self, code: int) -> str:
    """Returns one line that says how the process failed.

    Args:
      code: Exit code as `subprocess` reports it.
    """
    name = f"process {self.number}"
    if code == -signal.SIGABRT:
      return f"{name} was aborted, probably because another process ended"
    if code < 0:
      return f"{name} was killed by {signal.Signals(-code).name}"
    errors = self.error_lines()
    if errors:
      # The line already has the number of the process.
      return errors[-1].removeprefix("error: ")
    return f"{name} failed with exit code {code} (see above)"

  def error_lines(self) -> list[str]:
    """Returns the lines among `last` that begin with "error: "."""
    return [line for line in self.last if line.startswith("error: ")]

  def show(self, lines: Sequence[str]) -> None:
    """Prints lines on standard error with the number of the process.

    Args:
      lines: Lines of the process. Some have the number of the process in front
        already.
    """
    name = f"process {self.number}: "
    for line in lines:
      print(name + line.removeprefix(name), file=sys.stderr)

  def send_signal(self, signal_number: int) -> None:
    """Sends a signal to the process. If it does not run, nothing happens.

    Args:
      signal_number: Number of the signal.
    """
    if self._process and self.exit_code is None:
      self._process.send_signal(signal_number)

  def end(self) -> None:
    """Kills the process, and waits until it has ended.

    SIGKILL is sent, because SIGTERM would ask the process to save, and a save
    would wait for the process that has failed. If the process does not run,
    nothing happens.
    """
    self.send_signal(signal.SIGKILL)
    if self._process:
      self._process.wait()


def run(members: Sequence[Member]) -> None:
  """Runs all processes until they have ended, and passes signals on to them.

  After the first signal the processes save and stop. After a second signal they
  end at once (`stop_signals`). This program ends after all of them. If the
  processes saved and stopped, this program exits with 128 plus the number of
  the signal.

  Args:
    members: The processes in the order of their numbers.

  Raises:
    StoppedError: If a process failed. The message says which, and how.
  """

  def pass_on(number: int, _: object) -> None:
    for member in members:
      member.send_signal(number)

  with contextlib.ExitStack() as stack:
    for number in stop_signals.SIGNALS:
      stack.callback(signal.signal, number, signal.signal(number, pass_on))
    failure = run_together(members)
  if failure and failure.is_stop:
    sys.exit(failure.exit_code)  # Process 0 has printed its last step.
  if failure:
    hint = "all other processes were ended"
    if failure.is_from_outside:
      hint += ", and the same command continues the run"
    raise StoppedError(f"{failure.reason}; {hint}", failure.exit_code)


def run_together(members: Sequence[Member]) -> Failure | None:
  """Starts all processes, and waits until all have succeeded or one failed.

  If one failed, all others are killed. No process runs any longer when this
  call ends, even if it raises.

  Args:
    members: The processes in the order of their numbers.

  Returns:
    Why the processes failed; None if all succeeded.
  """
  with contextlib.ExitStack() as files:
    for member in members:
      files.enter_context(member.errors)
    try:
      for member in members:
        member.start()
      failed = _first_failed(members)
    finally:
      for member in members:
        member.end()
    if failed is None:
      return None
    failure = failed.failure()
    if not failed.error_lines():  # A traceback.
      failed.show(list(failed.last))
    return failure


def _first_failed(members: Sequence[Member]) -> Member | None:
  """Waits until all processes have succeeded or one has failed.

  Args:
    members: All processes.

  Returns:
    The process that failed or stopped, or None if all have succeeded.
  """
  while True:
    # Lines are read before exit codes, so that the lines that a process wrote
    # just before it failed are not shown.
    lines = [member.new_lines() for member in members]
    codes = [member.exit_code for member in members]
    # A process that was asked to stop may end before the process that writes
    # the checkpoint. So its exit code does not end the others.
    if any(code and code not in STOP_CODES for code in codes):
      return _cause(members)
    for member, new_lines in zip(members, lines, strict=True):
      member.show(new_lines)
    if None not in codes:
      for member in members:
        member.show(member.new_lines())
      return next((m for m in members if m.exit_code), None)
    time.sleep(_POLL_S)


def _cause(members: Sequence[Member]) -> Member:
  """Returns the process that failed first, after at least one has failed.

  A process that may have ended only because another one failed is returned only
  if no other failure is seen within `_SETTLE_S` seconds.

  Args:
    members: All processes.
  """
  deadline = time.monotonic() + _SETTLE_S
  while True:
    failed = [member for member in members if member.exit_code]
    causes = [m for m in failed if m.exit_code not in _CONSEQUENCES]
    have_all_failed = len(failed) == len(members)
    if causes or have_all_failed or time.monotonic() > deadline:
      return (causes or failed)[0]
    time.sleep(_POLL_S)


def thread_limits(count: int) -> dict[str, str]:
  """Returns environment variables that limit the resources of a process.

  They give each process its share of the cores. If there are several processes,
  they also keep JAX from reserving most of a GPU's memory at its start.

  Args:
    count: Number of processes; each has at least one thread.
  """
  threads = str(max(1, usable_cores() // count))
  limits = dict.fromkeys(("NPROC", "OMP_NUM_THREADS"), threads)
  # Without this variable, each of several processes would reserve most of a
  # GPU's memory.
  return limits | {"XLA_PYTHON_CLIENT_PREALLOCATE": str(count == 1).lower()}


def environment(count: int) -> dict[str, str]:
  """Returns the environment of CPU processes that exchange while they compute.

  A process needs two of XLA's threads, because a program that waits for a link
  holds one of them. If there is only one core for each process, a matrix
  product must not be divided between both threads: the halves would wait for
  each other. If the user has set NPROC, the threads stay as they are.

  Args:
    count: Number of processes.
  """
  variables = dict(os.environ)
  variables[COMMAND_VARIABLE] = typed_command()
  variables["JAX_PLATFORMS"] = "cpu"
  if "NPROC" in os.environ:  # The user has set the threads.
    return variables
  variables |= thread_limits(count)
  if variables["NPROC"] == "1":
    variables["NPROC"] = "2"
    variables["OMP_NUM_THREADS"] = "2"
    user_flags = os.environ.get("XLA_FLAGS", "")
    flags = f"{user_flags} --xla_cpu_multi_thread_eigen=false"
    variables["XLA_FLAGS"] = flags.strip()
  return variables


def usable_cores() -> int:
  """Returns the number of cores that this process may use.

  It may be less than the number of cores of the machine.
  """
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
