"""Counts the bytes that leave this process by a network interface.

The launcher of throttled links gives every process an interface of its own and
names it in an environment variable. The kernel's counter then stands beside the
bytes of the plan, so that no byte crosses a slow link uncounted.
"""

import math
import os

LINK_VARIABLE = "DILOCOX_JAX_LINK"  # Name of the interface, e.g. "wan".


def sent_bytes(interface: str, table: str = "/proc/self/net/dev") -> int:
  """Returns the bytes that an interface has sent so far, headers included.

  Args:
    interface: Name of the interface in this process's network namespace.
    table: File with the kernel's counters of a namespace.

  Raises:
    ValueError: If there is no such interface.
  """
  with open(table) as file:
    lines = [line.strip().partition(":") for line in file]
  for name, _, counters in lines:
    if name == interface:
      return int(counters.split()[8])
  raise ValueError(
    f"{LINK_VARIABLE}={interface} is no network interface here: unset it"
  )


class LinkCounter:
  """Counts what left by this process's throttled link, if it has one.

  Attributes:
    interface: Name of the link's interface; "" if there is none.
  """

  def __init__(self):
    """Starts to count from here."""
    self.interface = os.environ.get(LINK_VARIABLE, "")
    self._before = self._now()

  def new_bytes(self) -> float:
    """Returns the bytes since the last call; NaN without a link."""
    before, self._before = self._before, self._now()
    return self._before - before

  def _now(self) -> float:
    return sent_bytes(self.interface) if self.interface else math.nan
