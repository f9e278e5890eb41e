"""Compiles the program of a run and collects what its page shows."""

import time

import jax

from dilocox_jax.config import RunConfig
from experiments.compilation.analysis import analyse
from experiments.compilation.page import Compiled
from experiments.compilation.program import Program, steady_program
from experiments.compilation.topology import (
  check_mesh,
  memory_bytes,
  topology_devices,
)


def compiled_report(
  config: RunConfig, topology: str, num_slices: int
) -> Compiled:
  """Compiles a run for slices that need not exist.

  Args:
    config: Config of the run.
    topology: Kind and size of a slice, e.g. "v5p:4x4x8".
    num_slices: Number of slices.

  Raises:
    ValueError: One line that says what is wrong, e.g. that the compiler found
      no way to fit the program into a chip.
  """
  devices = topology_devices(topology, num_slices)
  check_mesh(config.mesh.num_replicas * config.division.num_devices, devices)
  program = steady_program(config, devices)
  start = time.perf_counter()
  compiled = _compiled(program)
  return Compiled(
    name=f"{config.sync.method}, {config.model.preset or 'own model'}",
    machine=f"{num_slices} x {topology}",
    chip=devices[0].device_kind,
    memory_bytes=memory_bytes(devices[0]),
    compile_s=time.perf_counter() - start,
    analysis=analyse(program, compiled),
  )


def _compiled(program: Program) -> jax.stages.Compiled:
  try:
    return program.lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    reason = str(error).strip().splitlines()[0]
    raise ValueError(
      f"the program does not fit into a chip ({reason[:200]}): take more stages"
      " or data shards, a smaller batch or rank, or mesh.remat='full'"
    ) from error
