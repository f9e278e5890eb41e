"""How much memory a run may still take: that of the host, or of a device."""

import math
import pathlib
from collections.abc import Iterator
from typing import Any

_KIB = 1024
_CGROUPS = pathlib.Path("/sys/fs/cgroup")


def free_host_bytes(
  meminfo: pathlib.Path = pathlib.Path("/proc/meminfo"),
  own_group: pathlib.Path = pathlib.Path("/proc/self/cgroup"),
  groups: pathlib.Path = _CGROUPS,
) -> float:
  """Returns the memory that this process may still take (bytes).

  That is what Linux says is available, swap included, or what the control
  groups of this process allow, as those of a container or of a job of Slurm.

  Args:
    meminfo: File in which Linux says how much there is.
    own_group: File that names the control group of this process.
    groups: Folder of all control groups (version 2).

  Returns:
    The number; infinity where the system does not say it.
  """
  limits = [_free_in_group(group) for group in _own_groups(own_group, groups)]
  return min([_available(meminfo), *limits])


def _available(meminfo: pathlib.Path) -> float:
  """Returns MemAvailable and SwapFree (bytes); infinity if unknown."""
  try:
    lines = meminfo.read_text().splitlines()
  except OSError:
    return math.inf
  sizes = {}
  for line in lines:
    name, _, value = line.partition(":")
    sizes[name] = value.split()
  if "MemAvailable" not in sizes:
    return math.inf
  swap = sizes.get("SwapFree", ["0"])
  return _KIB * (int(sizes["MemAvailable"][0]) + int(swap[0]))


def _own_groups(
  own_group: pathlib.Path, groups: pathlib.Path
) -> Iterator[pathlib.Path]:
  """Yields the control group of this process and those that contain it."""
  try:
    lines = own_group.read_text().splitlines()
  except OSError:
    return
  for line in lines:
    if line.startswith("0::"):
      path = groups / line.removeprefix("0::").strip("/")
      yield path
      yield from (each for each in path.parents if groups in each.parents)
      yield groups


def _free_in_group(group: pathlib.Path) -> float:
  """Returns what a control group may still take (bytes); infinity: no limit."""
  try:
    limit = (group / "memory.max").read_text().strip()
    used = int((group / "memory.current").read_text())
    statistics = (group / "memory.stat").read_text().split()
  except (OSError, ValueError):
    return math.inf
  if limit == "max":
    return math.inf
  # Files that were read stay in memory for as long as nobody needs it.
  values = dict(zip(statistics[::2], statistics[1::2], strict=False))
  cached = int(values.get("inactive_file", 0))
  return int(limit) - used + cached


def device_bytes(device: Any) -> float:
  """Returns the memory that JAX may take of a device (bytes).

  Args:
    device: A device of JAX.

  Returns:
    The number; infinity where the device does not say it.
  """
  statistics = device.memory_stats() or {}
  return float(statistics.get("bytes_limit", math.inf))
