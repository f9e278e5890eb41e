"""What the TPU's compiler says of inner steps, without a TPU.

libtpu compiles for chips that are not there (`pip install 'dilocox_jax[tpu]'`).
So the memory that a step needs beside parameters and optimizer is known before
a machine is rented.
"""

import os

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from dilocox_jax.checks import extra_package, require
from dilocox_jax.config import RunConfig
from dilocox_jax.training import build
from experiments.benchmarks.inner import STEPS, first_carry, steps_program

KERNEL = "tpu_custom_call"  # Name of a Pallas kernel in a compiled program.
# Otherwise libtpu asks the cloud's server for the machine that it is on, and
# keeps other processes from compiling.
_WITHOUT_CHIPS = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5p-8",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def compiled_for_tpu(config: RunConfig, topology: str) -> jax.stages.Compiled:
  """Compiles the inner steps of all replicas for one chip.

  Args:
    config: Config of a run whose replicas are stacked.
    topology: Chips as libtpu names them, e.g. "v5p:2x2x1" or "v5e:2x2"; one of
      them holds all replicas.

  Raises:
    ValueError: If libtpu is missing, does not know the chips, or replicas have
      several devices.
  """
  require(
    config.mesh.layout == "stacked",
    f"mesh.layout={config.mesh.layout!r} has several chips, and one is "
    "compiled for: take mesh.layout='stacked'",
  )
  extra_package("libtpu", "compiling for a TPU", "tpu")
  for name, value in _WITHOUT_CHIPS.items():
    os.environ.setdefault(name, value)
  try:
    chips = topologies.get_topology_desc(topology, platform="tpu")
  except RuntimeError as error:
    reason = str(error).splitlines()[0]
    raise ValueError(f"libtpu has no chips {topology!r}: {reason}") from error
  programs, data = build.programs(config, platform="tpu"), config.data
  shape = (config.mesh.num_replicas, STEPS)
  shape += (data.batch_size, data.sequence_length + 1)
  place = SingleDeviceSharding(chips.devices[0])
  shapes = (
    jax.eval_shape(lambda: first_carry(programs)),
    (jax.ShapeDtypeStruct(shape, jnp.int32)),
  )
  carry, batches = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes
  )
  return steps_program(programs).lower(carry, batches).compile()
