"""Reads how much memory a process may take on the host and on a device."""

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
  """Returns the bytes of memory that this process may still take on the host.

  The result is the smallest of several numbers: the machine's available memory
  with its swap space, and what each control group of this process (e.g. of its
  container) may still take.

  Args:
    meminfo: File of Linux with the available memory.
    own_group: File of Linux that names the control group of this process.
    groups: Folder of all control groups (version 2).

  Returns:
    The number of bytes; infinity if the system does not tell it.
  """
  limits = [_free_in_group(group) for group in _own_groups(own_group, groups)]
  return min([_available(meminfo), *limits])


def _available(meminfo: pathlib.Path) -> float:
  """Returns the machine's available memory with its swap space (bytes).

  The result is infinity if the file `meminfo` does not tell it.
  """
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
  """Yields the folders of this process's control group and those around it."""
  try:
    lines = own_group.read_text().splitlines()
  except OSError:
    return
  for line in lines:
    if line.startswith("0::"):
      path = groups / line.removeprefix("0::").strip("/")
      yield path
      for parent in path.parents:
        if groups in parent.parents:  # The parent is below the folder `groups`.
          yield parent
      yield groups


def _free_in_group(group: pathlib.Path) -> float:
  """Returns the bytes that a control group may still take.

  The result is infinity if the group has no limit, or cannot be read.
  """
  try:
    limit = (group / "memory.max").read_text().strip()
    used = int((group / "memory.current").read_text())
    statistics = (group / "memory.stat").read_text().split()
  except (OSError, ValueError):
    return math.inf
  if limit == "max":
    return math.inf
  names = statistics[::2]
  values = statistics[1::2]
  statistic_by_name = dict(zip(names, values, strict=False))
  # The memory of cached files is free: the system takes it when it is needed.
  cached = int(statistic_by_name.get("inactive_file", 0))
  return int(limit) - used + cached


def device_bytes(device: Any) -> float:
  """Returns how many bytes of a device's memory JAX may take in total.

  The result is infinity if the device does not tell it.
  """
  statistics = device.memory_stats() or {}
  return float(statistics.get("bytes_limit", math.inf))
