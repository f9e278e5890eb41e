"""Changes the links of a network as rounds of a run end."""

import pathlib
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from dilocox_jax.metrics.lines import RecordError, read_rows
from experiments.runtime.throttled_network import NodeLink, ThrottledNetwork

OPEN_BIT_PER_S = 1e10  # Faster than two processes of one machine send.
_POLL_S = 0.02


class ChangingLink:
  """Gives all nodes of a network another link between rounds, in a context."""

  def __init__(
    self,
    network: ThrottledNetwork,
    timing: pathlib.Path,
    rate_of: Callable[[Sequence[float]], float],
  ):
    """Changes nothing yet.

    Args:
      network: The network.
      timing: The run's file `timing.jsonl`, which need not exist yet.
      rate_of: Returns the rate (bits per second) after rounds that took so
        many seconds each.
    """
    self._network, self._timing, self._rate_of = network, timing, rate_of
    self._end = threading.Event()
    self._error: Exception | None = None
    self._thread = threading.Thread(target=self._run_to_end)

  def __enter__(self) -> None:
    self._throttle(self._rate_of(()))
    self._thread.start()

  def __exit__(self, kind: type | None, *exception: object) -> None:
    self._end.set()
    self._thread.join()
    if self._error and kind is None:
      # The rounds would be taken for those of another link.
      raise self._error

  def _run_to_end(self) -> None:
    try:
      self._run()
    except Exception as error:
      self._error = error

  def _run(self) -> None:
    num_rounds, before = 0, self._rate_of(())
    while not self._end.wait(_POLL_S):
      walls_s = self._walls_s()
      if len(walls_s) > num_rounds:
        num_rounds, now = len(walls_s), self._rate_of(walls_s)
        if now != before:
          self._throttle(now)
          if len(self._walls_s()) > num_rounds:
            print(
              "the link changed so late that a round which counts had another "
              "rate: free the machine",
              file=sys.stderr,
            )
        before = now

  def _walls_s(self) -> list[float]:
    """Returns the seconds of every round so far."""
    try:
      rows = read_rows(self._timing)
    except RecordError:
      return []
    return [row["wall_s"] for row in rows if row["event"] == "round"]

  def _throttle(self, bit_per_s: float) -> None:
    link = NodeLink(bit_per_s, bit_per_s)
    nodes = range(len(self._network.addresses))
    with ThreadPoolExecutor(len(nodes)) as threads:
      list(threads.map(lambda n: self._network.throttle(n, link), nodes))
