"""Gives the guides two devices, as some of them say that the reader should."""

import jax

if jax.config.jax_num_cpu_devices < 2:
  jax.config.update("jax_num_cpu_devices", 2)
