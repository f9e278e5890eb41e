"""The thread that dispatches exchanges where a device cannot overlap them.

XLA's CPU backend runs no transfer beside the inner steps: there a collective
blocks the thread that runs the program, and programs that one thread dispatches
run one after the other. So a second thread dispatches the exchange of a window:

    main thread      | inner steps             | wait | apply, measure, send
    exchange thread  | exchange (slow link)           |

The programs consist of the same functions as a window's one program, in the
same order of data. They give the same bits, unless the compiler rounds
a * b + c once where both operations stand in one program. It does so on CPUs
with such an instruction, and the results then differ by about 1e-7 relative.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from dilocox_jax.pytypes import Tree


class ExchangeThread:
  """The thread that dispatches exchanges, and the time spent waiting for it."""

  def __init__(self):
    """Starts no thread yet."""
    self._thread = ThreadPoolExecutor(1, "exchange")
    self._exposed_s = 0.0

  def start(self, exchange, *arguments) -> Future:
    """Runs an exchange in the thread; its error comes up in `wait`."""
    return self._thread.submit(
      lambda: jax.block_until_ready(exchange(*arguments))
    )

  def wait(self, exchange: Future, beside: Tree):
    """Returns the result of an exchange.

    Args:
      exchange: What `start` returned.
      beside: Results of the inner steps that hide it.
    """
    jax.block_until_ready(beside)
    start_s = time.perf_counter()
    result = exchange.result()
    self._exposed_s += time.perf_counter() - start_s
    return result

  def newly_exposed_s(self) -> float:
    """Returns the seconds that steps waited for exchanges since the last call.

    That is time in which inner steps had ended and the exchange beside them had
    not.
    """
    exposed_s, self._exposed_s = self._exposed_s, 0.0
    return exposed_s
