"""Runs a group of processes that end together.

If one process fails, all others are killed. On Linux all are also killed if the
program that started them ends.

Process 0 writes to the terminal. Of the other processes only the standard error
is shown, with the number of the process in front of each line.
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
  """Why a group of processes ended before all of them had succeeded.

  Attributes:
    reason: One line that says which process failed, and how.
    exit_code: Exit code of the process as a shell reports it, e.g. 137 after
      SIGKILL.
    is_from_outside: Whether a signal killed the process, or it ended with exit
      code 75 (the same command may be started again).
    is_stop: Whether the process ended by itself because a signal asked it to
      stop.
  """

  reason: str
  exit_code: int
  is_from_outside: bool
  is_stop: bool


class Member:
  """One process of a group.

  Attributes:
    number: Number of the process, from 0.
    errors: File that gets the standard error of the process; unused for process
      0, which writes to the terminal.
    last: The last 50 lines that were read from `errors`.
  """

  def __init__(
    self,
    number: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    keep_open: Sequence[int] = (),
  ):
    """Stores the arguments; `start` starts the process.

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

    It is killed if this program ends first (on Linux).
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
    """Returns the lines that `errors` has got since the last call.

    While the process runs, a line without its line break is left for a later
    call.
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
    """Returns why the process failed.

    Call it only after the process has ended with an exit code other than 0.
    """
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

    `code` is the exit code as `subprocess` reports it.
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
    """Prints lines on standard error, with "process N: " in front of each.

    A line that begins so already is printed unchanged.
    """
    name = f"process {self.number}: "
    for line in lines:
      print(name + line.removeprefix(name), file=sys.stderr)

  def send_signal(self, signal_number: int) -> None:
    """Sends the process a signal, if it runs."""
    if self._process and self.exit_code is None:
      self._process.send_signal(signal_number)

  def end(self) -> None:
    """Kills the process if it runs, and waits until it has ended."""
    # After SIGTERM the process would save, and a save would wait for the
    # process that has failed.
    self.send_signal(signal.SIGKILL)
    if self._process:
      self._process.wait()


def run(members: Sequence[Member]) -> None:
  """Runs all processes until they have ended, and passes signals on to them.

  After the first signal (Ctrl-C or SIGTERM) the processes save and stop, and
  this program exits with 128 plus the number of the signal. After a second
  signal they end at once (`stop_signals`).

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

  All processes have ended when this call ends, even if it raises: those that
  still run are killed.

  Returns:
    Why the group failed, or that a signal stopped it; None if all succeeded.
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
    if not failed.error_lines():  # It ended with a traceback.
      failed.show(list(failed.last))
    return failure


def _first_failed(members: Sequence[Member]) -> Member | None:
  """Prints lines of the processes until one has failed or all have ended.

  Returns the failed process, or else one that a signal stopped, or else None.
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
  """Returns the failed process that probably made the others fail.

  It is a failed process whose exit code is not one of `_CONSEQUENCES`. If there
  is none when all have ended, or after `_SETTLE_S` seconds, it is any failed
  process. Of several, the one with the lowest number is returned. A process
  that a signal asked to stop has not failed.
  """
  # If a process fails while others stop, the last save may not be whole. The
  # exit code of a stop would hide that.
  deadline = time.monotonic() + _SETTLE_S
  while True:
    codes = [member.exit_code for member in members]
    failed = []
    causes = []
    for member, code in zip(members, codes, strict=True):
      if not code or code in STOP_CODES:
        continue
      failed.append(member)
      if code not in _CONSEQUENCES:
        causes.append(member)
    if causes or None not in codes or time.monotonic() > deadline:
      return (causes or failed)[0]
    time.sleep(_POLL_S)


def thread_limits(count: int) -> dict[str, str]:
  """Returns environment variables that limit the threads of a process.

  Each of `count` processes gets an equal share of the cores, but at least one
  thread. If `count` is above 1, JAX does not reserve GPU memory at its start.
  """
  # XLA starts a thread for each core, and two processes with two threads each
  # on two cores mostly wait for each other: training `tiny` twice at once is
  # nearly twice as fast if each process has one core (measured).
  threads = str(max(1, usable_cores() // count))
  limits = dict.fromkeys(("NPROC", "OMP_NUM_THREADS"), threads)
  # Without this variable, each of several processes would reserve most of a
  # GPU's memory.
  return limits | {"XLA_PYTHON_CLIENT_PREALLOCATE": str(count == 1).lower()}


def environment(count: int) -> dict[str, str]:
  """Returns the environment of CPU processes that exchange while they compute.

  It is a copy of this process's environment with JAX_PLATFORMS=cpu. Each of
  `count` processes gets an equal share of the cores, but at least two threads.
  If NPROC is set already, the numbers of threads stay as they are.
  """
  variables = dict(os.environ)
  # The processes record this command instead of their own.
  variables[COMMAND_VARIABLE] = typed_command()
  variables["JAX_PLATFORMS"] = "cpu"
  if "NPROC" in os.environ:  # The user has set the threads.
    return variables
  variables |= thread_limits(count)
  # A program that waits for a link holds a thread, so a process needs two. On
  # one core they must not share a matrix product: the halves would wait for
  # each other.
  if variables["NPROC"] == "1":
    variables["NPROC"] = "2"
    variables["OMP_NUM_THREADS"] = "2"
    user_flags = os.environ.get("XLA_FLAGS", "")
    flags = f"{user_flags} --xla_cpu_multi_thread_eigen=false"
    variables["XLA_FLAGS"] = flags.strip()
  return variables


def usable_cores() -> int:
  """Returns the number of cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
