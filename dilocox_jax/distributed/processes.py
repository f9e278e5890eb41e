"""Connects the processes of a run, and lets them compare and share values.

`start` connects several processes (JAX's multi-controller runtime). A run of
one process does not need it, and may call the other functions, too.
"""

import atexit
import contextlib
import functools
import itertools
import os
import pathlib
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from jax.sharding import Mesh, PartitionSpec

from dilocox_jax.distributed import addresses, coordinator_store, rendezvous
from dilocox_jax.distributed.lifelines import HEARTBEAT_TIMEOUT_S, Lifelines

START_TIMEOUT_S = 120  # All processes must connect within this time.
END_TIMEOUT_S = 600  # Process 0 must write the report within this time.
_BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
_GIVE_FLAGS = "Give --coordinator=HOST:PORT, --num_processes and --process_id"

_IS_GONE = (
  "another process of this run is gone: its own last lines say why, and the "
  "same command continues the run"
)
_TRY_AGAIN = 75  # EX_TEMPFAIL in sysexits.h.

# Words in errors of JAX's backends which mean that another process does not
# answer.
_LOST_PROCESS = re.compile(
  r"gloo|nccl|heartbeat|coordination|connection (reset|closed|refused)|barrier"
  r"|unavailable:|deadline_exceeded|broken pipe",
  re.IGNORECASE,
)
# Errors of XLA begin with a status, such as "UNAVAILABLE: ".
_STATUS = re.compile("[A-Z_]+: ")


class LostProcessError(RuntimeError):
  """Says that another process of the run is gone. The message is one line."""


def start(
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  run: str = "",
  timeout_s: float = START_TIMEOUT_S,
  on_lost: Callable[[LostProcessError, int], None] | None = None,
) -> None:
  """Connects the processes of a run. It must be called before a device is used.

  If `coordinator`, `num_processes` or `process_id` is None, it is read from the
  environment of the cluster. JAX must know this kind of cluster. On any machine
  the environment variable `JAX_COORDINATOR_ADDRESS` can give `coordinator`.
  Process 0 refuses processes of other runs.

  Process 0 listens only at the coordinator's address, or at all addresses of
  its machine if that address was read from the cluster. The environment
  variable `JAX_COORDINATOR_BIND_ADDRESS` can name another address.

  Two settings of JAX are changed: a program on a CPU runs in the thread that
  dispatches it, and JAX does not handle SIGTERM.

  Args:
    coordinator: Address of process 0, host:port.
    num_processes: Number of processes of the run.
    process_id: Number of this process, from 0.
    run: Hexadecimal text that identifies the run. All its processes pass the
      same text.
    timeout_s: Seconds to wait for all processes.
    on_lost: Function (error, number of this process) that ends this process. A
      thread calls it if another process is lost after all have connected. None:
      the error is printed, and this process ends with exit code 75.

  Raises:
    ValueError: If an argument was neither given nor found, or is wrong; if
      process 0 refuses this process; or if JAX cannot start.
    LostProcessError: If not all processes came in time, or one has gone again.
  """
  # A program runs in the thread that dispatches it. Otherwise an exchange in a
  # thread (`rounds.exchange_thread`) would take one of XLA's threads. A process
  # may have few of them, and the inner steps might wait for the exchange.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  # JAX's handler of SIGTERM would replace that of the run (`stop_signals`).
  jax.config.update("jax_enable_preemption_service", False)
  coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
  listening = os.environ.get(_BIND_VARIABLE, coordinator)
  arguments = _complete(coordinator, num_processes, process_id, timeout_s)
  # JAX's runtime would abort this process if another one did not come.
  try:
    connections = rendezvous.wait_for_processes(
      rendezvous.Process(run, arguments.num_processes, arguments.process_id),
      coordinator=arguments.coordinator,
      listening=listening,
      timeout_s=timeout_s,
    )
  except TimeoutError as error:
    raise LostProcessError(str(error)) from error
  lifelines = Lifelines(
    functools.partial(
      on_lost or _end, LostProcessError(_IS_GONE), arguments.process_id
    )
  )
  coordinator_of_jax = arguments.coordinator
  if arguments.process_id:
    coordinator_of_jax = lifelines.relay(arguments.coordinator)
  try:
    jax.distributed.initialize(
      coordinator_of_jax,
      arguments.num_processes,
      arguments.process_id,
      local_device_ids=arguments.local_device_ids,
      coordinator_bind_address=listening,
      cluster_detection_method="deactivate",
      initialization_timeout=START_TIMEOUT_S,
      heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
      shutdown_timeout_seconds=END_TIMEOUT_S,
    )
  except (ValueError, TypeError, RuntimeError) as error:
    if _is_from_lost_process(error):
      raise LostProcessError(
        f"one of {arguments.num_processes} processes came and has gone again: "
        "the same command tries again"
      ) from error
    raise ValueError(" ".join(str(error).split())) from error
  lifelines.watch(connections)
  # Functions that are registered later run earlier. So this process leaves
  # before JAX's runtime ends, in which all processes wait for each other.
  atexit.register(lifelines.leave)
  coordinator_store.at_end(lifelines.leave)
  _use_gloo(arguments.coordinator)
  try:
    jax.devices()
  except RuntimeError as error:
    raise ValueError(str(error).splitlines()[0]) from error


def _end(error: LostProcessError, number: int) -> NoReturn:
  """Prints an error, and ends this process with exit code 75 ("try again")."""
  print(f"error: process {number}: {error}", file=sys.stderr)
  exit_now(_TRY_AGAIN)


class _JaxArguments(NamedTuple):
  """The arguments of `jax.distributed.initialize` for this process.

  Attributes:
    coordinator: Address of process 0, host:port.
    num_processes: Number of processes of the run.
    process_id: Number of this process, from 0.
    local_device_ids: Numbers of this machine's devices that the process uses.
      None: JAX decides.
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
) -> _JaxArguments:
  """Reads arguments of `start` that are None from the cluster's environment.

  Raises:
    ValueError: If an argument was neither given nor found, or if `process_id`
      is not below `num_processes`.
  """
  # JAX itself reads them with this class, which is not public.
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
  return _JaxArguments(coordinator, num_processes, process_id, local_device_ids)


def _use_gloo(coordinator: str) -> None:
  """Makes CPUs exchange by gloo, at this machine's address toward process 0."""
  # JAX would listen at the address that the host's name stands for. Other
  # machines may not reach this address, or strangers may. JAX has no public
  # function to choose another one.
  from jax._src import distributed, xla_bridge
  from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

  state = distributed.global_state
  gloo = _jax.make_gloo_tcp_collectives(
    distributed_client=state.client,
    hostname=addresses.own_address(coordinator),
  )
  xla_bridge.register_backend_factory(
    "cpu",
    functools.partial(xla_bridge.make_cpu_client, gloo),
    fail_quietly=False,
  )


def open_connections(mesh: Mesh) -> None:
  """Connects all groups of devices that collectives over a mesh may use.

  All processes must call it, and each waits for all others.

  When a group is first used, gloo gives its processes 30 s to connect. Later in
  a run this may not be enough, because one process may still compile.

  Args:
    mesh: The mesh. There are groups of devices along each axis with several
      devices, and along each combination of such axes.
  """
  # Along an axis of one device nothing is sent.
  names = [name for name in mesh.axis_names if mesh.shape[name] > 1]
  groups = (
    axes
    for size in range(1, len(names) + 1)
    for axes in itertools.combinations(names, size)
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
  """Drops all standard output in a `with` statement, also that of C++ code."""
  # Gloo prints a line for every group that it connects, and no setting turns
  # that off.
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
  """Returns whether this is process 0, which writes the files of the run."""
  return jax.process_index() == 0


def from_main(value: Any) -> Any:
  """Returns process 0's value in every process.

  All processes must call it, and each waits for all others.

  Args:
    value: Value of types that JSON has. Only process 0's value is read. With
      several processes, tuples become lists in the result.
  """
  sent_value = value if is_main() else None
  return coordinator_store.allgather(sent_value)[0]


def share_directory(directory: pathlib.Path) -> bool:
  """Returns whether a directory is the same one in all processes.

  All processes must call it, and each waits for all others.

  Args:
    directory: A directory in which process 0 may write.
  """
  if jax.process_count() == 1:
    return True
  # The name is new, so no file system has cached whether the file exists.
  name = f".common-{uuid.uuid4().hex}"
  if is_main():
    (directory / name).touch(exist_ok=False)
  # Process 0 has made the file before the other processes get its name.
  mark = directory / from_main(name)
  is_seen = coordinator_store.allgather(mark.exists())
  if is_main():
    mark.unlink()
  return all(is_seen)


def check_equal(**values: Any) -> None:
  """Checks that all processes have the same values.

  All processes must call it, and each waits for all others. If a value differs,
  every process gets the error, so that none waits for a process that has ended.

  Args:
    **values: Named values of types that JSON has.

  Raises:
    ValueError: If a value differs. The message names the first process that has
      another value than process 0, and the name of this value.
  """
  gathered = coordinator_store.allgather(values)
  values_of_main = gathered[0]
  for process, values_there in enumerate(gathered):
    for name in values:
      if values_there.get(name) != values_of_main.get(name):
        raise ValueError(
          f"process {process} has another {name} than process 0: start all with"
          " the same flags, on the same files"
        )


@contextlib.contextmanager
def detect_lost_process() -> Iterator[None]:
  """Turns an error that a lost process causes into a `LostProcessError`.

  It is a context manager. Other errors in its `with` statement are unchanged.
  """
  try:
    yield
  except LostProcessError:
    raise
  except Exception as error:
    if jax.process_count() > 1 and _is_from_lost_process(error):
      raise LostProcessError(_IS_GONE) from error
    raise


def _is_from_lost_process(error: BaseException | None) -> bool:
  """Returns whether an error, or a cause of it, is about a lost connection."""
  kinds = (RuntimeError, ValueError, TimeoutError, jax.errors.JaxRuntimeError)
  while error:
    text = str(error)
    # A ValueError without a status is about a bad value. Its message may hold
    # any word that a user typed.
    is_bad_value = type(error) is ValueError and not _STATUS.match(text)
    is_candidate = type(error) in kinds and not is_bad_value
    if is_candidate and _LOST_PROCESS.search(text):
      return True
    error = error.__cause__ or error.__context__
  return False


def exit_now(code: int) -> NoReturn:
  """Ends this process at once, without waiting for other processes."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)
