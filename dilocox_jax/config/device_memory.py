"""Computes the memory that a run needs on one device, from its config.

The bytes of the state that a run keeps between two steps follow from the shapes
of the parameters, and from how devices divide them. Besides the parameters, a
replica keeps trees of the same shapes, such as the moments of Adam. With the
codec `low_rank` it also keeps factors. A device has its part of each. The bytes
are exact for the apply rules of this package with Adam, Lion and SGD, and
nearly exact with Muon (`optimizer_copies`). Any other inner optimizer counts as
Adam, and the correction of a user's rule (`outer.rules.ApplyRule.correct`) is
not counted.

The memory that a step needs in addition is an estimate (`config.step_memory`).
So is the memory of an exchange, if replicas wait for it. A step and such an
exchange follow each other, so a device needs the larger of the two.
"""

import dataclasses
import math

from dilocox_jax.codecs.base import Codec
from dilocox_jax.codecs.low_rank import LowRank, factorizes
from dilocox_jax.config import RunConfig
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
    state: Bytes of the state that is kept between steps.
    step: Bytes that a step needs in addition, or an exchange if it needs more
      (estimated).
    frozen: Bytes of the parameters that are not trained. If several replicas
      are on a device, they share one copy.
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

  The part that a step needs is an estimate, which does not know what a compiler
  adds or saves. Optimizers other than Adam, Muon, Lion and SGD count as Adam.

  Args:
    config: Config of the run.
    device_bytes: Memory of a device (bytes); infinity if it is not known. It
      decides what `mesh.gather="auto"` means (`chosen_gather`).
    platform: Kind of the accelerators: "gpu" or "tpu".
  """
  gather = chosen_gather(config, device_bytes, platform)
  return _memory(config, gather, platform)


def chosen_gather(
  config: RunConfig, device_bytes: float = math.inf, platform: str = "gpu"
) -> str:
  """Returns when the data shards of a pipeline stage collect its layers.

  "stage" collects all layers of a stage once in each step, which sends fewer
  bytes. "layer" collects one layer at a time, which needs less memory. If the
  config says "auto", the result is "stage" if this leaves enough memory free
  (`LEAST_SPARE`), else "layer".

  Args:
    config: Config of the run.
    device_bytes: Memory of a device (bytes); infinity if it is not known.
    platform: Kind of the accelerators: "gpu" or "tpu".

  Returns:
    "stage" or "layer".
  """
  if config.mesh.gather != "auto":
    return config.mesh.gather
  needed_bytes = _memory(config, "stage", platform).total
  if needed_bytes <= (1 - LEAST_SPARE) * device_bytes:
    return "stage"
  return "layer"


def _memory(config: RunConfig, gather: str, platform: str) -> DeviceMemory:
  """Returns the memory that one replica needs on one of its devices.

  Args:
    config: Config of the run.
    gather: When data shards collect layers: "stage" (all layers of the pipeline
      stage once in each step) or "layer" (one layer at a time).
    platform: Kind of the accelerators: "gpu" or "tpu".
  """
  shapes = config.trained_shapes
  division = config.division
  state = num_copies(config) * share_bytes(shapes, division)
  factors = factor_bytes(shapes, division, config.exchange.named_codec)
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
  """Returns the memory that an exchange needs in addition to the state (bytes).

  It is the memory of one device. Example: a device keeps a share of 3.4 GB of
  the parameters. In an exchange of all parameters a TPU needs 10.1 GB more.

  The result is 0 in these cases:

  - Inner steps run during the exchange. The state then has the
    pseudo-gradients in flight.
  - The method averages gradients, which a step has anyway.
  - The replicas do not have devices of their own.

  The number of copies was read from a compiled program for TPUs. On GPUs it
  agrees with the memory that a compiled program needs. Both programs send fp32.
  With another codec, what is sent is smaller and less is needed.

  Args:
    config: Config of the run.
    platform: Kind of the accelerators: "gpu" or "tpu".
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
  """Returns how many copies of the trained parameters a replica keeps.

  The copies are: the parameters, the state of the inner optimizer, the residual
  of error feedback, the average of the parameters, the outer parameters, the
  outer momentum, and the pseudo-gradients in flight. A schedule-free outer
  optimizer keeps two copies in place of the outer momentum. A pseudo-gradient
  is in flight from when it is sent to when its mean is applied. The largest
  number that is in flight at the same time counts. Example: with P = 16
  fragments (parts of the parameters), H = 16 and tau = 1, one fragment is in
  flight, a sixteenth of a copy.
  A method that averages gradients has only the first four.

  Args:
    config: Config of the run.
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
  num_in_flight = math.ceil(
    schedule.overlap_steps * schedule.num_fragments / schedule.sync_interval
  )
  return copies + num_in_flight / schedule.num_fragments


def optimizer_copies(config: RunConfig) -> float:
  """Returns how many copies of the parameters the inner optimizer keeps.

  Adam keeps two copies, Lion one, and SGD one if it has momentum. Muon keeps
  one copy of the layers and two copies of all other leaves, so the result is a
  mean over all trained parameters. (The norms in layers are small, and are
  counted like matrices.)

  Args:
    config: Config of the run.
  """
  if config.inner.optimizer == "sgd":
    return 1.0 if config.inner.momentum > 0 else 0.0
  if config.inner.optimizer != "muon":
    return _OPTIMIZER_COPIES.get(config.inner.optimizer, 2.0)
  layers_size, other_size = trained_sizes(config)
  return 2 - layers_size / (layers_size + other_size)


def factor_bytes(shapes: Shapes, division: Division, codec: Codec) -> int:
  """Returns a device's share of what a low-rank codec keeps (bytes).

  The codec keeps the right factors of an exchange, because the power iteration
  of the next exchange starts from them.

  Args:
    shapes: Shapes of the exchanged leaves, by path.
    division: How a replica is divided among its devices.
    codec: Codec of the exchange. For other codecs the result is 0.
  """
  if not isinstance(codec, LowRank):
    return 0
  total = 0
  for path, shape in shapes.items():
    leaf_shape = stacked_shape(path, shape)
    if factorizes(leaf_shape, codec.rank):
      num_layers, _, num_columns = leaf_shape
      right_shape = (num_layers, num_columns, codec.rank)
      total += leaf_bytes(division, f"{path}/right", right_shape)
  return total
