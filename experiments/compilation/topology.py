"""TPU slices that are not there, as devices to compile for."""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from jax.experimental import topologies

LIBTPU = "libtpu==0.0.42"
# Memory that a program may use, as the compiler of that version says when a
# program does not fit (GiB), by kind of device.
_MEMORY_GIB = {
  "TPU v4": 30.75,
  "TPU v5": 95.74,
  "TPU v5p": 95.74,
  "TPU v5 lite": 15.75,
  "TPU v6 lite": 31.25,
}
# What libtpu asks a real machine for; the values only stop its questions.
_ENVIRONMENT = {
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5p-256",
  "TPU_SKIP_MDS_QUERY": "1",
  # Two compilers at once are fine where neither takes a chip.
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def is_compiler_installed() -> bool:
  """Whether the compiler for TPUs is there."""
  return importlib.util.find_spec("libtpu") is not None


def topology_devices(name: str, num_slices: int) -> list[Any]:
  """Returns the devices of slices that need not exist, slice by slice.

  Args:
    name: Kind and size of a slice, e.g. "v5p:4x4x8".
    num_slices: Number of slices.

  Raises:
    ValueError: If the compiler is missing or knows no such slice.
  """
  if not is_compiler_installed():
    raise ValueError(
      "the compiler for TPUs is not installed: run `make compile-report`, which"
      f" makes an environment with it, or install {LIBTPU!r} into your own"
    )
  for variable, value in _ENVIRONMENT.items():
    os.environ.setdefault(variable, value)
  try:
    found = topologies.get_topology_desc(
      name, platform="tpu", num_slices=num_slices
    )
  except Exception as error:  # The compiler raises several kinds.
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise ValueError(
      f"--compile={name} with --slices={num_slices} is not known to the "
      f"compiler ({reason[:160]}): take one such as v5e:2x2 or v5p:4x4x8"
    ) from error
  return sorted(found.devices, key=lambda each: (each.slice_index, each.id))


def memory_bytes(device: Any) -> int:
  """Returns the memory of a device that programs may use (bytes).

  Raises:
    ValueError: If it is not known for this kind of device.
  """
  kind = device.device_kind
  if kind not in _MEMORY_GIB:
    raise ValueError(
      f"the memory of {kind!r} is not known: add it to "
      "experiments/compilation/topology.py"
    )
  return int(_MEMORY_GIB[kind] * 2**30)


def check_mesh(num_devices: int, devices: Sequence[Any]) -> None:
  """Raises ValueError unless a run uses all devices of the slices."""
  if num_devices != len(devices):
    raise ValueError(
      f"the run has {num_devices} devices and the slices have {len(devices)}:"
      " num_replicas x num_data_shards x num_stages must be all of them, e.g."
      " --config.mesh.num_stages=2 --config.mesh.num_data_shards=2 for v5e:2x2"
    )
