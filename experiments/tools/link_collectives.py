"""A program that times collectives, together with processes like itself.

  python -m experiments.tools.link_collectives COORDINATOR COUNT NUMBER
  REPEATS REQUEST RESULT

COUNT processes run this program, each with its NUMBER (from 0). COORDINATOR is
the HOST:PORT of process 0. The file REQUEST has a JSON list of [kind, bytes of
an operand]. The last process writes a JSON list to the file RESULT, with an
entry for each collective: [duration (seconds), bytes that the process sent, CPU
time of the process (seconds)]. These numbers are means of the middle half of
REPEATS repeats.

Before a collective the processes *meet* in an AllReduce of 4 bytes. Then the
last process starts a millisecond after the first one. The duration begins when
the last process starts, and ends when all processes have met again. The time of
such a meeting is subtracted.
"""

import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dilocox_jax.distributed import link_counter, processes
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.metrics.lines import write_json
from experiments.tools.timing import seconds

_MEETINGS = 20  # Number of meetings whose median is the time of a meeting.
# Time from when the first process is ready to when the last one is (seconds).
# The processes of a training run are never ready at the same time. If they
# were, gloo's gathers between two processes would be faster: both would send at
# once.
_APART_S = 0.001
MOVES: dict[str, Callable[[jax.Array], jax.Array]] = {
  "all_reduce": lambda x: jax.lax.psum(x, REPLICA_AXIS),
  "all_gather": lambda x: jax.lax.all_gather(x, REPLICA_AXIS),
  "all_to_all": lambda x: jax.lax.all_to_all(x, REPLICA_AXIS, 0, 0),
}


def measure(
  collectives: list[tuple[str, int]], repeats: int
) -> list[tuple[float, float, float]]:
  """Times collectives, together with the other processes.

  `collectives` are kinds and operand sizes (bytes).

  Returns:
    For each collective, means of the middle half of the repeats: its duration
    (seconds), the bytes that left this process, and the CPU time of this
    process (seconds).
  """
  count = jax.process_count()
  late_s = _APART_S * jax.process_index() / max(1, count - 1)
  # The first device of every process.
  first_devices = {d.process_index: d for d in reversed(jax.devices())}
  devices = [first_devices[process] for process in range(count)]
  mesh = Mesh(np.asarray(devices), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))
  meet = _program(mesh, "all_reduce", 4, count)
  meeting_s = statistics.median(seconds(meet) for _ in range(_MEETINGS))
  results = []
  for kind, num_bytes in collectives:
    run = _program(mesh, kind, num_bytes, count)
    run()  # Compiles.
    times_s = []
    sent_bytes = []
    cpu_times_s = []
    for _ in range(repeats):
      meet()
      time.sleep(late_s)
      counter = link_counter.LinkCounter()
      cpu_start_s = time.process_time()  # Of all threads of the process.
      # Gloo ends when it has received. What it sends may still wait in a
      # socket, and the next message waits behind it.
      times_s.append(seconds(run) + seconds(meet) - meeting_s)
      sent_bytes.append(counter.new_bytes())
      cpu_times_s.append(time.process_time() - cpu_start_s)
    results.append(
      (middle_mean(times_s), middle_mean(sent_bytes), middle_mean(cpu_times_s))
    )
  return results


def middle_mean(values: list[float]) -> float:
  """Returns the mean of the middle half of some numbers, in any order.

  Example: of 5 numbers, the mean of the middle 3.
  """
  # No median: among four processes an all-to-all takes one of two times, and a
  # median would be one or the other by chance.
  num_left_out = len(values) // 4  # At each end.
  middle = sorted(values)[num_left_out : len(values) - num_left_out]
  return statistics.fmean(middle)


def _program(mesh: Mesh, kind: str, num_bytes: int, count: int):
  """Returns a function that runs a collective and waits for its end.

  `kind` is one of `MOVES`. `num_bytes` is the size of each process's operand.
  """
  dtype = jnp.uint8
  shape = (num_bytes,)
  if kind == "all_reduce":
    dtype = jnp.float32
    shape = (num_bytes // 4,)
  elif kind == "all_to_all":
    shape = (count, num_bytes // count)
  spec = PartitionSpec(REPLICA_AXIS)
  shard = jax.device_put(np.zeros((1, *shape), dtype), jax.local_devices()[0])
  operand = jax.make_array_from_single_device_arrays(
    (count, *shape), NamedSharding(mesh, spec), [shard]
  )
  move = MOVES[kind]
  program = jax.jit(
    jax.shard_map(
      lambda x: move(x[0])[None],
      mesh=mesh,
      in_specs=spec,
      out_specs=spec,
      check_vma=False,
    )
  )
  return lambda: jax.block_until_ready(program(operand))


def main(argv: Sequence[str]) -> None:
  """Times collectives as one of several processes, and ends the process.

  `argv` has the path of the program and six arguments: COORDINATOR COUNT NUMBER
  REPEATS REQUEST RESULT. The last process writes the results to the file
  RESULT. The process ends when all processes have measured.
  """
  _, coordinator, count, number, repeats, request_path, result_path = argv
  processes.start(coordinator, int(count), int(number))
  collectives = json.loads(pathlib.Path(request_path).read_text())
  results = measure(collectives, int(repeats))
  if int(number) == int(count) - 1:
    write_json(result_path, results)
  jax.distributed.shutdown()
  sys.stdout.flush()
  os._exit(0)


if __name__ == "__main__":
  main(sys.argv)
