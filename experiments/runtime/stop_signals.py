"""Lets a first SIGTERM or Ctrl-C ask a run to stop, and a later one end it.

Python's signal handlers wait for the main thread, which may wait for the
devices for minutes. So another thread gets the numbers of the signals through a
pipe (`signal.set_wakeup_fd`) and acts at once.
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
  """Calls a function at the first SIGTERM or Ctrl-C inside the block.

  The function gets the number of the signal. It is called in another thread,
  and must return at once, because later signals wait for it. Signals within the
  next second count as the same request. A signal after that ends the process
  with exit code 128 + the number of the signal.

  When the block ends, signals act as before.

  Outside the main thread this does nothing.
  """
  if threading.current_thread() is not threading.main_thread():
    yield  # Only the main thread may handle signals.
    return
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  # With these handlers a signal does nothing but write its number to the pipe.
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
  """Acts on the signals whose numbers come from a pipe, until the pipe closes.

  `reader` is the end of the pipe that is read. `request_stop` is called with
  the number of the first signal.
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
