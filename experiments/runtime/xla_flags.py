"""Flags that XLA gets from the binaries, each with its reason.

XLA ends a process that has a flag it does not know, so flags are few, and a
test starts the installed JAX with all of them. They must be set before JAX
looks for devices.
"""

import importlib.util
import os
from collections.abc import Iterable

# By the flag: its value. All of them are for NVIDIA GPUs. On TPUs XLA overlaps
# by itself, and a CPU has one stream of work.
GPU_FLAGS = {
  # XLA then starts a collective early and waits for it late, with the inner
  # steps between. Without it the operations of a program keep their order, and
  # an exchange that could hide behind steps runs before them. Collectives have
  # a stream of their own by default.
  "--xla_gpu_enable_latency_hiding_scheduler": "true",
}
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def set_flags() -> None:
  """Adds the flags for GPUs to $XLA_FLAGS if JAX can use a GPU."""
  if any(importlib.util.find_spec(name) for name in _PLUGINS):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = with_flags(flags, GPU_FLAGS.items())


def with_flags(flags: str, added: Iterable[tuple[str, str]]) -> str:
  """Returns $XLA_FLAGS with more flags; those that are set stay as they are.

  Args:
    flags: Value of $XLA_FLAGS, e.g. "--a=1 --b".
    added: Names and values of flags.
  """
  present = {flag.partition("=")[0] for flag in flags.split()}
  new = [f"{name}={value}" for name, value in added if name not in present]
  return " ".join([*flags.split(), *new])
