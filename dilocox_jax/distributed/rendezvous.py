"""Waits for all processes of a run before JAX's runtime starts.

If a process does not come in time, JAX's runtime aborts the others with a C++
trace that names no cause. So the processes first wait for each other here, at
the port at which JAX's service listens afterwards. For example, if a run has
the identifier RUN and four processes, numbered from 0:

  process 3   connects to the coordinator's address and sends its greeting,
              "dilocox_jax 1 RUN 4 3". The 1 is the version of this protocol.
  process 0   listens there and keeps the connections. It also greets itself,
              which shows that the address leads to it.
  process 0   stops listening when all have greeted, and then sends "go".
  process 3   waits until JAX's service listens at the port.

The connections stay open. If one of them ends later without a goodbye, a
process has gone (`lifelines`).

Anybody who reaches the port can send a greeting. So a greeting has a fixed form
and at most 128 bytes, and no answer repeats a part of it.
"""

import contextlib
import ipaddress
import logging
import os
import re
import selectors
import socket
import time
from collections.abc import Collection
from typing import NamedTuple

from dilocox_jax.distributed import addresses
from dilocox_jax.distributed.addresses import Endpoint

_VERSION = "dilocox_jax 1"
_GREETING = re.compile(rf"{_VERSION} ([0-9a-f]*) (\d{{1,7}}) (\d{{1,7}})\n")
_MOST_BYTES = 128  # Largest number of bytes of a greeting.
_MOST_ANSWER_BYTES = 65_536  # An answer may list a number for every process.

# The answers of process 0. Numbers follow "missing" and "other count".
_GO = "go"
_MISSING = "missing"
_OTHER_RUN = "other run"
_OTHER_COUNT = "other count"
_TAKEN = "taken"

_GREET_S = 10.0  # A connection must send its greeting within this time.
# Largest number of open connections without a greeting, in addition to one for
# each process of the run.
_MOST_STRANGERS = 64
_RESOLVE_S = 10.0  # Time to look up a name, because name servers may be slow.
_CONNECT_S = 5.0  # Time to wait for an answer of each address.
# JAX's service must listen within this time after all processes have come.
_SERVICE_S = 30.0
# Pauses between two tries to connect: each is twice as long as the one before.
_SHORTEST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_NOTICE_S = 30.0  # Time between two lines in the log about waiting.
_MOST_NAMED = 8  # A message lists at most this many missing processes.
_AGAIN = "the same command tries again"


class Process(NamedTuple):
  """Identifies one process of a run.

  Attributes:
    run: Hexadecimal text that all processes of the run have.
    count: Number of processes of the run.
    number: Number of this process, from 0.
  """

  run: str
  count: int
  number: int


def wait_for_processes(
  process: Process,
  coordinator: str,
  listening: str | None = None,
  timeout_s: float = 120.0,
) -> dict[int, socket.socket]:
  """Waits until all processes of a run are connected to process 0.

  Args:
    process: This process.
    coordinator: Address of process 0 for all processes, host:port.
    listening: Address at which process 0 listens, host:port. None: all
      addresses of its machine, with the port of `coordinator`. Only process 0
      reads this argument.
    timeout_s: Seconds to wait for all processes.

  Returns:
    In process 0, the open connections to all other processes by their numbers;
    in another process, {0: the connection to process 0}.

  Raises:
    ValueError: If an address is not HOST:PORT; if the coordinator's host is not
      known (except on Kubernetes); if process 0 cannot listen, or does not
      reach itself at `coordinator`; or if process 0 refuses this process
      (another run, another number of processes, or a process number that is
      taken).
    TimeoutError: If not all processes came in time, or process 0 has gone.
  """
  wait = _Wait(timeout_s)
  endpoints = _resolve(coordinator, wait)
  if process.number:
    connection = _greet_until_all_are_there(
      process, coordinator, endpoints, wait
    )
    return {0: connection}
  if listening is None:
    _, port = addresses.split_address(coordinator)
    listening = f"[::]:{port}"
  with _listen(listening) as server:
    reception = _Reception(process, coordinator, server)
    return reception.wait_for_all(endpoints, wait)


class _Wait:
  """A time limit, which also logs now and then what the process waits for.

  Attributes:
    timeout_s: Seconds from when the object was made to the limit.
  """

  def __init__(self, timeout_s: float):
    """Starts to count the time."""
    self.timeout_s = timeout_s
    self._end_s = time.monotonic() + timeout_s
    self._notice_s = time.monotonic() + _NOTICE_S

  @property
  def left_s(self) -> float:
    """Seconds that are left; 0 after the limit."""
    return max(0.0, self._end_s - time.monotonic())

  def tell(self, text: str) -> None:
    """Logs what the process waits for, at most twice a minute."""
    if time.monotonic() > self._notice_s:
      self._notice_s = time.monotonic() + _NOTICE_S
      logging.info("still waiting: %s", text)


def _resolve(coordinator: str, wait: _Wait) -> list[Endpoint]:
  """Returns the socket addresses of the coordinator's address.

  While the host's name is unknown, the function tries again: on Kubernetes
  until `wait` ends, elsewhere for 10 s at most.

  Raises:
    TimeoutError: If the name stays unknown on Kubernetes.
    ValueError: If it stays unknown elsewhere, or the address is not HOST:PORT.
  """
  # Kubernetes knows the name of a pod only after it has found a node for the
  # pod. So an unknown name there means that process 0 has not started yet.
  is_pod = "KUBERNETES_SERVICE_HOST" in os.environ
  if is_pod:
    name_wait = wait
  else:
    name_wait = _Wait(min(_RESOLVE_S, wait.timeout_s))
  while True:
    try:
      return addresses.look_up(coordinator)
    except OSError as error:
      host, _ = addresses.split_address(coordinator)
      reason = f"cannot resolve {host} ({error.strerror or error})"
    if not name_wait.left_s:
      break
    wait.tell(reason)
    time.sleep(min(_LONGEST_PAUSE_S, name_wait.left_s))
  if is_pod:
    raise TimeoutError(
      f"{reason}, so the pod of process 0 was not there within "
      f"{wait.timeout_s:g} s: {_AGAIN}"
    )
  raise ValueError(
    f"{reason}: give a name or an address of process 0's machine that all "
    "machines know, by --coordinator=HOST:PORT"
  )


def _listen(address: str) -> socket.socket:
  """Returns a listening socket; raises ValueError if this is not possible."""
  try:
    return addresses.listen(address)
  except OSError as error:
    raise ValueError(
      f"process 0 cannot listen at {address} ({error.strerror or error}): give "
      "an address of its machine and a free port, or name one in "
      "JAX_COORDINATOR_BIND_ADDRESS"
    ) from error


def _greeting(process: Process) -> bytes:
  """Returns the line by which a process tells process 0 who it is."""
  return f"{_VERSION} {process.run} {process.count} {process.number}\n".encode()


def _names(numbers: Collection[int], count: int) -> str:
  """Returns words for some processes of a run, at least one.

  Examples: "process 1 of 2", "processes 1 and 2 of 4". Of more than 8 processes
  it names 7, e.g. "processes 1, 2, 3, 4, 5, 6, 7 and 4 others of 12".
  """
  words = [str(number) for number in sorted(numbers)]
  if len(words) == 1:
    return f"process {words[0]} of {count}"
  if len(words) > _MOST_NAMED:
    # "N others" takes the place of the last name.
    num_others = len(words) - _MOST_NAMED + 1
    words = [*words[: _MOST_NAMED - 1], f"{num_others} others"]
  return f"processes {', '.join(words[:-1])} and {words[-1]} of {count}"


# Process 0.


class _Reception:
  """Accepts the connections of all processes, in process 0.

  Each process greets: it sends a line with its run, the number of processes and
  its own number. A connection with a wrong greeting is closed.
  """

  def __init__(self, process: Process, coordinator: str, server: socket.socket):
    """Accepts no connection yet. `coordinator` is only for error messages."""
    self._process = process
    self._coordinator = coordinator
    self._server = server
    self._present: dict[int, socket.socket] = {}
    # Connections without a whole greeting: the bytes that have come, and the
    # time by which the greeting must be whole.
    self._strangers: dict[socket.socket, tuple[bytes, float]] = {}
    self._most_strangers = process.count + _MOST_STRANGERS
    self._selector = selectors.DefaultSelector()

  def wait_for_all(
    self, endpoints: list[Endpoint], wait: _Wait
  ) -> dict[int, socket.socket]:
    """Waits until all processes have connected, and then tells them to go on.

    Returns:
      The connections to the other processes, by their numbers.

    Raises:
      ValueError: If process 0 does not reach itself at `endpoints`.
      TimeoutError: If a process did not come in time.
    """
    with contextlib.ExitStack() as stack:
      stack.callback(self._close)
      # The socket listens already. This call makes its queue longer.
      self._server.listen(self._most_strangers)
      self._server.setblocking(False)
      self._selector.register(self._server, selectors.EVENT_READ)
      stack.enter_context(self._greet_itself(endpoints))
      while self._missing() and wait.left_s:
        wait.tell(f"{self._missing_names()} did not come yet")
        self._handle_events(min(wait.left_s, _LONGEST_PAUSE_S))
      hint = self._loopback_hint()  # It reads the address of the open server.
      # Connections from now on are refused until JAX's service listens.
      self._selector.unregister(self._server)
      self._server.close()
      missing = self._missing()
      if not missing:
        self._tell_all(_GO)
        return self._released()
      numbers = ",".join(str(number) for number in sorted(missing))
      self._tell_all(f"{_MISSING} {numbers}")
      raise TimeoutError(
        f"{self._missing_names()} did not come to {self._coordinator}{hint} "
        f"within {wait.timeout_s:g} s: {_AGAIN}"
      )

  def _released(self) -> dict[int, socket.socket]:
    """Removes and returns the connections to the other processes by number."""
    released = {
      number: connection
      for number, connection in self._present.items()
      if number != self._process.number
    }
    for number in released:
      del self._present[number]
    return released

  def _loopback_hint(self) -> str:
    """Returns a hint if the coordinator's name means loopback, else ""."""
    # On Debian, a machine may resolve its own name to a loopback address, so
    # that no other machine reaches process 0.
    name, _ = addresses.split_address(self._coordinator)
    address = self._server.getsockname()[0]
    if address == name or not ipaddress.ip_address(address).is_loopback:
      return ""
    return f" (here {address}, which no other machine reaches)"

  def _close(self) -> None:
    """Closes all connections that this object still has."""
    for connection in (*self._present.values(), *self._strangers):
      connection.close()
    self._selector.close()

  def _greet_itself(self, endpoints: list[Endpoint]) -> socket.socket:
    """Connects process 0 to itself; raises ValueError if that fails."""
    try:
      connection = addresses.connect(endpoints, _CONNECT_S)
      connection.sendall(_greeting(self._process))
    except OSError as error:
      raise ValueError(
        f"process 0 does not reach itself at {self._coordinator} "
        f"({error.strerror or error}): give an address of its machine by "
        "--coordinator=HOST:PORT"
      ) from error
    return connection

  def _missing(self) -> set[int]:
    """Returns the numbers of the processes that have not come."""
    return set(range(self._process.count)) - self._present.keys()

  def _missing_names(self) -> str:
    """Returns words for the processes that have not come."""
    return _names(self._missing(), self._process.count)

  def _handle_events(self, timeout_s: float) -> None:
    """Waits for connections or bytes, and handles what has come.

    Connections that have sent no whole greeting in time are closed.
    """
    for key, _ in self._selector.select(timeout_s):
      connection = key.fileobj
      assert isinstance(connection, socket.socket)
      if connection is self._server:
        self._accept()
      elif connection in self._strangers:
        self._read_greeting(connection)
      else:
        # A process sends nothing after its greeting. So this event means that
        # the process has gone.
        self._drop(connection)
    now_s = time.monotonic()
    for connection, (_, latest_s) in list(self._strangers.items()):
      if now_s > latest_s:
        self._drop(connection)

  def _accept(self) -> None:
    """Accepts a connection, but closes it if too many have not greeted yet."""
    try:
      connection, _ = self._server.accept()
    except OSError:  # The other side has gone, or too many files are open.
      time.sleep(_SHORTEST_PAUSE_S)
      return
    if len(self._strangers) >= self._most_strangers:
      connection.close()
      return
    connection.setblocking(False)
    self._strangers[connection] = (b"", time.monotonic() + _GREET_S)
    self._selector.register(connection, selectors.EVENT_READ)

  def _drop(self, connection: socket.socket) -> None:
    """Closes a connection and forgets its process."""
    self._strangers.pop(connection, None)
    self._present = {
      number: present
      for number, present in self._present.items()
      if present is not connection
    }
    self._selector.unregister(connection)
    connection.close()

  def _read_greeting(self, connection: socket.socket) -> None:
    """Reads bytes of a connection's greeting, and checks it once complete.

    A connection that has ended, or has sent too many bytes, is dropped.
    """
    earlier_bytes, latest_s = self._strangers[connection]
    try:
      new_bytes = connection.recv(_MOST_BYTES - len(earlier_bytes))
    except OSError:
      new_bytes = b""
    text = earlier_bytes + new_bytes
    if b"\n" in new_bytes:
      self._answer(connection, text)
    elif not new_bytes or len(text) == _MOST_BYTES:
      self._drop(connection)
    else:
      self._strangers[connection] = (text, latest_s)

  def _answer(self, connection: socket.socket, text: bytes) -> None:
    """Keeps a connection whose greeting is right, and closes any other.

    A refused process is sent the reason before its connection is closed.
    """
    match = _GREETING.fullmatch(text.decode("ascii", errors="replace"))
    if not match:
      self._drop(connection)
      return
    guest = Process(match[1], int(match[2]), int(match[3]))
    refusal = self._refusal(guest)
    if refusal:
      _send(connection, refusal)
      self._drop(connection)
      return
    del self._strangers[connection]
    self._present[guest.number] = connection

  def _refusal(self, guest: Process) -> str:
    """Returns the answer for a process that is refused, else ""."""
    count = self._process.count
    if guest.run != self._process.run:
      return _OTHER_RUN
    if guest.count != count or guest.number >= count:
      return f"{_OTHER_COUNT} {count}"
    if guest.number in self._present:
      return _TAKEN
    return ""

  def _tell_all(self, answer: str) -> None:
    """Sends an answer to all processes that have come."""
    for connection in self._present.values():
      _send(connection, answer)


def _send(connection: socket.socket, answer: str) -> None:
  """Sends an answer as one line. A broken connection is ignored."""
  with contextlib.suppress(OSError):  # The process may have gone.
    connection.sendall(f"{answer}\n".encode())


# The other processes.


def _greet_until_all_are_there(
  process: Process, coordinator: str, endpoints: list[Endpoint], wait: _Wait
) -> socket.socket:
  """Connects to process 0, again and again, until all processes are there.

  Raises:
    ValueError: If process 0 refuses this process.
    TimeoutError: If a process did not come in time.
  """
  pause_s = _SHORTEST_PAUSE_S
  reason = ""
  while wait.left_s:
    try:
      connection = addresses.connect(endpoints, min(wait.left_s, _CONNECT_S))
    except OSError as error:
      cause = error.strerror or error
      reason = f"process 0 does not answer at {coordinator} ({cause})"
    else:
      with contextlib.ExitStack() as stack:
        stack.enter_context(connection)
        answer = _greet(connection, process, wait)
        if answer == _GO:
          _wait_for_service(coordinator, endpoints)
          stack.pop_all()  # The connection stays open.
          return connection
      _raise_refusal(answer, process, coordinator)
      # There was no answer.
      reason = (
        f"{coordinator} ended the connection: process 0 has gone, or another "
        "program listens there"
      )
      if not wait.left_s:  # `_greet` has waited until the limit.
        reason = f"process 0 is at {coordinator}, but not all others came"
    wait.tell(reason)
    time.sleep(min(pause_s, wait.left_s))
    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    # Process 0 may be started again on another machine.
    with contextlib.suppress(OSError):
      endpoints = addresses.look_up(coordinator)
  raise TimeoutError(f"{reason}; gave up after {wait.timeout_s:g} s: {_AGAIN}")


def _greet(connection: socket.socket, process: Process, wait: _Wait) -> str:
  """Tells process 0 which process this is, and returns the answer.

  The answer is "go" if all processes are there, else the reason for a refusal.
  The function returns "" if no answer came before the limit, or if the
  connection broke.
  """
  text = b""
  try:
    connection.sendall(_greeting(process))
    while b"\n" not in text and len(text) < _MOST_ANSWER_BYTES:
      if not wait.left_s:
        return ""
      connection.settimeout(min(wait.left_s, _NOTICE_S))
      try:
        new_bytes = connection.recv(4096)
      except TimeoutError:
        wait.tell("process 0 is there, but not all others are")
        continue
      if not new_bytes:
        return ""
      text += new_bytes
  except OSError:  # The connection broke.
    return ""
  return text.partition(b"\n")[0].decode("ascii", errors="replace")


def _raise_refusal(answer: str, process: Process, coordinator: str) -> None:
  """Raises ValueError if process 0's answer is a refusal.

  It raises TimeoutError if the answer is that a process did not come in time.
  """
  if answer == _OTHER_RUN:
    raise ValueError(
      f"process 0 at {coordinator} has another config, or is of another run: "
      "start all with the same flags, on the same files"
    )
  if answer == _TAKEN:
    raise ValueError(
      f"another process came to {coordinator} as process {process.number}: "
      "give each another --process_id"
    )
  other_count = re.fullmatch(rf"{_OTHER_COUNT} (\d{{1,7}})", answer)
  if other_count:
    raise ValueError(
      f"process 0 at {coordinator} waits for {other_count[1]} processes, and "
      f"this is process {process.number} of {process.count}: start all with "
      "the same --num_processes"
    )
  missing = re.fullmatch(rf"{_MISSING} (\d{{1,7}}(?:,\d{{1,7}})*)", answer)
  if missing:
    numbers = [int(number) for number in missing[1].split(",")]
    raise TimeoutError(
      f"{_names(numbers, process.count)} did not come to {coordinator} in "
      f"time: {_AGAIN}"
    )


def _wait_for_service(coordinator: str, endpoints: list[Endpoint]) -> None:
  """Waits up to 30 s until JAX's service listens at the coordinator's address.

  Raises:
    TimeoutError: If the service does not listen in time.
  """
  # JAX would abort this process if it called before the service listens.
  wait = _Wait(_SERVICE_S)
  while wait.left_s:
    try:
      addresses.connect(endpoints, min(wait.left_s, _CONNECT_S)).close()
    except OSError:
      time.sleep(_SHORTEST_PAUSE_S)
    else:
      return
  raise TimeoutError(f"process 0 was at {coordinator} and has gone: {_AGAIN}")
