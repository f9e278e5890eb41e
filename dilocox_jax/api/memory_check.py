"""Refuses a run for which this machine has too little memory.

An operating system ends a program that takes more memory than there is, without
a word and after minutes, and may end others with it. So a run is held against
the memory before any array is made. What it keeps between steps is exact, and
what a step needs beside that is an estimate, so there is a margin.
"""

import math

import jax

from dilocox_jax.api.device_memory import (
  device_memory,
  num_copies,
  optimizer_copies,
  share_bytes,
)
from dilocox_jax.api.free_memory import device_bytes, free_host_bytes
from dilocox_jax.config import RunConfig
from dilocox_jax.config.platforms import on_platform
from dilocox_jax.report.units import human_bytes
from dilocox_jax.training.build import platform_name
from dilocox_jax.training.parts import NO_PARTS, Parts

# Estimates of a step are within a tenth of what compilers need
# (tests/experiments/test_fits.py).
MARGIN = 1.1


class MemoryRefusedError(ValueError):
  """Means that a run would need more memory than there is."""


def check_memory(
  config: RunConfig, parts: Parts = NO_PARTS, go_on: str = "check_memory=False"
) -> None:
  """Refuses a run that needs more memory than its device or this host has.

  Args:
    config: Config of the run.
    parts: Parts that were handed in. Of a model among them only what is kept
      between steps is counted, as nobody knows its layers.
    go_on: How a user says that the run may try all the same.

  Raises:
    MemoryRefusedError: One line with both numbers and what to change.
  """
  kept, step = _needed_bytes(config, parts)
  platform = platform_name()
  if platform == "cpu":
    # All devices of a CPU are in the memory of the host.
    devices = min(config.num_devices, jax.local_device_count())
    kept = kept * devices
    step = step * devices
    free = free_host_bytes()
    where = f"and this machine has {human_bytes(free)} free"
  else:
    device = jax.local_devices()[0]
    free = device_bytes(device)
    where = f"and a device ({device.device_kind}) has {human_bytes(free)}"
  if kept + step <= MARGIN * free:
    return
  raise MemoryRefusedError(
    f"the run needs about {human_bytes(kept + step)} of memory "
    f"({human_bytes(kept)} of it are kept between steps), {where}: take a "
    "smaller model (model.preset, or its sizes), fewer replicas on a device, a "
    "smaller batch, or more devices (mesh.num_data_shards); experiments.fits "
    f"says what each needs, and {go_on} tries all the same"
  )


def _needed_bytes(config: RunConfig, parts: Parts) -> tuple[float, float]:
  """Returns what a device keeps between steps, and what a step needs beside."""
  stacked = 1
  if config.mesh.layout == "stacked":
    stacked = config.num_local_replicas
  if parts.model is not None:
    return stacked * _kept_of_a_model(config, parts), 0
  memory = device_memory(config)
  kept = memory.state
  if config.mesh.outer_memory != "device" and platform_name() != "cpu":
    # The outer state is on the host.
    shapes = config.trained_shapes
    outer = num_copies(config) - 1 - optimizer_copies(config)
    kept -= round(outer * share_bytes(shapes, config.division))
  runs_together = on_platform(config, platform_name()).stacked_by == "vmap"
  at_once = stacked if runs_together else 1
  return memory.frozen + stacked * kept, at_once * memory.step


def _kept_of_a_model(config: RunConfig, parts: Parts) -> float:
  """Returns the least that a replica of a model of somebody's own keeps."""
  assert parts.model is not None
  params = jax.eval_shape(parts.model.init, jax.random.key(0))
  size = sum(
    math.prod(leaf.shape) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(params)
  )
  if parts.trainable or config.lora.rank:
    return size
  copies = num_copies(config) - optimizer_copies(config)
  return copies * size
