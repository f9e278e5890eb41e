"""Measures what an event of a mailbox costs, and how fast objects are signed.

  python -m experiments.tools.bench_mailbox simulate --replicas=64
  python -m experiments.tools.bench_mailbox simulate --replicas=8 --absent=64
  python -m experiments.tools.bench_mailbox processes --replicas=8
  python -m experiments.tools.bench_mailbox sign --megabytes=256

`simulate` runs all replicas in one process, before a store whose requests take
simulated time: it counts requests, and the latencies that follow each other.
`processes` runs each replica as a process, before a folder whose requests are
delayed. Both print the time of an event without the inner steps. `sign` prints
how many GB of a message one CPU second signs and checks.
"""

import dataclasses
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import app, flags

from dilocox_jax.checks import known
from dilocox_jax.mailbox_protocol.mailbox import Mailbox
from dilocox_jax.mailbox_protocol.messages import raw_bytes
from dilocox_jax.mailbox_protocol.roster import MailboxRules
from dilocox_jax.mailbox_protocol.signer import Signer
from dilocox_jax.mailbox_protocol.store import Store
from experiments.runtime import command_line
from experiments.tools.simulated_store import SimulatedStore, SimulatedTime

BENCHES = ("simulate", "processes", "sign")
_SECRET = b"x" * 64
_REPLICA = "replica"  # The process of one replica, which `processes` starts.
# A folder in memory, if there is one: the delay stands for the whole request.
_SHM = "/dev/shm" if os.path.isdir("/dev/shm") else None
_PATH = "event/0000000000/0/bench"

_REPLICAS = flags.DEFINE_integer(
  "replicas", 8, "Number of replicas, M.", lower_bound=1
)
_ABSENT = flags.DEFINE_integer(
  "absent", 0, "Replicas that end after two events.", lower_bound=0
)
_EVENTS = flags.DEFINE_integer(
  "events", 12, "Number of events; the first half is not counted.",
  lower_bound=4,
)
_LATENCY_MS = flags.DEFINE_float(
  "latency_ms", 50.0, "Time of a request (milliseconds).", lower_bound=0.0
)
_MESSAGE_BYTES = flags.DEFINE_integer(
  "message_bytes", 4096, "Bytes of a message.", lower_bound=4
)
_MEGABYTES = flags.DEFINE_integer(
  "megabytes", 256, "Size of the message to sign (MB).", lower_bound=1
)


@dataclasses.dataclass(frozen=True)
class Cost:
  """What the events in the second half of a run cost a replica.

  Attributes:
    event_s: Median time of an event (seconds).
    requests: Mean number of requests of an event.
    entry_requests: Requests of the replica that entered last, up to its first
      event.
    cpu_s: CPU seconds of an event for each replica; 0: not measured.
  """

  event_s: float
  requests: float
  entry_requests: int
  cpu_s: float = 0.0


def simulated_cost(
  num_replicas: int,
  *,
  num_absent: int = 0,
  num_events: int = 12,
  latency_s: float = 0.05,
  message_bytes: int = 4096,
) -> Cost:
  """Returns what an event costs in simulated time.

  Args:
    num_replicas: Replicas that take part in all events, M.
    num_absent: Further replicas that end after two events.
    num_events: Number of events.
    latency_s: Time of a request (seconds).
    message_bytes: Bytes of a message.
  """
  world = SimulatedTime()
  objects: dict[str, bytes] = {}
  num_all = num_replicas + num_absent
  stores = [SimulatedStore(world, objects, latency_s) for _ in range(num_all)]
  # Replicas enter one after the other, and each has one second.
  times: dict[int, list[float]] = {}
  counts: dict[int, list[int]] = {}
  start_s = 3.0 * num_all

  def replica(number: int) -> None:
    store = stores[number]
    store.pause(3.0 * number)
    mailbox = _open(store, number, num_all)
    mailbox.announce(0)
    counts[number] = [store.num_requests()]
    times[number] = []
    store.pause(start_s - store.now_s)
    is_absent = number >= num_replicas
    for event in range(2 if is_absent else num_events):
      before_s = store.now_s
      _exchange(mailbox, event, message_bytes)
      times[number].append(store.now_s - before_s)
      counts[number].append(store.num_requests())

  before_cpu_s = time.process_time()
  world.run([lambda number=number: replica(number) for number in range(num_all)])
  cpu_s = time.process_time() - before_cpu_s
  half = num_events // 2
  living = range(num_replicas)
  spans = [counts[number][-1] - counts[number][half] for number in living]
  return Cost(
    event_s=statistics.median(
      event_s for number in living for event_s in times[number][half:]
    ),
    requests=statistics.mean(spans) / (num_events - half),
    entry_requests=counts[num_all - 1][0],
    cpu_s=cpu_s / num_events / num_replicas,
  )


def _open(store: Any, number: int, num_all: int) -> Mailbox:
  """Opens the mailbox of a replica.

  Args:
    store: Its store.
    number: Number of the replica.
    num_all: Number of all replicas.
  """
  options = {}
  if isinstance(store, SimulatedStore):
    options = {"clock": store.clock, "pause": store.pause}
  mailbox = Mailbox(
    store,
    name=f"r{number}",
    secret=_SECRET,
    config={},
    rules=MailboxRules(replicas=num_all, quorum=1, grace_s=20.0),
    **options,
  )
  mailbox.newest()
  return mailbox


def _exchange(mailbox: Mailbox, event: int, message_bytes: int) -> None:
  """Takes part in an event."""
  mailbox.announce(event)
  values = np.full(message_bytes // 4, 1.0, np.float32)
  mailbox.exchange(event, 0, [values])


class DelayedStore(Store):
  """A folder each of whose requests takes some time, as those of a bucket."""

  def __init__(self, where: str, latency_s: float):
    """Opens the folder.

    Args:
      where: The folder.
      latency_s: Time that a request takes longer (seconds).
    """
    super().__init__(where)
    self._latency_s = latency_s

  def _count(self, kind: str) -> None:
    """Counts a request and waits. Every request is counted once."""
    super()._count(kind)
    time.sleep(self._latency_s)


def _run_replica(where: str, number: int) -> None:
  """Runs one replica of `processes`, and prints its median time and requests.

  Args:
    where: The folder of the run.
    number: Number of the replica.
  """
  store = DelayedStore(where, _LATENCY_MS.value / 1000)
  mailbox = _open(store, number, _REPLICAS.value)
  mailbox.announce(0)
  entry_requests = store.requests.total()
  event_times_s = []
  counts = []
  for event in range(_EVENTS.value):
    before_s = time.monotonic()
    _exchange(mailbox, event, _MESSAGE_BYTES.value)
    event_times_s.append(time.monotonic() - before_s)
    counts.append(store.requests.total())
  half = _EVENTS.value // 2
  requests = (counts[-1] - counts[half - 1]) / (_EVENTS.value - half)
  print(statistics.median(event_times_s[half:]), requests, entry_requests)


def _print_cost(cost: Cost) -> None:
  """Prints what an event costs."""
  latency_s = _LATENCY_MS.value / 1000
  latencies = cost.event_s / latency_s if latency_s else 0.0
  print(f"an event takes {cost.event_s:.3f} s: {latencies:.1f} latencies")
  print(f"requests of a replica in an event: {cost.requests:.1f}")
  print(f"requests of the replica that entered last: {cost.entry_requests}")
  if cost.cpu_s:
    print(f"CPU of a replica in an event: {1000 * cost.cpu_s:.1f} ms")


def _processes_cost() -> Cost:
  """Runs each replica as a process. Returns the cost of an event."""
  with tempfile.TemporaryDirectory(dir=_SHM) as folder:
    processes = [
      subprocess.Popen(
        [
          *(sys.executable, "-m", "experiments.tools.bench_mailbox"),
          *(_REPLICA, os.path.join(folder, "run"), str(number)),
          f"--replicas={_REPLICAS.value}",
          f"--events={_EVENTS.value}",
          f"--latency_ms={_LATENCY_MS.value}",
          f"--message_bytes={_MESSAGE_BYTES.value}",
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=pathlib.Path(__file__).parents[2],
      )
      for number in range(_REPLICAS.value)
    ]
    lines = [process.communicate()[0] for process in processes]
  rows = [[float(word) for word in line.split()] for line in lines]
  return Cost(
    event_s=statistics.median(row[0] for row in rows),
    requests=statistics.mean(row[1] for row in rows),
    entry_requests=int(max(row[2] for row in rows)),
  )


def signing_rates(num_bytes: int, repeats: int = 5) -> tuple[float, float]:
  """Measures how fast a message is signed and checked.

  Args:
    num_bytes: Bytes of the message.
    repeats: Number of measurements, of which the medians count.

  Returns:
    GB that one CPU second signs, and GB that it checks.
  """
  signer = Signer(_SECRET, "bench")
  values = np.arange(num_bytes // 4, dtype=np.float32)
  content = raw_bytes(values)
  sign_s = []
  check_s = []
  for _ in range(repeats):
    before_s = time.process_time()
    parts = signer.sign(_PATH, content)
    sign_s.append(time.process_time() - before_s)
    stored = b"".join(parts)
    before_s = time.process_time()
    if signer.verify(_PATH, stored) is None:
      raise AssertionError("a signed message is not accepted")
    check_s.append(time.process_time() - before_s)
  size_gb = values.nbytes / 1e9
  return size_gb / statistics.median(sign_s), size_gb / statistics.median(
    check_s
  )


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Runs the bench whose name is on the command line."""
  if len(argv) == 4 and argv[1] == _REPLICA:
    _run_replica(argv[2], int(argv[3]))
    return
  if len(argv) != 2:
    raise command_line.UsageError(f"name one bench: {', '.join(BENCHES)}")
  with command_line.usage_errors():
    known("bench", argv[1], BENCHES)
  if argv[1] == "sign":
    signed, checked = signing_rates(_MEGABYTES.value * 10**6)
    print(f"signed: {signed:.2f} GB a CPU second")
    print(f"checked: {checked:.2f} GB a CPU second")
  elif argv[1] == "processes":
    _print_cost(_processes_cost())
  else:
    cost = simulated_cost(
      _REPLICAS.value,
      num_absent=_ABSENT.value,
      num_events=_EVENTS.value,
      latency_s=_LATENCY_MS.value / 1000,
      message_bytes=_MESSAGE_BYTES.value,
    )
    _print_cost(cost)


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
