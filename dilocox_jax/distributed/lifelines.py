"""Ends this process when another process of its run has died or is frozen.

JAX's runtime aborts a process as soon as its connection to process 0 breaks,
and prints a C++ trace. So that a process can end with a clear message instead,
every process but process 0 has a *relay*: threads that forward bytes between
JAX's client and process 0:

  JAX's client  <->  relay (127.0.0.1)  <->  JAX's service in process 0

If process 0 dies, the relay sees it, and JAX's client sees nothing. The relay
then calls a function that ends the process.

Process 0 learns that another process has died by its *lifelines*, the
connections on which the processes have greeted it (`rendezvous`). A process
that leaves the run says goodbye on its lifeline.

A frozen process keeps its connections open. The others notice it by its
silence: a frozen process 0 does not answer the heartbeats of JAX's clients, and
any other frozen process sends no signs of life on its lifeline.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping

from dilocox_jax.distributed import addresses
from dilocox_jax.threads import in_thread

# JAX's service aborts all processes if one of them has sent no heartbeat for
# this long. JAX's client sends one in half of this time, and aborts its process
# if the answer takes as long again.
HEARTBEAT_TIMEOUT_S = 90

_GOODBYE = b"bye\n"
_ALIVE = b"."
_ALIVE_S = 5.0  # Time between two signs of life.
# A process counts as frozen if it has sent no sign of life for this long.
_FROZEN_S = 30.0
# The same for process 0, which answers at least every 45 s.
_MAIN_FROZEN_S = 60.0
# The relay waits for process 0 in this many short waits. If this process itself
# stands still, it cannot forward heartbeats, and only one wait passes.
_NUM_WAITS = 12
_CONNECT_S = 5.0
_MOST_BYTES = 2**20  # Read at once by a relay.
# How long to wait before `on_lost` is called. In this time the process may end
# with a message of its own: its work may fail because of the loss, or it may
# have been asked to stop.
_OWN_WORDS_S = 1.0
# The other machine counts as gone if it has answered nothing for 25 s. The
# first three options are for a connection on which nothing was sent. Bytes that
# were sent and not confirmed turn them off, and the last one (ms) counts.
_UNANSWERED = {
  "TCP_KEEPIDLE": 10,
  "TCP_KEEPINTVL": 5,
  "TCP_KEEPCNT": 3,
  "TCP_USER_TIMEOUT": 25_000,
}


class Lifelines:
  """Notices by open connections that another process of the run has gone.

  A process that leaves the run says goodbye first, and does not count as gone.
  """

  def __init__(self, on_lost: Callable[[], None]):
    """Watches nothing yet.

    Args:
      on_lost: Called in a thread when another process has gone. It should end
        this process.
    """
    self._on_lost = on_lost
    self._lock = threading.Lock()  # Held while `on_lost` runs.
    self._is_watching = False
    self._connections: list[socket.socket] = []

  def watch(self, connections: Mapping[int, socket.socket]) -> None:
    """Starts to watch open connections to other processes.

    Another process counts as gone if its connection ends without a goodbye. In
    process 0 it also counts as gone if it sends no sign of life for 30 s. The
    other processes send process 0 a sign of life every 5 s from now on.

    Args:
      connections: Open connections by the number of the other process.
    """
    self._is_watching = True
    for number, connection in connections.items():
      # Process 0 is watched by the relay. Its service answers even while its
      # interpreter is busy.
      connection.settimeout(_FROZEN_S if number else None)
      _end_if_unanswered(connection)
      self._connections.append(connection)
      in_thread(self._watch_one, connection)
      if number == 0:
        in_thread(self._show_life, connection)

  def relay(self, coordinator: str) -> str:
    """Starts a relay: threads that forward bytes to process 0 and back.

    After `watch` was called, process 0 counts as gone in two cases: one of the
    relay's connections ends, or process 0 sends nothing for 60 s.

    Args:
      coordinator: Address of JAX's service in process 0, host:port.

    Returns:
      Address of the relay, host:port, to which JAX's client connects instead.
    """
    server = socket.create_server(("127.0.0.1", 0))
    in_thread(self._accept, server, coordinator)
    host, port = server.getsockname()
    return f"{host}:{port}"

  def leave(self) -> None:
    """Says goodbye to the other processes, and stops watching them."""
    with self._lock:
      was_watching = self._is_watching
      self._is_watching = False
    if not was_watching:
      return
    for connection in self._connections:
      with contextlib.suppress(OSError):  # The other process may have gone.
        connection.sendall(_GOODBYE)

  def _watch_one(self, connection: socket.socket) -> None:
    """Calls `on_lost` if a connection ends, or is silent beyond its timeout.

    It does not call `on_lost` if the other process says goodbye.
    """
    text = b""
    with contextlib.suppress(OSError):  # A `TimeoutError` is one, too.
      while text != _GOODBYE:
        new_bytes = connection.recv(len(_GOODBYE) - len(text))
        if not new_bytes:
          break
        # Signs of life come before the goodbye, and are dropped.
        text += new_bytes.replace(_ALIVE, b"")
    connection.close()
    if text != _GOODBYE:
      self._lost()

  def _show_life(self, connection: socket.socket) -> None:
    """Sends signs of life to process 0, until it or this process leaves."""
    with contextlib.suppress(OSError):  # `_watch_one` sees that it has gone.
      while True:
        with self._lock:
          if not self._is_watching:
            return
          connection.sendall(_ALIVE)
        time.sleep(_ALIVE_S)

  def _lost(self) -> None:
    """Calls `on_lost` after a second, unless this process leaves the run."""
    time.sleep(_OWN_WORDS_S)
    with self._lock:
      if self._is_watching:
        self._on_lost()

  def _accept(self, server: socket.socket, coordinator: str) -> None:
    """Runs the relay: connects each connection of JAX's client to process 0.

    `server` listens for JAX's client, and `coordinator` is process 0's address.
    """
    while True:
      inner, _ = server.accept()
      try:
        outer = addresses.connect(addresses.look_up(coordinator), _CONNECT_S)
      except OSError:
        inner.close()  # JAX's client tries again.
        continue
      outer.settimeout(_MAIN_FROZEN_S)
      for connection in (inner, outer):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
      _end_if_unanswered(outer)
      for forward in (self._forward_to_main, self._forward_from_main):
        in_thread(forward, inner, outer)

  def _forward_to_main(
    self, inner: socket.socket, outer: socket.socket
  ) -> None:
    """Forwards bytes of JAX's client (`inner`) to process 0 (`outer`)."""
    if _forward(inner, outer, self._is_silence_fine):
      with contextlib.suppress(OSError):
        outer.shutdown(socket.SHUT_RDWR)
      inner.close()
    # Else process 0 is gone, of which `_forward_from_main` takes care.

  def _forward_from_main(
    self, inner: socket.socket, outer: socket.socket
  ) -> None:
    """Forwards bytes of process 0 (`outer`) to JAX's client (`inner`).

    If one of the two connections ends during the run, or if process 0 is silent
    for too long, `on_lost` is called.
    """
    _forward(outer, inner, self._is_silence_fine)
    if self._is_watching:
      # JAX's client would abort this process as soon as it saw the loss. So its
      # connection is closed only afterwards.
      self._lost()
    with contextlib.suppress(OSError):
      inner.shutdown(socket.SHUT_RDWR)
    outer.close()

  def _is_silence_fine(self) -> bool:
    """Whether process 0 may be silent: before the run, and at its end."""
    return not self._is_watching


def _forward(
  source: socket.socket,
  target: socket.socket,
  is_silence_fine: Callable[[], bool],
) -> bool:
  """Forwards bytes from one connection to another until one of them ends.

  A source that has a timeout counts as ended if it has sent nothing for this
  time while `is_silence_fine` returned False.

  Returns:
    True if the source has ended, and False if the target has.
  """
  buffer = memoryview(bytearray(_MOST_BYTES))
  timeout_s = source.gettimeout()
  wait_s = None if timeout_s is None else timeout_s / _NUM_WAITS
  num_silent = 0  # Waits without a byte since the last byte.
  with selectors.DefaultSelector() as selector:
    selector.register(source, selectors.EVENT_READ)
    while True:
      if not selector.select(wait_s):
        num_silent = 0 if is_silence_fine() else num_silent + 1
        if num_silent == _NUM_WAITS:
          return True
        continue
      num_silent = 0
      try:
        size = source.recv_into(buffer)
      except OSError:
        return True
      if not size:
        return True
      try:
        target.sendall(buffer[:size])
      except OSError:
        return False


def _end_if_unanswered(connection: socket.socket) -> None:
  """Lets the operating system end a connection whose other end is gone."""
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  for name, value in _UNANSWERED.items():
    option = getattr(socket, name, None)  # Not all systems have them.
    if option is not None:
      connection.setsockopt(socket.IPPROTO_TCP, option, value)
