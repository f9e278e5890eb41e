"""The first SIGTERM or Ctrl-C asks a run to save and stop; the second ends it.

Python runs signal handlers in the main thread between two instructions, and
that thread may wait for the devices for minutes. So the number of a signal is
written to a pipe as soon as it comes (`signal.set_wakeup_fd`), and a thread
that waits at the other end acts on it at once.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Ctrl-C reaches the launcher and its processes, and the launcher passes it on;
# a scheduler may do likewise. Signals within this many seconds count as one.
_SAME_REQUEST_S = 1.0


@contextlib.contextmanager
def stop_requests(request_stop: Callable[[int], None]) -> Iterator[None]:
  """Turns the first SIGTERM or Ctrl-C inside the block into a call.

  A second signal ends the process at once, with exit code 128 + the number of
  that signal. In any other thread than the main thread nothing changes.

  Args:
    request_stop: Function (number of the signal), which is called in another
      thread.
  """
  if threading.current_thread() is not threading.main_thread():
    yield  # Only the main thread may handle signals.
    return
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  old_handlers = {s: signal.signal(s, lambda *_: None) for s in SIGNALS}
  old_writer = signal.set_wakeup_fd(writer)
  thread = threading.Thread(
    target=_watch, args=(reader, request_stop), daemon=True
  )
  thread.start()
  try:
    yield
  finally:
    signal.set_wakeup_fd(old_writer)
    for number, handler in old_handlers.items():
      signal.signal(number, handler)
    os.close(writer)  # Ends the thread.
    thread.join()
    os.close(reader)


def _watch(reader: int, request_stop: Callable[[int], None]) -> None:
  """Reads numbers of signals from a pipe, and acts on them, until it closes.

  Args:
    reader: File descriptor of the end of the pipe that is read.
    request_stop: Function (number of the signal) that is called for the first
      signal.
  """
  requested_s = None
  while True:
    byte = os.read(reader, 1)
    if not byte:
      return
    number = byte[0]
    if number not in SIGNALS:
      continue
    now_s = time.monotonic()
    if requested_s is None:
      requested_s = now_s
      request_stop(number)
    elif now_s - requested_s > _SAME_REQUEST_S:
      name = signal.Signals(number).name
      print(f"error: ended by a second {name}", file=sys.stderr, flush=True)
      os._exit(128 + number)
