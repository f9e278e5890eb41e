"""Runs a group of processes that end together.

Either all processes end with success, or one fails and the others are killed.

The first process writes to the terminal. What the other processes write to
standard error is shown with the number of the process. Once a process has
failed, it is not shown any more: when a process is lost, the runtimes of the
others print long errors, which would hide the line that says which process
failed first.
"""

import collections
import dataclasses
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from experiments.runtime.command_line import TRY_AGAIN

_POLL_S = 0.1
# A process may fail only because another one did. The process that failed by
# itself can end up to this many seconds later, since it waits for the others
# before it ends (`coordinator_store.wait_for_end`).
_SETTLE_S = 7.0
_END_S = 5.0
# Exit codes of a process that saved and stopped because of a signal.
_STOP_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclasses.dataclass(frozen=True)
class Failure:
  """The reason why a group of processes ended.

  Attributes:
    reason: One line that says which process failed, and how.
    exit_code: Exit code as a shell reports it, 128 + number for a signal.
    is_from_outside: Whether the cause lies outside the process, e.g. it was
      killed.
    is_stop: Whether the process saved and stopped because a signal asked it to.
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
      command: Command line of the process.
      environment: All environment variables of the process.
      keep_open: File descriptors that the process inherits.
    """
    self.number, self._command = number, list(command)
    self._environment, self._keep_open = dict(environment), keep_open
    self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    self._last: collections.deque[str] = collections.deque(maxlen=50)
    self._reader: threading.Thread | None = None

  def start(self) -> None:
    """Starts the process. Only process 0 writes to the terminal directly."""
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
    """Returns the lines of standard error that came since the last call."""
    lines = [self._lines.get() for _ in range(self._lines.qsize())]
    self._last.extend(lines)
    return lines

  @property
  def exit_code(self) -> int | None:
    """Exit code as `subprocess` reports it; None while the process runs."""
    return self._process.poll()

  @property
  def is_consequence(self) -> bool:
    """Whether the process only ended because another one did."""
    return self.exit_code in (TRY_AGAIN, -signal.SIGABRT)

  def failure(self) -> Failure:
    """Returns why the process failed. It must have ended."""
    self.new_lines()
    name, code = f"process {self.number}", self._process.returncode
    if code == -signal.SIGABRT:
      aborted = (
        f"{name} was aborted, perhaps because another process did not answer"
      )
      return Failure(aborted, 128 - code, True)
    if code < 0:
      killed = f"{name} was killed by {signal.Signals(-code).name}"
      return Failure(killed, 128 - code, True)
    errors = [line for line in self._last if line.startswith("error: ")]
    reason = f"{name} failed with exit code {code} (see above)"
    if errors:  # The line already has the number of the process.
      reason = errors[-1].removeprefix("error: ")
    return Failure(reason, code, code == TRY_AGAIN, code in _STOP_CODES)

  def show(self, lines: Sequence[str]) -> None:
    """Prints lines on standard error with the number of the process."""
    name = f"process {self.number}: "
    for line in lines:
      print(name + line.removeprefix(name), file=sys.stderr)

  def show_traceback(self) -> None:
    """Prints the last lines of the process, unless one of them is an error."""
    if not any(line.startswith("error: ") for line in self._last):
      self.show(list(self._last))

  def send_signal(self, number: int) -> None:
    """Sends a signal to the process, if it has not ended."""
    if self.exit_code is None:
      self._process.send_signal(number)

  def kill(self) -> None:
    """Ends the process at once, if it has not ended."""
    self.send_signal(signal.SIGKILL)

  def wait(self) -> None:
    """Waits for the end of the process and its last lines."""
    self._process.wait()
    if self._reader:
      self._reader.join(_END_S)


class Group:
  """The processes of one run."""

  def __init__(self, members: Sequence[Member]):
    """Takes the processes, which must not be started yet."""
    self._members = members
    self._started: list[Member] = []

  def send_signal(self, number: int) -> None:
    """Passes a signal on to all processes that run."""
    for member in self._started:
      member.send_signal(number)

  def run(self) -> Failure | None:
    """Runs all processes to their end.

    When this call returns or raises, no process of the group runs any more.

    Returns:
      None if all processes ended with success, else the failure of the process
      that failed first.
    """
    try:
      for member in self._members:
        member.start()
        self._started.append(member)
      failed = self._first_failed()
    finally:
      # SIGTERM would ask for a save. A save needs all processes, and one of
      # them may have ended already.
      for member in self._started:
        member.kill()
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
    """Waits until all processes have ended with success, or one has failed."""
    while True:
      lines = [member.new_lines() for member in self._members]
      codes = [member.exit_code for member in self._members]
      # A process that saved and stopped may end before process 0, which still
      # writes the checkpoint. So its exit code does not end the group.
      if any(code and code not in _STOP_CODES for code in codes):
        return self._cause()
      for member, new_lines in zip(self._members, lines, strict=True):
        member.show(new_lines)
      if None not in codes:
        return next((m for m in self._members if m.exit_code), None)
      time.sleep(_POLL_S)

  def _cause(self) -> Member:
    """Returns the process that failed by itself, or else any that failed."""
    give_up = time.monotonic() + _SETTLE_S
    while True:
      failed = [member for member in self._members if member.exit_code]
      causes = [member for member in failed if not member.is_consequence]
      is_over = len(failed) == len(self._members)
      if causes or is_over or time.monotonic() > give_up:
        return (causes or failed)[0]
      time.sleep(_POLL_S)
