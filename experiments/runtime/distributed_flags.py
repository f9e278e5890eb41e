"""Flags by which a training process finds the other processes of its run.

A user, the job file of a cluster or `experiments.launch` sets them. This module
does not load JAX.
"""

from absl import flags
from ml_collections import config_dict

from experiments.runtime import command_line, run_configs
from experiments.runtime.command_line import UsageError
from experiments.runtime.placement import ProcessSettings

DISTRIBUTED = flags.DEFINE_bool(
  "distributed",
  False,
  "Be one of several processes of a run, on one machine or many. Start the "
  "same command everywhere, with a WORKDIR that all share. Sets "
  "mesh.layout=mesh.",
)
COORDINATOR = flags.DEFINE_string(
  "coordinator",
  None,
  "With --distributed: HOST:PORT of process 0, free there and reachable "
  "from all. This and the next two are found where JAX knows the cluster "
  "(Slurm, Kubernetes, Open MPI, TPU).",
)
NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes",
  None,
  "With --distributed: how many processes.",
  lower_bound=1,
)
PROCESS_ID = flags.DEFINE_integer(
  "process_id",
  None,
  "With --distributed: which one this is, from 0. Process 0 writes.",
  lower_bound=0,
)
LOCAL_DEVICES = flags.DEFINE_integer(
  "local_devices",
  None,
  "With --distributed: devices that the CPU of a process stands for; by "
  "default its share of the devices that the run needs. Other devices are "
  "counted.",
  lower_bound=1,
)
START_TIMEOUT_S = flags.DEFINE_float(
  "start_timeout_s",
  120.0,
  "With --distributed: seconds after which a process that has not come is "
  "given up.",
  lower_bound=0.0,
)


@flags.validator(COORDINATOR, "has no port: give HOST:PORT")
def _has_port(coordinator: str | None) -> bool:
  """Whether `coordinator` has a port; True if the flag is not given."""
  return coordinator is None or ":" in coordinator


def process_settings(config: config_dict.ConfigDict) -> ProcessSettings | None:
  """Reads from the flags how this process finds the other processes of its run.

  Args:
    config: Value of --config. With --distributed, its field mesh.layout is set
      to "mesh".

  Returns:
    The settings; None without --distributed.

  Raises:
    UsageError: If one of these flags is given without --distributed, or if
      --process_id is not below --num_processes.
  """
  command_line.refuse_unused(
    COORDINATOR,
    NUM_PROCESSES,
    PROCESS_ID,
    LOCAL_DEVICES,
    START_TIMEOUT_S,
    is_used=DISTRIBUTED.value,
    needs="--distributed",
  )
  if not DISTRIBUTED.value:
    return None
  run_configs.set_field(config, "mesh", "layout", "mesh")
  num_processes = NUM_PROCESSES.value
  process_id = PROCESS_ID.value
  if num_processes is not None and process_id is not None:
    if process_id >= num_processes:
      raise UsageError(
        f"--process_id={process_id} must be less than "
        f"--num_processes={num_processes}: they count from 0"
      )
  return ProcessSettings(
    coordinator=COORDINATOR.value,
    num_processes=num_processes,
    process_id=process_id,
    local_devices=LOCAL_DEVICES.value,
    start_timeout_s=START_TIMEOUT_S.value,
  )


def check_unset(setter: str) -> None:
  """Raises UsageError if the user gives a flag that only `setter` may set.

  Args:
    setter: Name of the program that sets --distributed, --coordinator,
      --num_processes and --process_id itself.
  """
  for flag in (DISTRIBUTED, COORDINATOR, NUM_PROCESSES, PROCESS_ID):
    if flag.present:
      raise UsageError(f"--{flag.name} is set by {setter}: leave it out")
