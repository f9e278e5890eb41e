"""One run in several processes, by JAX's multi-controller runtime.

Every process builds the same programs over all devices and goes through the
same plan. What they must agree on, they tell each other here; and here a
process notices that another one is gone. In a run of one process these
functions do nothing, so the rest of the project need not ask how many there
are.
"""

import contextlib
import functools
import itertools
import os
import pathlib
import re
import sys
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from jax.sharding import Mesh, PartitionSpec

from dilocox_jax.distributed import addresses, coordinator_store, rendezvous

# A process that sends no heartbeat for so long is taken for dead, and all
# others end. A process in the middle of an exchange with it notices far sooner,
# because a connection closes.
HEARTBEAT_TIMEOUT_S = 30
START_TIMEOUT_S = 120  # Until all processes are there.
_BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
_GIVE_FLAGS = "Give --coordinator=HOST:PORT, --num_processes and --process_id"
END_TIMEOUT_S = 600  # Until the main process has written the report.

# How backends say that another process does not answer.
_SIGNS = re.compile(
  r"gloo|nccl|heartbeat|coordination|connection (reset|closed|refused)|barrier"
  r"|unavailable:|deadline_exceeded|broken pipe",
  re.IGNORECASE,
)
_STATUS = re.compile("[A-Z_]+: ")  # Errors from below Python begin like this.


class LostProcessError(RuntimeError):
  """Another process of the run is gone; the message is one line."""


def start(
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  run: str = "",
  timeout_s: float = START_TIMEOUT_S,
) -> None:
  """Joins the processes of a run; must come before any use of a device.

  An argument that is None is taken from the cluster, if JAX knows it. JAX's
  runtime starts only when all processes are there, because it would abort this
  process if one did not come.

  Process 0 listens at the coordinator's address and at no other one. Where it
  has that address from the cluster, it listens at all addresses of the
  machine. `JAX_COORDINATOR_BIND_ADDRESS` names another address in both cases.

  Args:
    coordinator: Address of process 0, host:port.
    num_processes: Number of processes.
    process_id: Number of this process, from 0.
    run: Hexadecimal text that all processes of the run have in common, and
      those of other runs do not.
    timeout_s: Seconds after which a process that is missing is given up.

  Raises:
    ValueError: One line, if an argument was neither given nor found, or is
      wrong.
    LostProcessError: If not all processes came.
  """
  # A program runs in the thread that dispatches it. Otherwise an exchange in a
  # thread of its own (`rounds.lone_exchange`) would take one of XLA's threads,
  # of which a process may have few, and the inner steps might wait for it.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  # Its handler would take SIGTERM from the run's own (`stop_signals`).
  jax.config.update("jax_enable_preemption_service", False)
  coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
  listening = os.environ.get(_BIND_VARIABLE, coordinator)
  place = _complete(coordinator, num_processes, process_id, timeout_s)
  try:
    rendezvous.wait_for_processes(
      rendezvous.Process(run, place.num_processes, place.process_id),
      coordinator=place.coordinator,
      listening=listening,
      timeout_s=timeout_s,
    )
  except TimeoutError as error:
    raise LostProcessError(str(error)) from error
  try:
    jax.distributed.initialize(
      place.coordinator,
      place.num_processes,
      place.process_id,
      local_device_ids=place.local_device_ids,
      coordinator_bind_address=listening,
      cluster_detection_method="deactivate",
      initialization_timeout=START_TIMEOUT_S,
      heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
      shutdown_timeout_seconds=END_TIMEOUT_S,
    )
  except (ValueError, TypeError, RuntimeError) as error:
    if _blames_a_process(error):
      raise LostProcessError(
        f"one of {place.num_processes} processes came and has gone again: the "
        "same command tries again"
      ) from error
    raise ValueError(" ".join(str(error).split())) from error
  _use_gloo()
  try:
    jax.devices()
  except RuntimeError as error:
    raise ValueError(str(error).splitlines()[0]) from error


class _Place(NamedTuple):
  """What `jax.distributed.initialize` has to know of a process.

  Attributes:
    coordinator: Address of process 0, host:port.
    num_processes: Number of processes.
    process_id: Number of this process.
    local_device_ids: Numbers of this machine's devices that the process takes;
      None: all, or those of JAX_LOCAL_DEVICE_IDS.
  """

  coordinator: str
  num_processes: int
  process_id: int
  local_device_ids: Sequence[int] | None


def _complete(
  coordinator: str | None,
  num_processes: int | None,
  process_id: int | None,
  timeout_s: float,
) -> _Place:
  """Takes what is None from the cluster, as JAX would when it starts.

  JAX has no public name for that.

  Raises:
    ValueError: One line, if something was neither given nor found.
  """
  from jax._src.clusters import ClusterEnv

  local_device_ids = None
  is_complete = None not in (coordinator, num_processes, process_id)
  if not is_complete:
    try:
      coordinator, num_processes, process_id, local_device_ids = (
        ClusterEnv.auto_detect_unset_distributed_params(
          coordinator,
          num_processes,
          process_id,
          local_device_ids=None,
          cluster_detection_method=None,
          initialization_timeout=round(timeout_s),
        )
      )
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
      reason = " ".join(str(error).split())
      raise ValueError(f"{reason}. {_GIVE_FLAGS}") from error
  if coordinator is None or num_processes is None or process_id is None:
    raise ValueError(f"no cluster says where process 0 is. {_GIVE_FLAGS}")
  if not 0 <= process_id < num_processes:
    raise ValueError(
      f"process_id={process_id} must be at least 0 and less than "
      f"num_processes={num_processes}"
    )
  if "JAX_LOCAL_DEVICE_IDS" in os.environ:
    local_device_ids = None  # JAX reads the variable.
  return _Place(coordinator, num_processes, process_id, local_device_ids)


def _use_gloo() -> None:
  """Has CPUs exchange by gloo, at the address that reaches process 0.

  JAX has no public name for that, and takes the address of the host's name. It
  may be one that no other machine reaches, or one that strangers reach.
  """
  from jax._src import distributed, xla_bridge
  from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

  state = distributed.global_state
  assert state.coordinator_address  # It has been found by now.
  gloo = _jax.make_gloo_tcp_collectives(
    distributed_client=state.client,
    hostname=addresses.own_address(state.coordinator_address),
  )
  xla_bridge.register_backend_factory(
    "cpu",
    functools.partial(xla_bridge.make_cpu_client, gloo),
    fail_quietly=False,
  )


def open_connections(mesh: Mesh) -> None:
  """Connects the devices of every group along the axes of a mesh.

  Gloo gives a group 30 s to form when it is first used. Later one process may
  compile for minutes what another finds in its cache, so all groups are formed
  at the start, when the processes are at the same place.
  """
  groups = (
    axes
    for size in range(len(mesh.axis_names))
    for axes in itertools.combinations(mesh.axis_names, size + 1)
  )
  with _silent_output():
    for axes in groups:
      # XLA would compute a sum of constants without a message.
      meet = jax.shard_map(
        lambda axes=axes: jax.lax.psum(jax.lax.axis_index(axes), axes),
        mesh=mesh,
        in_specs=(),
        out_specs=PartitionSpec(),
        check_vma=False,
      )
      jax.block_until_ready(jax.jit(meet)())


@contextlib.contextmanager
def _silent_output() -> Iterator[None]:
  """Drops what is written to standard output, by C++ too.

  Gloo prints a line for every group that it connects, and has no setting for
  that. In the log of a cluster these lines would hide the first of the run.
  """
  sys.stdout.flush()
  output = os.dup(1)
  nowhere = os.open(os.devnull, os.O_WRONLY)
  try:
    os.dup2(nowhere, 1)
    yield
  finally:
    os.dup2(output, 1)
    os.close(nowhere)
    os.close(output)


def is_main() -> bool:
  """Whether this is process 0, which writes the files of the run."""
  return jax.process_index() == 0


def from_main(value: Any) -> Any:
  """Returns process 0's value in every process; all wait for all.

  Args:
    value: Any value that JSON has; only process 0's is used.
  """
  return coordinator_store.allgather(value if is_main() else None)[0]


def share_directory(directory: pathlib.Path) -> bool:
  """Whether all processes see the same directory; all wait for all.

  Args:
    directory: A directory in which process 0 may write.
  """
  if jax.process_count() == 1:
    return True
  # No file system has cached whether a file with a new name exists.
  name = f".common-{uuid.uuid4().hex}"
  if is_main():
    (directory / name).touch(exist_ok=False)
  mark = directory / from_main(name)  # The others get it after that.
  exists = coordinator_store.allgather(mark.exists())
  if is_main():
    mark.unlink()
  return all(exists)


def check_equal(**values: Any) -> None:
  """Raises ValueError with one line if this process differs from process 0.

  Args:
    **values: Named values that JSON has.
  """
  found = coordinator_store.allgather(values)
  main, own = found[0], found[jax.process_index()]
  differing = [name for name in values if own[name] != main.get(name)]
  if differing:
    raise ValueError(
      f"process {jax.process_index()} has another {differing[0]} than process "
      "0: start all with the same flags, on the same files"
    )


@contextlib.contextmanager
def detect_lost_process() -> Iterator[None]:
  """Turns errors that a lost process causes into `LostProcessError`."""
  try:
    yield
  except LostProcessError:
    raise
  except Exception as error:
    if jax.process_count() > 1 and _blames_a_process(error):
      raise LostProcessError(
        "another process of this run is gone: its own last lines say why, and "
        "the same command continues the run"
      ) from error
    raise


def _blames_a_process(error: BaseException | None) -> bool:
  """Whether an error, or one below it, is about a lost connection."""
  kinds = (RuntimeError, ValueError, TimeoutError, jax.errors.JaxRuntimeError)
  while error:
    text = str(error)
    # The message of a bad value may hold any word that a user typed.
    is_own = type(error) is ValueError and not _STATUS.match(text)
    if type(error) in kinds and not is_own and _SIGNS.search(text):
      return True
    error = error.__cause__ or error.__context__
  return False


def exit_now(code: int) -> NoReturn:
  """Ends this process without waiting for the others, which may be gone."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)
