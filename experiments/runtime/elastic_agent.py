"""Starts the process of a replica anew whenever the group of a run changes.

The agent keeps a connection to `experiments.rendezvous`, which says when to
start a process, and as which one of how many. A lost connection means a lost
replica. So the agent's process must not outlive the agent, and the kernel ends
it (Linux only; elsewhere it goes on until its group ends).
"""

import asyncio
import ctypes
import functools
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from experiments.runtime.command_line import (
  SavedAndStoppedError,
  StoppedError,
  UsageError,
)
from experiments.runtime.rendezvous_rules import Order

_CONNECT_S = 120  # The rendezvous may be started after the agents.
_MOST_KILLED = 5  # A process that runs out of memory would be killed for ever.
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2).


def attend(address: str, command: Callable[[Order], Sequence[str]]) -> None:
  """Takes part in the groups of a run until it has ended.

  Args:
    address: Of the rendezvous, HOST:PORT.
    command: Command line of this replica's process, for an order to start.

  Raises:
    UsageError: If nothing answers at the address.
    StoppedError: If the run cannot go on.
    SavedAndStoppedError: If a signal stopped the run, or this replica.
  """
  host, separator, port = address.rpartition(":")
  if not (separator and port.isdecimal()):
    raise UsageError(f"--elastic={address} has no port: give HOST:PORT")
  asyncio.run(_Agent(command).attend(host, int(port)))


class _Agent:
  """One agent, its connection and its process."""

  def __init__(self, command: Callable[[Order], Sequence[str]]):
    self._command = command
    self._process: asyncio.subprocess.Process | None = None
    self._report: asyncio.Task[None] | None = None
    self._signal = self._num_killed = 0
    self._is_stopping = False

  async def attend(self, host: str, port: int) -> None:
    """Obeys the rendezvous until the run or the connection ends."""
    reader, self._writer = await _connect(host, port)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
      loop.add_signal_handler(number, self._leave, number)
    self._wait(None)
    while line := await _line(reader):
      order = Order(**json.loads(line))
      if order.kind == "end":
        await self._end(order.code)
        return
      await self._obey(order)
    code = await self._ended()
    if self._signal:
      raise SavedAndStoppedError("this replica left the run", self._signal)
    if self._num_killed == _MOST_KILLED:
      raise StoppedError(
        f"this replica's process was killed {_MOST_KILLED} times in a row: "
        "look for what did so, such as too little memory"
      )
    if code != 0:
      raise StoppedError(
        f"the rendezvous at {host}:{port} is gone: start it again, then this "
        "command",
        75,
      )

  async def _obey(self, order: Order) -> None:
    if order.kind == "start":
      logging.getLogger(__name__).info(
        "group of %d: this is process %d", order.count, order.rank
      )
      self._process = await asyncio.create_subprocess_exec(
        *self._command(order),
        preexec_fn=functools.partial(_end_with_parent, os.getpid())
        if sys.platform == "linux"
        else None,
      )
      self._is_stopping = False
      self._report = asyncio.create_task(self._report_end(self._process))
    elif order.kind == "stop":
      self._stop(signal.SIGTERM)
    else:
      self._send(signal.SIGKILL)

  async def _report_end(self, process: asyncio.subprocess.Process) -> None:
    """Waits again when the process has ended, unless this replica leaves."""
    code = await process.wait()
    was_killed = code < 0 and code != -signal.SIGABRT
    self._num_killed = (self._num_killed + 1) * was_killed
    if self._signal or self._num_killed == _MOST_KILLED:
      self._writer.close()
    else:
      self._wait(code)

  def _wait(self, code: int | None) -> None:
    """Says that this replica waits for a group."""
    host = self._writer.get_extra_info("sockname")[0]
    message = {"address": f"{host}:{_free_port(host)}", "code": code}
    self._writer.write(json.dumps(message).encode() + b"\n")

  def _leave(self, number: int) -> None:
    """Passes a signal on, and leaves the run when the process has ended."""
    if self._signal:
      self._send(number)
    else:
      self._stop(number)
    self._signal = number
    if self._process is None or self._process.returncode is not None:
      self._writer.close()

  def _stop(self, number: int) -> None:
    """Asks the process once to stop; a second signal would end it unsaved."""
    if not self._is_stopping:
      self._is_stopping = True
      self._send(number)

  def _send(self, number: int) -> None:
    if self._process and self._process.returncode is None:
      self._process.send_signal(number)

  async def _ended(self) -> int | None:
    """Waits for the process; returns its exit code, None if there was none."""
    if self._process and self._report:
      await self._report
      return self._process.returncode
    return None

  async def _end(self, code: int) -> None:
    """Ends with the run."""
    if code:
      self._stop(signal.SIGTERM)
    await self._ended()
    if code > 128:
      raise SavedAndStoppedError("the run was stopped", code - 128)
    if code:
      raise StoppedError("the run cannot go on: a process said why", code)


async def _connect(
  host: str, port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
  """Connects to the rendezvous, which may still be starting."""
  for _ in range(_CONNECT_S):
    try:
      return await asyncio.open_connection(host, port)
    except OSError as error:
      reason = error.strerror or error
      await asyncio.sleep(1)
  raise UsageError(
    f"nothing answers at --elastic={host}:{port} ({reason}): start "
    "experiments.rendezvous there"
  )


async def _line(reader: asyncio.StreamReader) -> bytes:
  """Returns the next line; empty if the connection has ended."""
  try:
    return await reader.readline()
  except ConnectionError:
    return b""


def _free_port(host: str) -> int:
  with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
    s.bind((host, 0))
    return s.getsockname()[1]


def _end_with_parent(parent: int) -> None:
  """Has the kernel kill this process when its parent ends."""
  ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
  if os.getppid() != parent:
    os._exit(1)  # The parent has ended before the call.
