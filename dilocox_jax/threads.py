"""Threads for which the end of a program does not wait."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_thread(call: Callable, *given: Any, **named: Any) -> Future:
  """Calls a function in a thread of its own; returns what it comes to.

  A pool's thread would hold up the end of the program until its call returns,
  and a request that a server never answers takes minutes.
  """
  found = Future()

  def run() -> None:
    try:
      found.set_result(call(*given, **named))
    except BaseException as error:
      found.set_exception(error)

  threading.Thread(target=run, daemon=True).start()
  return found
