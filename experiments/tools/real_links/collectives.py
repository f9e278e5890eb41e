"""One of several processes that time collectives over the links between them.

  python -m experiments.tools.real_links.collectives COORDINATOR COUNT NUMBER
  CASES REPEATS RESULT

CASES is a JSON list of [kind, bytes of an operand]. The last process writes a
JSON list of [seconds, bytes that it sent, share of the cores that was busy] to
the file RESULT: means of the middle half of REPEATS repeats, and the share over
all of them. Among four processes an all-to-all takes one of two times, so that
a median would be one or the other by chance. The time begins when the last
process is ready, a millisecond after the first, and ends when all processes
have met again, less the seconds of such a meeting alone. Processes of a
training run are never ready at the same time, and gloo's gathers between two
are faster if they are: both then send at once.
"""

import json
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dilocox_jax.distributed import link_counter, processes
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.metrics.lines import write_json

_MEETINGS = 20  # Measured alone, to know what one takes.
_APART_S = 0.001  # Between the first process that is ready and the last one.
_CORE_TICKS = pathlib.Path("/proc/stat")  # Described in proc_stat(5).
_MOVES: dict[str, Callable[[jax.Array], jax.Array]] = {
  "all_reduce": lambda x: jax.lax.psum(x, REPLICA_AXIS),
  "all_gather": lambda x: jax.lax.all_gather(x, REPLICA_AXIS),
  "all_to_all": lambda x: jax.lax.all_to_all(x, REPLICA_AXIS, 0, 0),
  "permute": lambda x: jax.lax.ppermute(
    x, REPLICA_AXIS, [(i, (i + 1) % _count()) for i in range(_count())]
  ),
}


def _count() -> int:
  return jax.lax.axis_size(REPLICA_AXIS)


def measure(
  cases: list[tuple[str, int]], repeats: int
) -> list[tuple[float, float, float]]:
  """Returns seconds, bytes that left here, and busy cores of each collective.

  Args:
    cases: Kind and operand size (bytes) of each.
    repeats: How often each is measured.
  """
  count = jax.process_count()
  late_s = _APART_S * jax.process_index() / max(1, count - 1)
  one_each = {device.process_index: device for device in jax.devices()[::-1]}
  devices = [one_each[process] for process in range(count)]
  mesh = Mesh(np.asarray(devices), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))
  meet = _program(mesh, _MOVES["all_reduce"])
  one = _operand(mesh, "all_reduce", 4, count)
  met_s = statistics.median(_seconds(meet, one) for _ in range(_MEETINGS))
  results = []
  for kind, num_bytes in cases:
    program, operand = (
      _program(mesh, _MOVES[kind]),
      _operand(mesh, kind, num_bytes, count),
    )
    jax.block_until_ready(program(operand))
    seconds, sent, cores = [], [], CoreUse()
    for _ in range(repeats):
      jax.block_until_ready(meet(one))
      time.sleep(late_s)
      before = link_counter.LinkCounter()
      # Gloo ends when it has received. What it sends may still wait in a
      # socket, and the next message waits behind it.
      elapsed_s = _seconds(program, operand) + _seconds(meet, one)
      seconds.append(elapsed_s - met_s)
      sent.append(before.new_bytes())
    typical = middle_mean(seconds), middle_mean(sent)
    results.append((*typical, cores.busy_share()))
  return results


def middle_mean(values: list[float]) -> float:
  """Returns the mean of the middle half: of 5 values, of the middle 3."""
  aside = len(values) // 4
  return statistics.fmean(sorted(values)[aside : len(values) - aside])


def _seconds(program: Callable[[jax.Array], jax.Array], operand: jax.Array):
  start_s = time.perf_counter()
  jax.block_until_ready(program(operand))
  return time.perf_counter() - start_s


class CoreUse:
  """Counts the time for which the machine's cores had work."""

  def __init__(self):
    """Starts to count from here."""
    self._before = self._ticks()

  def busy_share(self) -> float:
    """Returns the share of the cores' time with work; NaN if it is unknown."""
    idle, total = self._ticks() - self._before
    return 1 - idle / total if total else math.nan

  def _ticks(self) -> np.ndarray:
    """Returns the ticks of all cores without work, and those in all."""
    if not _CORE_TICKS.exists():
      return np.zeros(2)
    first, *_ = _CORE_TICKS.read_text().splitlines()
    ticks = [float(value) for value in first.split()[1:9]]
    idle_and_waiting = ticks[3:5]
    return np.array([sum(idle_and_waiting), sum(ticks)])


def _program(mesh: Mesh, move: Callable[[jax.Array], jax.Array]):
  spec = PartitionSpec(REPLICA_AXIS)
  return jax.jit(
    jax.shard_map(
      lambda x: move(x[0])[None],
      mesh=mesh,
      in_specs=spec,
      out_specs=spec,
      check_vma=False,
    )
  )


def _operand(mesh: Mesh, kind: str, num_bytes: int, count: int) -> jax.Array:
  """Returns an operand of the given size for every process."""
  shape, dtype = (num_bytes,), jnp.uint8
  if kind == "all_reduce":
    shape, dtype = (num_bytes // 4,), jnp.float32
  if kind == "all_to_all":
    shape = (count, num_bytes // count)
  sharding = NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))
  own = jax.device_put(np.zeros((1, *shape), dtype), jax.local_devices()[0])
  return jax.make_array_from_single_device_arrays(
    (count, *shape), sharding, [own]
  )


def main(
  coordinator: str,
  count: str,
  number: str,
  cases: str,
  repeats: str,
  result: str,
) -> None:
  """Joins the others, measures, and ends without waiting for them."""
  processes.start(coordinator, int(count), int(number))
  found = measure(
    [(kind, size) for kind, size in json.loads(cases)], int(repeats)
  )
  if int(number) == int(count) - 1:
    write_json(result, found)
  jax.distributed.shutdown()
  sys.stdout.flush()
  os._exit(0)


if __name__ == "__main__":
  main(*sys.argv[1:])
