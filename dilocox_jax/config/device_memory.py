"""Computes the memory that a run needs on one device, from its config.

Of the state between two steps, copies of the parameters (`num_copies`) and
low-rank factors are counted. Inner optimizers other than SGD, Lion and Muon
count as Adam. Outer optimizers count as SGD, unless they are schedule-free. The
correction of a user's rule (`outer.rules.ApplyRule.correct`) is not counted.
The memory that a step or an exchange needs in addition is an estimate.
"""

import dataclasses
import math

from dilocox_jax.codecs.base import Codec
from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.config.platforms import on_platform
from dilocox_jax.config.step_memory import (
  leaf_bytes,
  narrow_bytes,
  share_bytes,
  step_bytes,
  trained_sizes,
)
from dilocox_jax.plan.model.division import Division
from dilocox_jax.plan.schedule.fragments import BLOCKS, Shapes, stacked_shape

# Share of a device's memory that should stay free, because the memory of a step
# is an estimate. A test checks that its error is at most a tenth
# (tests/experiments/test_fits.py).
LEAST_SPARE = 0.1
# Number of copies of the exchanged parameters that a device holds during an
# exchange that replicas wait for. The first copy is the pseudo-gradient. It
# stays until the end, because its norm and its angle to the mean are measured
# then. The second copy is what is sent: the pseudo-gradient, or zeros if it is
# not finite. On TPUs, what arrives from other slices is a third copy. On GPUs,
# what arrives is written over what is sent.
_EXCHANGE_COPIES = {"gpu": 2, "tpu": 3}
# Number of copies of the parameters that an inner optimizer keeps.
_OPTIMIZER_COPIES = {"adamw": 2.0, "adam": 2.0, "lion": 1.0}


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
  """Memory that one replica needs on one of its devices (bytes).

  Attributes:
    state: State that is kept between steps.
    step: What a step needs in addition, or an exchange if that needs more
      (estimated).
    frozen: Parameters that are not trained, and the copies of their layers in
      the compute dtype. Replicas on one device share both.
  """

  state: int
  step: int
  frozen: int = 0

  @property
  def total(self) -> int:
    """The sum of state, step and frozen parameters (bytes)."""
    return self.state + self.step + self.frozen


def device_memory(
  config: RunConfig, device_bytes: float = math.inf, platform: str = "gpu"
) -> DeviceMemory:
  """Returns the memory that one replica needs on one of its devices.

  Args:
    config: Config of the run.
    device_bytes: Memory of a device (bytes), which decides what
      `mesh.gather="auto"` means (`chosen_gather`).
    platform: Kind of the accelerators: "gpu" or "tpu".
  """
  gather = chosen_gather(config, device_bytes, platform)
  return _memory(config, gather, platform)


def chosen_gather(
  config: RunConfig, device_bytes: float = math.inf, platform: str = "gpu"
) -> str:
  """Returns when the data shards of a pipeline stage collect its layers.

  A config with `mesh.gather="auto"` gets "stage" if at least a tenth of a
  device's memory then stays free (`LEAST_SPARE`), and "layer" otherwise. Any
  other value of `mesh.gather` is returned unchanged.

  Args:
    config: Config of the run.
    device_bytes: Memory of a device (bytes).
    platform: Kind of the accelerators: "gpu" or "tpu".

  Returns:
    "stage" (all layers once a step, fewer bytes sent) or "layer" (one layer at
    a time, less memory).
  """
  if config.mesh.gather != "auto":
    return config.mesh.gather
  needed_bytes = _memory(config, "stage", platform).total
  if needed_bytes <= (1 - LEAST_SPARE) * device_bytes:
    return "stage"
  return "layer"


def _memory(config: RunConfig, gather: str, platform: str) -> DeviceMemory:
  """Returns the memory that one replica needs on one of its devices.

  `gather` is "stage" or "layer", as `chosen_gather` returns.
  """
  shapes = config.trained_shapes
  division = config.division
  state = num_copies(config) * share_bytes(shapes, division)
  factors = factor_bytes(shapes, division, to_plan.codec(config))
  frozen = 0
  if config.lora.rank:
    frozen_shapes = config.model.shape.parameter_shapes
    frozen = share_bytes(frozen_shapes, division)
    # No step changes the frozen layers, so compilers also keep a copy of them
    # in the compute dtype.
    layer_shapes = {
      path: shape
      for path, shape in frozen_shapes.items()
      if path.startswith(BLOCKS)
    }
    frozen += narrow_bytes(
      layer_shapes, division, on_platform(config, platform).compute_dtype
    )
  return DeviceMemory(
    state=round(state) + factors,
    step=max(
      step_bytes(config, gather, platform), exchange_bytes(config, platform)
    ),
    frozen=frozen,
  )


def exchange_bytes(config: RunConfig, platform: str = "gpu") -> int:
  """Returns the bytes that an exchange adds to a device's state between steps.

  One exchange sends one fragment (a part of the parameters). Messages count as
  float32, whatever the codec is. Example: if a TPU holds 3.37 GB of parameters,
  an exchange of all of them needs three copies, 10.1 GB. On a GPU, it needs two
  copies. The result is 0 in these cases:

  - Inner steps go on during the exchange.
  - The method averages gradients.
  - There is one replica, or `mesh.layout` is "stacked".
  """
  method = config.sync.named
  has_own_devices = config.mesh.layout == "mesh"
  if not has_own_devices or config.mesh.num_replicas == 1:
    return 0
  if method.exchanged == "gradient" or method.schedule.overlap_steps > 0:
    return 0
  fragment_bytes = math.ceil(
    share_bytes(config.trained_shapes, config.division)
    / method.schedule.num_fragments
  )
  return _EXCHANGE_COPIES[platform] * fragment_bytes


def num_copies(config: RunConfig) -> float:
  """Returns the size of a replica's state, in copies of trained parameters.

  Where the run has them, these count: the parameters, the states of the
  optimizers, the residual of error feedback, the average of the parameters, the
  outer parameters, and pseudo-gradients whose mean is not applied yet. Example:
  of P = 16 fragments (parts of the parameters) with H = 16 and tau = 1, one
  pseudo-gradient at a time waits for its mean: 1/16 of a copy.
  """
  copies = 1 + optimizer_copies(config)
  if config.exchange.feedback > 0:
    copies += 1  # The residual.
  if config.outer.average_power > 0:
    copies += 1  # The average of the parameters.
  method = config.sync.named
  if method.exchanged == "gradient":
    return copies
  copies += 1  # The outer parameters.
  if config.outer.is_schedule_free:
    copies += 2  # The newest step z, and the average x.
  elif config.outer.momentum > 0:
    copies += 1
  schedule = method.schedule
  # Number of fragments whose mean is not applied yet.
  num_in_flight = math.ceil(
    schedule.overlap_steps * schedule.num_fragments / schedule.sync_interval
  )
  return copies + num_in_flight / schedule.num_fragments


def optimizer_copies(config: RunConfig) -> float:
  """Returns how many values the inner optimizer keeps for a parameter.

  It is 2 for Adam, 1 for Lion, and for SGD 1 with momentum and 0 without. Muon
  keeps one value for each parameter of a layer and two for any other, so the
  result is a mean. Any other optimizer counts as Adam.
  """
  if config.inner.optimizer == "sgd":
    return 1.0 if config.inner.momentum > 0 else 0.0
  if config.inner.optimizer != "muon":
    return _OPTIMIZER_COPIES.get(config.inner.optimizer, 2.0)
  layers_size, other_size = trained_sizes(config)
  return 2 - layers_size / (layers_size + other_size)


def factor_bytes(shapes: Shapes, division: Division, codec: Codec) -> int:
  """Returns the bytes of low-rank factors that the codec keeps on a device.

  Args:
    shapes: Shapes of the exchanged leaves, by path.
    division: How a replica is divided among its devices.
    codec: Codec with which the run begins (`to_plan.codec`). Only a `low_rank`
      codec keeps factors. For any other codec the result is 0.
  """
  if not isinstance(codec, LowRank):
    return 0
  total = 0
  for path, shape in shapes.items():
    factor_shape = codec.factor_shape(stacked_shape(path, shape))
    if factor_shape is not None:
      total += leaf_bytes(division, f"{path}/right", factor_shape)
  return total
