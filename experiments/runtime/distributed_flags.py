"""Flags by which a training process finds the others of its run.

A cluster's job file sets these flags, and so does `experiments.launch`, which
must check them before it starts anything. So they are read without JAX.
"""

import collections
import socket
from collections.abc import Sequence

from absl import flags

from dilocox_jax.config import RunConfig
from experiments.runtime.command_line import UsageError, refuse_unused

# In --help, flags are listed under the program that asks for them, not here.
flags.disclaim_key_flags()

NAMES = ("coordinator", "num_processes", "process_id")


def define_flags() -> None:
  """Defines --distributed and the flags that need it."""
  flags.DEFINE_bool(
    "distributed",
    False,
    "Be one of several processes of a run, on one machine or many. Start the "
    "same command everywhere, with a WORKDIR that all share. Sets "
    "mesh.layout=mesh.",
  )
  flags.DEFINE_string(
    "coordinator",
    None,
    "With --distributed: HOST:PORT of process 0, free there and reachable "
    "from all. This and the next two are found where JAX knows the cluster "
    "(Slurm, Kubernetes, Open MPI, TPU).",
  )
  for name, least, text in (
    ("num_processes", 1, "how many processes."),
    ("process_id", 0, "which one this is, from 0. Process 0 writes."),
    (
      "local_devices",
      1,
      "devices that the CPU of a process stands for; by default its share of "
      "what the run needs. Other devices are counted.",
    ),
  ):
    text = f"With --distributed: {text}"
    flags.DEFINE_integer(name, None, text, lower_bound=least)
  flags.DEFINE_float(
    "start_timeout_s",
    120.0,
    "With --distributed: seconds after which a process that has not come is "
    "given up.",
    lower_bound=0.0,
  )


def check_flags(values: flags.FlagValues) -> bool:
  """Returns whether this is one of several processes of a run.

  Sets mesh.layout of --config, as several processes need "mesh".

  Raises:
    UsageError: If the flags do not go together.
  """
  names = (*NAMES, "local_devices", "start_timeout_s")
  uses = [(name, values.distributed, "--distributed") for name in names]
  refuse_unused(values, uses)
  if not values.distributed:
    return False
  values.config.mesh.layout = "mesh"
  if values.coordinator is not None and ":" not in values.coordinator:
    raise UsageError(
      f"--coordinator={values.coordinator} has no port: give HOST:PORT"
    )
  if None not in (values.num_processes, values.process_id):
    if values.process_id >= values.num_processes:
      raise UsageError(
        f"--process_id={values.process_id} must be less than "
        f"--num_processes={values.num_processes}: they count from 0"
      )
  return True


def check_unset(values: flags.FlagValues, setter: str) -> None:
  """Raises UsageError if a flag is given that `setter` sets."""
  for name in (*NAMES, "distributed"):
    if values[name].present:
      raise UsageError(f"--{name} is set by {setter}: leave it out")


def free_port() -> int:
  """Returns a port of this machine that nobody listens on."""
  with socket.socket() as probe:
    probe.bind(("", 0))
    return probe.getsockname()[1]


def devices_each(config: RunConfig, num_processes: int) -> int:
  """Returns the number of devices of each process.

  Raises:
    UsageError: If the processes cannot share the devices evenly.
  """
  total = config.num_devices
  if total % num_processes:
    mesh = config.mesh
    raise UsageError(
      f"{num_processes} processes cannot share {total} devices alike "
      f"(num_replicas={mesh.num_replicas} x num_data_shards="
      f"{mesh.num_data_shards} x num_stages={mesh.num_stages}): change one"
    )
  return total // num_processes


def check_devices(config: RunConfig, owners: Sequence[int]) -> None:
  """Raises UsageError if the processes lack devices that the run needs.

  Args:
    config: Config of the run.
    owners: Number of the process that has it, for every device.
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
    f"needs {needed} (num_replicas x num_data_shards x num_stages of mesh), as "
    "many in each: change those, the number of processes, or --local_devices"
  )
