"""One run in several processes, by JAX's own multi-controller runtime.

Every process builds the same programs over all devices and walks the same
plan; what they must agree on goes through here, and so does the end of a
process whose peers are gone. In a run of one process nothing here does
anything, so the rest of the project need not ask how many there are.
"""

import contextlib
import itertools
import json
import os
import pathlib
import re
import sys
import uuid
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh, PartitionSpec

from dilocox_jax.distributed import coordinator_store

# A process that says nothing for so long is taken for dead, and all others
# end. Who is in the middle of an exchange with it notices far sooner, by a
# connection that closes.
HEARTBEAT_TIMEOUT_S = 30
START_TIMEOUT_S = 120  # For all processes to come.
END_TIMEOUT_S = 600  # For the one that writes the report.

# How backends say that another process does not answer.
_SIGNS = re.compile(
  r"gloo|nccl|heartbeat|coordination|connection (reset|closed|refused)|barrier"
  r"|unavailable:|deadline_exceeded|broken pipe",
  re.IGNORECASE,
)
_STATUS = re.compile("[A-Z_]+: ")  # Begins what comes from below Python.


class LostProcessError(RuntimeError):
  """Another process of the run is gone; one line."""


def start(
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
) -> None:
  """Joins the processes of a run; must come before any use of a device.

  What is not given is taken from the cluster, where JAX knows it.

  Args:
    coordinator: Address of process 0, host:port.
    num_processes: How many take part.
    process_id: Which one this is, from 0.

  Raises:
    ValueError: If something was neither given nor found; one line.
    LostProcessError: If not all came.
  """
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  # It would swallow SIGTERM, and nothing here asks it.
  jax.config.update("jax_enable_preemption_service", False)
  given = (coordinator, num_processes, process_id)
  try:
    jax.distributed.initialize(
      *given,
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
  try:
    jax.devices()
  except RuntimeError as error:
    raise ValueError(
      f"{str(error).splitlines()[0]} (between CPUs, the host name of this "
      "machine must resolve: see /etc/hosts)"
    ) from error


def open_connections(mesh: Mesh) -> None:
  """Lets the devices of every group along a mesh's axes find each other.

  Gloo gives a group 30 s to form when it is first used. Later the processes
  may be far apart, as one has to compile what another finds in its cache; so
  all groups are formed at the start, while they are together.
  """
  for size in range(len(mesh.axis_names)):
    for axes in itertools.combinations(mesh.axis_names, size + 1):
      # XLA would do a sum of constants without asking anyone.
      meet = jax.shard_map(
        lambda axes=axes: jax.lax.psum(jax.lax.axis_index(axes), axes),
        mesh=mesh,
        in_specs=(),
        out_specs=PartitionSpec(),
        check_vma=False,
      )
      jax.block_until_ready(jax.jit(meet)())


def num_processes() -> int:
  """How many processes take part."""
  return jax.process_count()


def is_main() -> bool:
  """Whether this process is the one that writes what there is one of."""
  return jax.process_index() == 0


def from_main(value: Any) -> Any:
  """Process 0's value, in every process; all wait for all.

  Args:
    value: Anything that JSON can hold; only process 0's is looked at.
  """
  if num_processes() == 1:
    return value
  own = json.dumps(value).encode() if is_main() else b""
  return json.loads(coordinator_store.allgather(own)[0])


def from_all(value: Any) -> list[Any]:
  """Every process's value, by process, in every process; all wait for all.

  Args:
    value: Anything that JSON can hold.
  """
  told = coordinator_store.allgather(json.dumps(value).encode())
  return [json.loads(each) for each in told]


def share_directory(directory: pathlib.Path) -> bool:
  """Whether all processes see one directory; all wait for all.

  Args:
    directory: Where process 0 may write.
  """
  if num_processes() == 1:
    return True
  # A name that no one has asked for before is in no file system's cache.
  own = directory / f".common-{uuid.uuid4().hex}"
  if is_main():
    own.touch()
  mark = directory / from_main(own.name)  # Told once it is there.
  found = from_all(mark.exists())
  if is_main():
    mark.unlink()
  return all(found)


def check_equal(**values: Any) -> None:
  """Raises ValueError, with one line, where this process differs from 0.

  Args:
    **values: By name, anything that JSON can hold.
  """
  own = json.loads(json.dumps(values))
  main = from_main(own)
  differing = [name for name in own if own[name] != main[name]]
  if differing:
    raise ValueError(
      f"process {jax.process_index()} has another {differing[0]} than process "
      "0: start all with the same flags, on the same files"
    )


@contextlib.contextmanager
def detect_lost_process() -> Iterator[None]:
  """Turns whatever a lost process made fail inside into `LostProcessError`."""
  try:
    yield
  except LostProcessError:
    raise
  except Exception as error:
    if num_processes() > 1 and _blames_a_process(error):
      raise LostProcessError(
        "another process of this run is gone: its own last words say why, and "
        "the same command continues the run"
      ) from error
    raise


def _blames_a_process(error: BaseException | None) -> bool:
  """Whether JAX, Orbax or a backend complains of a process, here or below."""
  kinds = (RuntimeError, ValueError, TimeoutError, jax.errors.JaxRuntimeError)
  while error:
    text = str(error)
    # A bad value that a user typed may hold any word.
    is_own = type(error) is ValueError and not _STATUS.match(text)
    if type(error) in kinds and not is_own and _SIGNS.search(text):
      return True
    error = error.__cause__ or error.__context__
  return False


def exit_now(code: int) -> NoReturn:
  """Ends this process without waiting for the others, who may be gone."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)
