"""The flag --memory: how much memory a device has."""

import math

from absl import flags

from dilocox_jax.simulate.quantities import SIZE, parse_quantity
from experiments.runtime import command_line
from experiments.runtime.command_line import UsageError

MEMORY = flags.DEFINE_string(
  "memory", None, "Memory of a device, e.g. '80 GB'."
)


def memory_bytes() -> float | None:
  """Returns the value of --memory (bytes); None if the flag is not given.

  Raises:
    UsageError: If the value is no size, or is 0 or infinite.
  """
  if MEMORY.value is None:
    return None
  with command_line.usage_errors():
    size = parse_quantity(MEMORY.value, SIZE, "--memory")
  if not 0 < size < math.inf:
    raise UsageError("--memory must be above 0, and finite")
  return size
