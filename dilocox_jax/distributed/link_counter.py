"""Counts the bytes that this process sends over a network interface.

The launcher of throttled links gives every process an interface of its own and
names it in an environment variable. A run then records the kernel's count next
to the bytes of the plan, so that no byte crosses a slow link uncounted.
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
  """Counts the bytes that are sent over this process's throttled link, if any.

  Attributes:
    interface: Name of the link's interface; "" if there is none.
  """

  def __init__(self):
    """Starts to count at the kernel's present count."""
    self.interface = os.environ.get(LINK_VARIABLE, "")
    self._last_count = self._count()

  def new_bytes(self) -> float:
    """Returns the bytes sent since the last call; NaN without a link."""
    count = self._count()
    new_bytes = count - self._last_count
    self._last_count = count
    return new_bytes

  def _count(self) -> float:
    """Returns the kernel's count of sent bytes; NaN without a link."""
    if not self.interface:
      return math.nan
    return sent_bytes(self.interface)
