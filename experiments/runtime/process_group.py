"""Processes that end together: all with success, or all because one failed.

The first process owns the terminal. Warnings of the others are shown with
their number, and not at all once a process has failed: what a runtime prints
when other processes go would hide the one line that says which went first.
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
# When a consequence is seen first, its cause may need so long to show: the
# process that knows it waits for the others before it ends
# (`coordinator_store.wait_for_end`).
_SETTLE_S = 7.0
_END_S = 5.0
_STOP_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # Saved and stopped.


@dataclasses.dataclass(frozen=True)
class Failure:
  """Why a group ended.

  Attributes:
    reason: Which process failed, and how; one line.
    exit_code: As a shell would have it.
    is_from_outside: Whether the process itself did nothing wrong.
    is_stop: Whether it saved and stopped because a signal asked it to.
  """

  reason: str
  exit_code: int
  is_from_outside: bool = False
  is_stop: bool = False


class Member:
  """One process of a group."""

  def __init__(
    self,
    number: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    keep_open: Sequence[int] = (),
  ):
    """Describes the process; `start` starts it.

    Args:
      number: Number of the process, from 0.
      command: Command line.
      environment: All of its environment variables.
      keep_open: File descriptors that it inherits.
    """
    self.number, self._command = number, list(command)
    self._environment, self._keep_open = dict(environment), keep_open
    self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    self._last: collections.deque[str] = collections.deque(maxlen=50)
    self._reader: threading.Thread | None = None

  def start(self) -> None:
    """Starts the process; only the first one has the terminal."""
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
    with stream:
      for line in stream:
        self._lines.put(line.rstrip("\n"))

  def new_lines(self) -> list[str]:
    """Returns the lines of standard error since the last call."""
    lines = [self._lines.get() for _ in range(self._lines.qsize())]
    self._last.extend(lines)
    return lines

  @property
  def exit_code(self) -> int | None:
    """Exit code as `subprocess` has it; None while the process runs."""
    return self._process.poll()

  @property
  def is_consequence(self) -> bool:
    """Whether the process only ended because another one did."""
    return self.exit_code in (TRY_AGAIN, -signal.SIGABRT)

  def failure(self) -> Failure:
    """Returns why the process failed, after it did."""
    self.new_lines()
    name, code = f"process {self.number}", self._process.returncode
    if code == -signal.SIGABRT:
      lost = f"{name} was aborted, as when another does not answer any more"
      return Failure(lost, 128 - code, True)
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
    """Prints the last lines, unless one of them is an error line."""
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
  """Processes of one run."""

  def __init__(self, members: Sequence[Member]):
    """Takes processes that are not started yet."""
    self._members = members
    self._started: list[Member] = []

  def send_signal(self, number: int) -> None:
    """Passes a signal on to all processes that run."""
    for member in self._started:
      member.send_signal(number)

  def run(self) -> Failure | None:
    """Runs all processes to their end.

    No process outlives this call, however it is left.

    Returns:
      None, or why they ended before.
    """
    try:
      for member in self._members:
        member.start()
        self._started.append(member)
      failed = self._first_failed()
    finally:
      # SIGTERM would ask for a save, which needs the process that is gone.
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
    """Waits until all have ended well, or one has not."""
    while True:
      lines = [member.new_lines() for member in self._members]
      codes = [member.exit_code for member in self._members]
      # One that stopped as asked may be done before the one that writes is.
      if any(code and code not in _STOP_CODES for code in codes):
        return self._cause()
      for member, new_lines in zip(self._members, lines, strict=True):
        member.show(new_lines)
      if None not in codes:
        return next((m for m in self._members if m.exit_code), None)
      time.sleep(_POLL_S)

  def _cause(self) -> Member:
    """Returns the process that failed by itself; else any that failed."""
    give_up = time.monotonic() + _SETTLE_S
    while True:
      failed = [member for member in self._members if member.exit_code]
      causes = [member for member in failed if not member.is_consequence]
      is_over = len(failed) == len(self._members)
      if causes or is_over or time.monotonic() > give_up:
        return (causes or failed)[0]
      time.sleep(_POLL_S)
