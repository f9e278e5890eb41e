"""Starts the process of a replica anew whenever the group of a run changes.

The agent keeps a connection to `experiments.rendezvous`, which says when to
start a process, and as which one of how many. A lost connection means a lost
replica. So the agent's process must not outlive the agent, and the kernel ends
it (Linux only; elsewhere it goes on until its group ends).
"""

import asyncio
import contextlib
import ctypes
import functools
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from experiments.runtime import distributed_flags
from experiments.runtime.command_line import (
  TRY_AGAIN,
  SavedAndStoppedError,
  StoppedError,
  UsageError,
  usage_errors,
)
from experiments.runtime.rendezvous_rules import Order

_CONNECT_S = 120  # The rendezvous may be started after the agents.
_MOST_KILLED = 5  # A process that runs out of memory would be killed for ever.
# A connection without an answer is given up after 10 + 3 * 5 s, also while
# something that was sent waits for its acknowledgement.
_WATCH = {
  "TCP_KEEPIDLE": 10,
  "TCP_KEEPINTVL": 5,
  "TCP_KEEPCNT": 3,
  "TCP_USER_TIMEOUT": 25_000,
}
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
  if not (separator and port.isdecimal() and int(port) < 2**16):
    raise UsageError(f"--elastic={address} has no port: give HOST:PORT")
  asyncio.run(_Agent(command).attend(host.strip("[]"), int(port)))


def watch(connection: socket.socket) -> None:
  """Has the kernel end a connection that is silent for about 25 s."""
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  for name, value in _WATCH.items():
    if hasattr(socket, name):  # Not all systems have all of them.
      option = getattr(socket, name)
      connection.setsockopt(socket.IPPROTO_TCP, option, value)


class _Agent:
  """One agent, its connection and its process."""

  def __init__(self, command: Callable[[Order], Sequence[str]]):
    self._command = command
    self._process: asyncio.subprocess.Process | None = None
    self._report: asyncio.Task[None] | None = None
    self._signal = self._num_killed = 0
    self._is_stopping = False
    self._port = contextlib.ExitStack()

  async def attend(self, host: str, port: int) -> None:
    """Obeys the rendezvous until the run or the connection ends."""
    reader, self._writer = await _connect(host, port)
    with contextlib.closing(self._writer), self._port:
      await self._take_part(reader, f"{host}:{port}")

  async def _take_part(self, reader: asyncio.StreamReader, place: str) -> None:
    """Obeys the orders of a connection, and says how it ended."""
    watch(self._writer.get_extra_info("socket"))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
      loop.add_signal_handler(number, self._leave, number)
    self._wait(None)
    while line := await _line(reader):
      with usage_errors(f"--elastic={place} is no rendezvous: "):
        order = _order(line)
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
        f"the rendezvous at {place} is gone: start it again, then this command",
        TRY_AGAIN,
      )

  async def _obey(self, order: Order) -> None:
    if order.kind == "start" and self._signal:
      return  # This replica leaves.
    if order.kind == "start":
      logging.getLogger(__name__).info(
        "group of %d: this is process %d", order.count, order.rank
      )
      self._port.close()  # The process takes it.
      self._process = await asyncio.create_subprocess_exec(
        *self._command(order),
        preexec_fn=functools.partial(_end_with_parent, os.getpid())
        if sys.platform == "linux"
        else None,
      )
      self._is_stopping = False
      self._report = asyncio.create_task(self._report_end(self._process))
      if self._signal:  # It came while the process was being made.
        self._stop(self._signal)
    elif order.kind == "stop":
      self._stop(signal.SIGTERM)
    else:
      self._is_stopping = True
      self._send(signal.SIGKILL)

  async def _report_end(self, process: asyncio.subprocess.Process) -> None:
    """Waits again when the process has ended, unless this replica leaves."""
    code = await process.wait()
    is_own_end = code >= 0 or code == -signal.SIGABRT or self._is_stopping
    self._num_killed = 0 if is_own_end else self._num_killed + 1
    if self._signal or self._num_killed == _MOST_KILLED:
      self._writer.close()
    else:
      self._wait(code)

  def _wait(self, code: int | None) -> None:
    """Says that this replica waits for a group."""
    host = self._writer.get_extra_info("sockname")[0]
    host = f"[{host}]" if ":" in host else host
    self._port.close()
    # A spare may wait for hours, and another program could take its port.
    port = self._port.enter_context(distributed_flags.reserved_port())
    address = f"{host}:{port}"
    message = {"address": address, "code": code}
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
  reason: object = "no answer"
  with contextlib.suppress(TimeoutError):
    async with asyncio.timeout(_CONNECT_S):
      while True:
        try:
          return await asyncio.open_connection(host, port)
        except (OSError, UnicodeError) as error:
          reason = getattr(error, "strerror", None) or error
          await asyncio.sleep(1)
  raise UsageError(
    f"nothing answers at --elastic={host}:{port} ({reason}): start "
    "experiments.rendezvous there"
  )


def _order(line: bytes) -> Order:
  """Reads an order; raises ValueError if the line holds none."""
  try:
    return Order(**json.loads(line))
  except TypeError as error:
    raise ValueError(error) from error


async def _line(reader: asyncio.StreamReader) -> bytes:
  """Returns the next line; empty if the connection has ended."""
  try:
    return await reader.readline()
  except OSError:
    return b""


def _end_with_parent(parent: int) -> None:
  """Has the kernel kill this process when its parent ends."""
  ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
  if os.getppid() != parent:
    os._exit(1)  # The parent has ended before the call.
