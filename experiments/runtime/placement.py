"""Says how processes of a run find each other, and how they share devices."""

import collections
import dataclasses
import socket
from collections.abc import Sequence

from dilocox_jax.config import RunConfig
from experiments.runtime.command_line import UsageError


@dataclasses.dataclass(frozen=True)
class ProcessSettings:
  """How this process finds the other processes of its run.

  On a cluster that JAX knows, such as Slurm, the first three fields may be
  None: JAX finds them.

  Attributes:
    coordinator: HOST:PORT of process 0.
    num_processes: Number of processes.
    process_id: Number of this process, from 0.
    local_devices: Number of devices into which JAX divides the CPU of this
      process; None: an equal share of the devices that the run needs, if
      `num_processes` is given.
    start_timeout_s: How long the processes wait for each other at the start
      (seconds).
  """

  coordinator: str | None
  num_processes: int | None
  process_id: int | None
  local_devices: int | None
  start_timeout_s: float

  def num_devices(self, config: RunConfig) -> int:
    """Returns into how many devices JAX divides the CPU of this process.

    It is `local_devices`, or else an equal share of the devices that the run
    needs. If `num_processes` is None too, it is 0: the number is left to JAX.

    Raises:
      UsageError: If the devices cannot be divided evenly among the processes.
    """
    if self.local_devices:
      return self.local_devices
    if self.num_processes:
      return devices_each(config, self.num_processes)
    return 0


def free_port() -> int:
  """Returns a port of this machine that no program listens on."""
  with socket.socket() as probe:
    probe.bind(("", 0))
    return probe.getsockname()[1]


def devices_each(config: RunConfig, num_processes: int) -> int:
  """Returns the number of devices of each process of a run.

  Raises:
    UsageError: If the devices cannot be divided evenly among the processes.
  """
  total = config.num_devices
  if total % num_processes:
    raise UsageError(
      f"{num_processes} processes cannot share {total} devices alike "
      f"({_factors(config)}): change one"
    )
  return total // num_processes


def check_devices(config: RunConfig, owners: Sequence[int]) -> None:
  """Raises UsageError unless the processes have the devices that a run needs.

  All together must have exactly `config.num_devices`, and each equally many.
  `owners` has, for each device, the number of the process that has it.
  """
  shares = sorted(set(collections.Counter(owners).values()))
  needed = config.num_devices
  if len(shares) == 1 and len(owners) == needed:
    return
  share = f"{shares[0]} device{'' if shares[0] == 1 else 's'}"
  if len(shares) > 1:
    share = f"{shares[0]} to {shares[-1]} devices"
  raise UsageError(
    f"the processes have {share} each, {len(owners)} together, and the run "
    f"needs {needed} ({_factors(config)}), as many in each: change those, the "
    "number of processes, or --local_devices"
  )


def _factors(config: RunConfig) -> str:
  """Names the fields of the mesh whose product is the number of devices."""
  mesh = config.mesh
  factors = (
    f"num_data_shards={mesh.num_data_shards} x num_stages={mesh.num_stages} x "
    f"num_tensor_shards={mesh.num_tensor_shards}"
  )
  if config.uses_mailbox:
    return f"{factors} of one replica"
  return f"num_replicas={mesh.num_replicas} x {factors}"
