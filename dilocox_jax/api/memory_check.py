"""Refuses a run for which this machine has too little memory.

If a program takes more memory than a host has, the operating system ends it
without a message, perhaps after minutes, and may end other programs, too. If it
takes more than an accelerator has, JAX raises RESOURCE_EXHAUSTED, perhaps only
after a long compilation. So before any array is made, the memory that a run
needs is compared with the available memory. On CPUs, the available memory is
what the host has free. On other devices, it is the limit that JAX has on a
device, even if a part of it is in use.

The bytes of the state that is kept between steps are computed from the config
(`config.device_memory` says when they are exact). For a user's model they are a
lower bound, because the state of the inner optimizer is not counted. The memory
of a step is an estimate, which may be too high. So a run is refused only if it
needs more than 1.1 times the available memory.
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
  """Raised if a run would need more memory than there is.

  The message is one line.
  """


def check_memory(
  config: RunConfig,
  overrides: Overrides = NO_OVERRIDES,
  go_on: str = "check_memory=False",
) -> None:
  """Refuses a run that needs more than 1.1 times the available memory.

  The available memory is what this host has free (on CPUs), or the limit of a
  device. The needed memory is partly an estimate, which may be too high. If the
  system does not tell how much memory there is, no run is refused.

  Args:
    config: Config of the run.
    overrides: Objects of the user in place of parts that the config names. If a
      model is among them, only its state between steps is counted, because its
      layers are unknown.
    go_on: What a user can set to start the run all the same, for the message.

  Raises:
    MemoryRefusedError: If the run is refused. The message is one line with both
      numbers of bytes, and says what to change.
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
  """Returns the memory that a run needs on a device (bytes).

  Args:
    config: Config of the run.
    overrides: Objects of the user in place of parts that the config names.
    device_limit_bytes: Memory of a device that JAX may take (bytes); infinity
      if the device does not tell it.

  Returns:
    A tuple: the bytes of the state that is kept between steps, and the bytes
    that a step needs in addition (0 for a model of the user).
  """
  num_replicas = 1
  if config.mesh.layout == "stacked":
    num_replicas = config.num_local_replicas
  if overrides.model is not None:
    return num_replicas * _supplied_model_bytes(config, overrides), 0
  memory = device_memory(config, device_limit_bytes)
  state_bytes = memory.state
  if config.mesh.outer_memory != "device" and platform_name() != "cpu":
    # The outer state is in the memory of the host.
    outer_copies = num_copies(config) - 1 - optimizer_copies(config)
    copy_bytes = share_bytes(config.trained_shapes, config.division)
    state_bytes -= round(outer_copies * copy_bytes)
  num_at_once = 1
  if on_platform(config, platform_name()).stacked_by == "vmap":
    num_at_once = num_replicas
  return (
    memory.frozen + num_replicas * state_bytes,
    num_at_once * memory.step,
  )


def _supplied_model_bytes(config: RunConfig, overrides: Overrides) -> float:
  """Returns how many bytes the state of a replica with a user's model needs.

  This is what is kept on a device between steps, without the state of the inner
  optimizer, so it is a lower bound. If only a part of the model is trained,
  only the parameters are counted, once.

  Args:
    config: Config of the run.
    overrides: Objects of the user, with a model among them.
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
