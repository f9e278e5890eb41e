"""A store that is waited for while it cannot be reached."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from dilocox_jax.meeting.store import AwayError

Answer = TypeVar("Answer")

FIRST_PAUSE_S, LONGEST_PAUSE_S, LINE_EVERY_S = 0.1, 5.0, 60.0


class Patient:
  """Every call is repeated until the store answers.

  A folder without space, a bucket without permission and a link that is down
  look alike: somebody repairs them, and the run goes on. Meanwhile one line a
  minute says what is waited for.
  """

  def __init__(
    self,
    store: Any,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
  ):
    """Wraps a store.

    Args:
      store: A `Store`, or an object with its methods.
      clock: Seconds that never go back.
      pause: Waits for a number of seconds.
    """
    self.store, self.clock, self.pause = store, clock, pause

  def get(self, path: str, at_most: int) -> bytes | None:
    """See `Store.get`."""
    return self._patiently(lambda: self.store.get(path, at_most))

  def create(self, path: str, data: bytes) -> bool:
    """See `Store.create`; after a lost answer it is False, too."""
    return self._patiently(lambda: self.store.create(path, data))

  def put(self, path: str, data: bytes) -> None:
    """See `Store.put`."""
    self._patiently(lambda: self.store.put(path, data))

  def delete(self, paths: Iterable[str]) -> None:
    """See `Store.delete`."""
    paths = list(paths)
    self._patiently(lambda: self.store.delete(paths))

  def sizes(self, prefix: str) -> dict[str, int]:
    """See `Store.sizes`."""
    return self._patiently(lambda: self.store.sizes(prefix))

  def _patiently(self, call: Callable[[], Answer]) -> Answer:
    began, said, wait = self.clock(), None, FIRST_PAUSE_S
    while True:
      try:
        answer = call()
      except AwayError as error:
        now = self.clock()
        if said is None or now - said >= LINE_EVERY_S:
          self._say(f"waiting for {self.store.where}: {error}")
          said = now
      else:
        if said is not None:
          away = self.clock() - began
          self._say(f"{self.store.where} is back after {away:.0f} s")
        return answer
      self.pause(wait)
      wait = min(2 * wait, LONGEST_PAUSE_S)

  def _say(self, line: str) -> None:
    logging.getLogger(__name__).warning(line)
