"""Refuses a run for which this machine has too little memory.

Without this check, the operating system may end the program without a message,
or JAX raises RESOURCE_EXHAUSTED after a long compilation. The needed memory is
computed from the config before any array is made.
"""

import jax

from dilocox_jax.config import RunConfig
from dilocox_jax.config.device_memory import (
  device_memory,
  num_copies,
  optimizer_copies,
)
from dilocox_jax.config.platforms import on_platform
from dilocox_jax.config.step_memory import share_bytes
from dilocox_jax.distributed.free_memory import device_bytes, free_host_bytes
from dilocox_jax.report.units import human_bytes
from dilocox_jax.training.build import platform_name
from dilocox_jax.training.model_functions import run_division
from dilocox_jax.training.overrides import NO_OVERRIDES, Overrides
from dilocox_jax.trees import leaves_by_path

# A run is refused if it needs more than this many times the available memory.
# Estimates of a step differ by at most a tenth from what compilers need
# (tests/experiments/test_fits.py).
MARGIN = 1.1


class MemoryRefusedError(ValueError):
  """Raised if a run would need more memory than there is."""


def check_memory(
  config: RunConfig,
  overrides: Overrides = NO_OVERRIDES,
  go_on: str = "check_memory=False",
) -> None:
  """Refuses a run that needs more than 1.1 times the available memory.

  On CPUs the available memory is what this host has free. On other devices it
  is the limit of a device, even if a part of its memory is in use. If the
  available memory is not known, no run is refused. The needed memory is partly
  an estimate, which may be too high.

  Args:
    config: Config of the run.
    overrides: Objects of the user in place of parts that the config names. Of a
      user's model, only the state between steps is counted, without that of the
      inner optimizer.
    go_on: What a user can set to start the run all the same, for the message.

  Raises:
    MemoryRefusedError: One line with both numbers of bytes and what to change.
  """
  device_limit_bytes = min(map(device_bytes, jax.local_devices()))
  state_bytes, step_bytes = _needed_bytes(config, overrides, device_limit_bytes)
  if platform_name() == "cpu":
    # All devices of a CPU use the memory of the host.
    num_devices = min(config.num_devices, jax.local_device_count())
    state_bytes = state_bytes * num_devices
    step_bytes = step_bytes * num_devices
    available_bytes = free_host_bytes()
    available = f"and this machine has {human_bytes(available_bytes)} free"
  else:
    device = jax.local_devices()[0]
    available_bytes = device_limit_bytes
    available = (
      f"and a device ({device.device_kind}) has {human_bytes(available_bytes)}"
    )
  needed_bytes = state_bytes + step_bytes
  if needed_bytes <= MARGIN * available_bytes:
    return
  raise MemoryRefusedError(
    f"the run needs about {human_bytes(needed_bytes)} of memory "
    f"({human_bytes(state_bytes)} of it are kept between steps), "
    f"{available}: take a "
    "smaller model (model.preset, or its sizes), fewer replicas on a device, a "
    "smaller batch, or more devices (mesh.num_data_shards); experiments.fits "
    f"says what each needs, and {go_on} tries all the same"
  )


def _needed_bytes(
  config: RunConfig, overrides: Overrides, device_limit_bytes: float
) -> tuple[float, float]:
  """Returns the memory that a run needs on one device, as a tuple (bytes).

  The first number is the state between steps. The second is what a step needs
  besides: 0 for a model of the user.
  """
  num_replicas = 1
  if config.mesh.layout == "stacked":
    num_replicas = config.num_local_replicas
  if overrides.model is not None:
    return num_replicas * _supplied_model_bytes(config, overrides), 0
  memory = device_memory(config, device_limit_bytes)
  state_bytes = memory.state
  if config.mesh.outer_memory != "device" and platform_name() != "cpu":
    # The host holds the outer state. A device holds only the parameters of the
    # replica and the state of its inner optimizer.
    outer_copies = num_copies(config) - 1 - optimizer_copies(config)
    copy_bytes = share_bytes(config.trained_shapes, config.division)
    state_bytes -= round(outer_copies * copy_bytes)
  # With "vmap" all replicas on a device step together. Otherwise they step one
  # after the other, so the memory of a step is needed once.
  num_at_once = 1
  if on_platform(config, platform_name()).stacked_by == "vmap":
    num_at_once = num_replicas
  return (
    memory.frozen + num_replicas * state_bytes,
    num_at_once * memory.step,
  )


def _supplied_model_bytes(config: RunConfig, overrides: Overrides) -> float:
  """Returns the least bytes on a device for a replica of a user's model.

  It counts the state between steps without that of the inner optimizer, or only
  the parameters if not all of them are trained.
  """
  assert overrides.model is not None
  params = jax.eval_shape(overrides.model.init, jax.random.key(0))
  division = run_division(config, overrides.model)
  copy_bytes = 0
  for path, leaf in leaves_by_path(params).items():
    copy_bytes += division.share_size(path, leaf.shape) * leaf.dtype.itemsize
  if overrides.trainable or config.lora.rank:
    return copy_bytes
  copies = num_copies(config) - optimizer_copies(config)
  return copies * copy_bytes
