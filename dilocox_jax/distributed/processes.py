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
import socket
import sys
import uuid
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh, PartitionSpec

from dilocox_jax.distributed import coordinator_store

# A process that sends no heartbeat for so long is taken for dead, and all
# others end. A process in the middle of an exchange with it notices far sooner,
# because a connection closes.
HEARTBEAT_TIMEOUT_S = 30
START_TIMEOUT_S = 120  # Until all processes have come.
_BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
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
) -> None:
  """Joins the processes of a run; must come before any use of a device.

  An argument that is None is taken from the cluster, if JAX knows it.

  Process 0 listens at the coordinator's address and at no other one. Where it
  has that address from the cluster, JAX has it listen at all addresses of the
  machine. `JAX_COORDINATOR_BIND_ADDRESS` names another address in both cases.

  Args:
    coordinator: Address of process 0, host:port.
    num_processes: Number of processes.
    process_id: Number of this process, from 0.

  Raises:
    ValueError: One line, if an argument was neither given nor found.
    LostProcessError: If not all processes came.
  """
  # A program runs in the thread that dispatches it. Otherwise an exchange in a
  # thread of its own (`outer.lone_exchange`) would take one of XLA's threads,
  # of which a process may have few, and the inner steps might wait for it.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  # Its handler would take SIGTERM from the run's own (`stop_signals`).
  jax.config.update("jax_enable_preemption_service", False)
  coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
  given = (coordinator, num_processes, process_id)
  listening = os.environ.get(_BIND_VARIABLE, coordinator)
  if listening and process_id == 0:
    _check_free(listening)
  try:
    jax.distributed.initialize(
      *given,
      coordinator_bind_address=listening,
      cluster_detection_method=None if None in given else "deactivate",
      initialization_timeout=START_TIMEOUT_S,
      heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
      shutdown_timeout_seconds=END_TIMEOUT_S,
    )
  except (ValueError, TypeError, RuntimeError) as error:
    if _blames_a_process(error):
      raise LostProcessError(
        f"not all {num_processes or 'the'} processes came within "
        f"{START_TIMEOUT_S} s: the same command tries again"
      ) from error
    reason = " ".join(str(error).split())
    if None in given:
      reason += (
        " No cluster says so: give --coordinator=HOST:PORT, --num_processes"
        " and --process_id"
      )
    raise ValueError(reason) from error
  _use_gloo()
  try:
    jax.devices()
  except RuntimeError as error:
    raise ValueError(str(error).splitlines()[0]) from error


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
    hostname=_own_address(state.coordinator_address),
  )
  xla_bridge.register_backend_factory(
    "cpu",
    functools.partial(xla_bridge.make_cpu_client, gloo),
    fail_quietly=False,
  )


def _own_address(coordinator: str) -> str:
  """Returns the address of this machine from which it reaches another one."""
  family, address = _resolved(coordinator)
  with socket.socket(family, socket.SOCK_DGRAM) as probe:
    probe.connect(address)  # Of a datagram's socket: nothing is sent.
    return probe.getsockname()[0]


def _check_free(address: str) -> None:
  """Raises ValueError if process 0 cannot listen; JAX would be aborted."""
  try:
    family, place = _resolved(address)
    socket.create_server(place[:2], family=family).close()
  except OSError as error:
    raise ValueError(
      f"process 0 cannot listen at {address} ({error.strerror}): give an "
      f"address of its machine and a free port, or name one in {_BIND_VARIABLE}"
    ) from error


def _resolved(address: str) -> tuple[socket.AddressFamily, Any]:
  """Returns the family and the place of host:port."""
  host, _, port = address.rpartition(":")
  family, *_, place = socket.getaddrinfo(host.strip("[]"), port)[0]
  return family, place


def open_connections(mesh: Mesh) -> None:
  """Connects the devices of every group along the axes of a mesh.

  Gloo gives a group 30 s to form when it is first used. Later one process may
  compile for minutes what another finds in its cache, so all groups are formed
  at the start, when the processes are at the same place.
  """
  for size in range(len(mesh.axis_names)):
    for axes in itertools.combinations(mesh.axis_names, size + 1):
      # XLA would compute a sum of constants without a message.
      meet = jax.shard_map(
        lambda axes=axes: jax.lax.psum(jax.lax.axis_index(axes), axes),
        mesh=mesh,
        in_specs=(),
        out_specs=PartitionSpec(),
        check_vma=False,
      )
      jax.block_until_ready(jax.jit(meet)())


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
