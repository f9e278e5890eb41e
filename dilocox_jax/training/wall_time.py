"""Measures when the devices have computed arrays, and how long JAX compiled.

The host runs ahead of the devices and may read a result late. So a thread waits
for the result and notes the time.
"""

import threading
import time
from concurrent.futures import Future

import jax

from dilocox_jax.threads import in_thread
from dilocox_jax.trees import Tree

# Names of JAX's events for tracing, lowering and compiling start with this.
_COMPILING = "/jax/core/compile/"


def ready_time(arrays: Tree) -> Future[float]:
  """Returns a future of the time at which arrays are computed.

  The time is in seconds of `time.perf_counter`. The arrays must not be donated.
  """

  def wait() -> float:
    jax.block_until_ready(arrays)
    return time.perf_counter()

  return in_thread(wait)


class CompileTimes:
  """The times in which JAX compiled something, in any thread."""

  def __init__(self):
    """Listens to JAX's events until `close` is called."""
    self._lock = threading.Lock()
    self._spans: list[tuple[float, float]] = []
    jax.monitoring.register_event_duration_secs_listener(self._hear)

  def close(self) -> None:
    """Stops listening to JAX's events."""
    jax.monitoring.unregister_event_duration_listener(self._hear)

  def _hear(
    self, event: str, duration_secs: float, **details: str | int
  ) -> None:
    """Stores the span of a compilation that has just ended. JAX calls this."""
    del details
    if event.startswith(_COMPILING):
      end_s = time.perf_counter()
      with self._lock:
        self._spans.append((end_s - duration_secs, end_s))

  def seconds(self, start_s: float, end_s: float) -> float:
    """Returns for how many seconds JAX compiled within a span of time.

    The span is given in seconds of `time.perf_counter`. Example: if JAX
    compiles from 1 to 3 s, and in another thread from 2 to 4 s, it compiles for
    3 s of the span from 0 to 10 s.

    Compilations that ended before `start_s` are forgotten, so ask for spans in
    the order of their starts.
    """
    with self._lock:
      self._spans = [span for span in self._spans if span[1] > start_s]
      spans = sorted(self._spans)
    total_s = 0.0
    covered_s = start_s  # Everything before this time is counted already.
    for span_start_s, span_end_s in spans:
      begin_s = max(span_start_s, covered_s)
      stop_s = min(span_end_s, end_s)
      if stop_s > begin_s:
        total_s += stop_s - begin_s
        covered_s = stop_s
    return total_s
