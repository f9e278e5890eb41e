"""Counts the bytes that this process sends over a network interface.

When `experiments.launch` throttles the links between processes, every process
gets a network interface of its own, which the environment variable
`DILOCOX_JAX_LINK` names. A run then records the bytes that the kernel has sent
over the interface, besides the bytes that follow from the run's plan.
"""

import math
import os

LINK_VARIABLE = "DILOCOX_JAX_LINK"  # Name of the interface, e.g. "wan".


def sent_bytes(interface: str, table: str = "/proc/self/net/dev") -> int:
  """Returns the bytes that an interface has sent so far, headers included.

  Args:
    interface: Name of the interface in this process's network namespace.
    table: File of Linux with the counters of all interfaces of the namespace.

  Raises:
    ValueError: If there is no such interface.
  """
  with open(table) as file:
    lines = [line.strip().partition(":") for line in file]
  for name, _, counters in lines:
    if name == interface:
      # The first eight counters are of received data. The ninth is the number
      # of sent bytes.
      return int(counters.split()[8])
  raise ValueError(
    f"{LINK_VARIABLE}={interface} is no network interface here: unset it"
  )


class LinkCounter:
  """Counts the bytes that are sent over this process's throttled link.

  Attributes:
    interface: Name of the link's interface; "" if the process has no throttled
      link.
  """

  def __init__(self):
    """Starts to count at zero.

    Raises:
      ValueError: If there is no interface of the name in `DILOCOX_JAX_LINK`.
    """
    self.interface = os.environ.get(LINK_VARIABLE, "")
    self._last_count = self._count()

  def new_bytes(self) -> float:
    """Returns the bytes sent since the last call, or since `__init__` at first.

    The result is NaN if the process has no throttled link.
    """
    count = self._count()
    new_bytes = count - self._last_count
    self._last_count = count
    return new_bytes

  def _count(self) -> float:
    """Returns the kernel's count of sent bytes; NaN if there is no link."""
    if not self.interface:
      return math.nan
    return sent_bytes(self.interface)
