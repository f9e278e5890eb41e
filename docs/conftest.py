"""Gives the guides eight devices, as some of them tell the reader to do."""

import os

# Eight devices share a few cores: one may be late without being lost.
os.environ.setdefault(
  "XLA_FLAGS", "--xla_cpu_collective_call_terminate_timeout_seconds=300"
)

import jax  # noqa: E402

if jax.config.jax_num_cpu_devices < 8:
  jax.config.update("jax_num_cpu_devices", 8)
