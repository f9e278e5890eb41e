"""Processes that end together: all with success, or all because one failed.

The first process owns the terminal. What the others complain of is shown with
their number, and not at all once a process has failed: what a runtime prints
when its peers go would bury the one line that says which went first.
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
# For the cause to show when a consequence was seen first: who knows it waits
# some seconds for the others before it ends (host_messages.part).
_SETTLE_S = 7.0
_END_S = 5.0


@dataclasses.dataclass(frozen=True)
class Failure:
  """Why a group ended.

  Attributes:
    reason: Which process failed, and how; one line.
    exit_code: As a shell would have it.
    is_from_outside: Whether the process itself did nothing wrong.
  """

  reason: str
  exit_code: int
  is_from_outside: bool = False


class Member:
  """One process of a group."""

  def __init__(
    self,
    number: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    keep_open: Sequence[int] = (),
  ):
    """Describes it; `start` starts it.

    Args:
      number: Which one, from 0.
      command: What to run.
      environment: Its environment, complete.
      keep_open: File descriptors that it inherits.
    """
    self.number, self._command = number, list(command)
    self._environment, self._keep_open = dict(environment), keep_open
    self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    self._last: collections.deque[str] = collections.deque(maxlen=50)
    self._reader: threading.Thread | None = None

  def start(self) -> None:
    """Starts it; only the first process has the terminal."""
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
    """What it has complained of since the last call."""
    lines = [self._lines.get() for _ in range(self._lines.qsize())]
    self._last.extend(lines)
    return lines

  @property
  def exit_code(self) -> int | None:
    """As subprocess has it; None while it runs."""
    return self._process.poll()

  @property
  def is_consequence(self) -> bool:
    """Whether it only ended because another did."""
    return self.exit_code in (TRY_AGAIN, -signal.SIGABRT)

  def failure(self) -> Failure:
    """Why it failed, after it did."""
    self.new_lines()
    name, code = f"process {self.number}", self._process.returncode
    if code == -signal.SIGABRT:
      lost = f"{name} was aborted, as when another does not answer any more"
      return Failure(lost, 128 - code, True)
    if code < 0:
      killed = f"{name} was killed by {signal.Signals(-code).name}"
      return Failure(killed, 128 - code, True)
    said = [line for line in self._last if line.startswith("error: ")]
    reason = f"{name} failed with exit code {code} (see above)"
    if said:  # Its own line already has its name.
      reason = said[-1].removeprefix("error: ")
    return Failure(reason, code, code == TRY_AGAIN)

  def show(self, lines: Sequence[str]) -> None:
    """Prints lines on standard error with the number of the process."""
    name = f"process {self.number}: "
    for line in lines:
      print(name + line.removeprefix(name), file=sys.stderr)

  def show_traceback(self) -> None:
    """Prints what it said last, where no error line sums it up."""
    if not any(line.startswith("error: ") for line in self._last):
      self.show(list(self._last))

  def end(self) -> None:
    """Ends it, if it has not ended."""
    if self.exit_code is None:
      self._process.terminate()

  def wait(self) -> None:
    """Waits for it and its last words, and kills it if that takes long."""
    try:
      self._process.wait(_END_S)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    if self._reader:
      self._reader.join(_END_S)


class Group:
  """Processes of one run."""

  def __init__(self, members: Sequence[Member]):
    """Takes processes that are not started yet."""
    self._members = members
    self._started: list[Member] = []

  def run(self) -> Failure | None:
    """Runs all to their end; None, or why they were ended before.

    No process outlives this, however it is left.
    """
    try:
      for member in self._members:
        member.start()
        self._started.append(member)
      failed = self._first_failed()
    finally:
      for member in self._started:
        member.end()
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
      heard = [(member, member.new_lines()) for member in self._members]
      if any(member.exit_code for member in self._members):
        return self._cause()
      for member, lines in heard:
        member.show(lines)
      if all(member.exit_code == 0 for member in self._members):
        return None
      time.sleep(_POLL_S)

  def _cause(self) -> Member:
    """The process that failed by itself, if it shows; else any that failed."""
    give_up = time.monotonic() + _SETTLE_S
    while True:
      failed = [member for member in self._members if member.exit_code]
      causes = [member for member in failed if not member.is_consequence]
      is_over = len(failed) == len(self._members)
      if causes or is_over or time.monotonic() > give_up:
        return (causes or failed)[0]
      time.sleep(_POLL_S)
