"""Chooses values for the config fields that are left to the devices.

A config may leave fields open ("auto", or None for a number), so that the same
command is fast on every kind of device. A value that the user sets always wins.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dilocox_jax.checks import flat
from dilocox_jax.config.run import RunConfig
from dilocox_jax.plan.choices import SPLASH_LENGTH

_ACCELERATOR: Mapping[str, Any] = {
  "model.attention": "blockwise",
  # Matrix units multiply bfloat16 many times as fast as fp32. Parameters, sums
  # of gradients, norms, softmax and the loss stay in fp32.
  "model.compute_dtype": "bfloat16",
  # The memory limits the size of a batch, so only matmul outputs are saved.
  "model.remat": "dots",
  # A program with one layer in a loop compiles fast.
  "model.scan_unroll": 1,
  # Logits [1024, V] keep the matrix units busy. For V = 32,000 they take
  # 131 MB.
  "model.loss_chunk_tokens": 1024,
  # Small replicas use a whole device only if they run together.
  "mesh.stacked_by": "vmap",
}

# Values by the kind of the devices, as JAX names it. All other kinds get
# `_ACCELERATOR`.
_VALUES: Mapping[str, Mapping[str, Any]] = {
  "cpu": {
    "model.attention": "plain",
    "model.compute_dtype": "float32",
    "model.remat": "none",
    "model.scan_unroll": 0,
    "model.loss_chunk_tokens": 0,
    # The batched matrix products of vmap are slow on a CPU.
    "mesh.stacked_by": "map",
  },
  "gpu": {
    **_ACCELERATOR,
    "model.attention": "cudnn",
    # On an H200, a loop over layers copies the values that the layers read and
    # save. A step of 24 layers takes 94 ms in a loop and 84 ms unrolled. If XLA
    # decides what to save, it takes 81 ms, but 14.7 GB of temporary memory
    # instead of 10.5 GB (measured).
    "model.remat": "none",
    "model.scan_unroll": 0,
    # Computing the logits again takes 3 % of a step (measured), which large
    # chunks avoid. For V = 32,000 the logits of so many tokens take 2.1 GB.
    "model.loss_chunk_tokens": 16384,
  },
  "tpu": {**_ACCELERATOR, "model.attention": "splash"},
}

_OPEN = (None, "auto")  # Values that leave a field to the devices.
_CUDNN_WIDTH = 128  # Widest head that the kernel supports on every GPU.


@dataclasses.dataclass(frozen=True)
class Computation:
  """The config fields that decide how a device computes, with their values.

  `stacked_by` is a field of the section `mesh`, the others of `model`. Fields
  of `model` may still be "auto" or None if the user supplies the model. `remat`
  may also be "auto" if several devices divide a replica, because `mesh.remat`
  is read then.
  """

  attention: str
  compute_dtype: str
  loss_chunk_tokens: int
  remat: str
  scan_unroll: int
  stacked_by: str


def on_platform(
  config: RunConfig, platform: str, has_own_model: bool = False
) -> Computation:
  """Returns how a kind of devices computes a run.

  Fields that the config leaves to the device get the values of `chosen_values`.

  Args:
    config: Config of a run.
    platform: Kind of the devices: "cpu", "tpu", "gpu" (NVIDIA) or "rocm" (AMD).
    has_own_model: Whether the user supplies the model.
  """
  values = flat(config.to_mapping())
  values |= chosen_values(config, platform, has_own_model)
  settings = {}
  for path in _ACCELERATOR:
    _, _, field = path.partition(".")
    settings[field] = values[path]
  return Computation(**settings)


def chosen_values(
  config: RunConfig, platform: str, has_own_model: bool = False
) -> dict[str, Any]:
  """Chooses values for the fields that a config leaves to the devices.

  `mesh.gather` is not among them: it depends on the devices' memory.

  Args:
    config: Config of a run.
    platform: Kind of the devices: "cpu", "tpu", "gpu" (NVIDIA) or "rocm" (AMD).
    has_own_model: Whether the user supplies the model. Nothing is then chosen
      for fields of `model`.

  Returns:
    The chosen values by dotted name, without fields that the user has set, and
    without `model.remat` if several devices divide a replica.
  """
  config_values = flat(config.to_mapping())
  chosen = {}
  for path, value in _VALUES.get(platform, _ACCELERATOR).items():
    if config_values[path] not in _OPEN:
      continue
    if has_own_model and path.startswith("model."):
      continue
    if path == "model.remat" and config.mesh.is_divided:
      continue  # A replica on several devices has mesh.remat instead.
    chosen[path] = value
  if "model.attention" in chosen:
    dtype = (config_values | chosen)["model.compute_dtype"]
    # Any device can compute "blockwise".
    if not _has_kernel(config, dtype, chosen["model.attention"]):
      chosen["model.attention"] = "blockwise"
  return chosen


def _has_kernel(config: RunConfig, dtype: str, attention: str) -> bool:
  """Returns whether an implementation of attention supports a config.

  Only "cudnn" and "splash" (values of `model.attention`) have limits.
  """
  if attention == "cudnn":
    if dtype != "bfloat16" or config.data.document_masks:
      return False
    head_width = config.model.shape.head_width
    return head_width % 8 == 0 and head_width <= _CUDNN_WIDTH
  if attention == "splash":
    return config.data.sequence_length % SPLASH_LENGTH == 0
  return True
