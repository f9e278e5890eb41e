"""Runs functions in threads that do not keep a program from ending."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_thread(function: Callable, *args: Any, **kwargs: Any) -> Future:
  """Calls a function in a new thread, and returns a future of its result.

  Unlike a thread of a `ThreadPoolExecutor`, the thread does not keep the
  program from ending while the function runs.
  """
  future = Future()

  def run() -> None:
    try:
      future.set_result(function(*args, **kwargs))
    except BaseException as error:
      future.set_exception(error)

  threading.Thread(target=run, daemon=True).start()
  return future
