"""Measures the time, requests and bytes of an exchange through a mailbox.

A mailbox is a store in which replicas leave messages for each other. An *event*
is one exchange of all replicas. `simulated_cost` runs all replicas in one
process, with a store whose requests take simulated time. `processes_cost` runs
each replica as a process, with a folder whose requests are delayed. The
replicas do not train: their messages are random values.
"""

import dataclasses
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.mailbox_protocol.costs import num_requests
from dilocox_jax.mailbox_protocol.mailbox import Mailbox
from dilocox_jax.mailbox_protocol.messages import raw_bytes
from dilocox_jax.mailbox_protocol.roster import MailboxRules
from dilocox_jax.mailbox_protocol.signer import Signer
from dilocox_jax.mailbox_protocol.store import Store
from dilocox_jax.reference.row_codecs import FloatRows, IntRows
from dilocox_jax.reference.shares import Tables
from experiments.tools.simulated_store import SimulatedStore, SimulatedTime

_SECRET = b"x" * 64
_WIDTH = 128  # Values of a row.
_PATH = "event/0000000000/0/bench"  # Path of the message that is signed.
# A folder in memory, if there is one: the delay stands for the whole request.
_SHARED_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


@dataclasses.dataclass(frozen=True)
class Exchanges:
  """Settings of the exchanges (*events*) that a bench runs through a mailbox.

  Attributes:
    num_replicas: Number of replicas that take part in every event, M.
    num_absent: Number of further replicas, which end after two events; only for
      `simulated_cost`.
    num_events: Number of events. The first half is not measured.
    latency_s: Time of a request (seconds).
    message_bytes: Bytes of a message without its scales.
    shares: Whether each replica computes only a share (part) of the mean: "on",
      "off" or "auto" (`MailboxRules.shares`).
    bits: Bits of a value; 32: float32.
  """

  num_replicas: int
  num_absent: int = 0
  num_events: int = 12
  latency_s: float = 0.05
  message_bytes: int = 4096
  shares: str = "off"
  bits: int = 32

  @property
  def num_all(self) -> int:
    """Number of all replicas, including those that end early."""
    return self.num_replicas + self.num_absent

  @property
  def num_unmeasured(self) -> int:
    """Number of events before the first one that is measured."""
    return self.num_events // 2


@dataclasses.dataclass(frozen=True)
class Cost:
  """What an exchange by a mailbox (an event) costs a replica.

  All values except `entry_requests` and `cpu_s` are measured in the second half
  of a run's events.

  Attributes:
    event_s: Median time of an event (seconds).
    requests: Mean number of a replica's requests in an event.
    entry_requests: Number of requests that a replica makes to join the run. In
      a result of `simulated_cost` it is the number of the replica that joins
      last, and in one of `processes_cost` the largest number of any replica.
    most_requests: Largest number of a replica's requests in an event.
    messages_down: Mean number of bytes that a replica reads in an event,
      divided by the bytes of one message's arrays.
    messages_up: Mean number of bytes that a replica writes in an event, divided
      by the bytes of one message's arrays.
    cpu_s: CPU time of the whole simulation (seconds), divided by the number of
      events and by `Exchanges.num_replicas`; 0: not measured.
  """

  event_s: float
  requests: float
  entry_requests: int
  most_requests: int = 0
  messages_down: float = 0.0
  messages_up: float = 0.0
  cpu_s: float = 0.0


class _EventCost(NamedTuple):
  """Time (seconds), requests and bytes of one exchange for one replica.

  `messages_down` and `messages_up` are bytes that the replica has read and
  written, divided by the bytes of one message's arrays.
  """

  duration_s: float
  requests: int
  messages_down: float
  messages_up: float


def simulated_cost(exchanges: Exchanges) -> Cost:
  """Measures what an exchange costs, with all replicas in simulated time."""
  world = SimulatedTime()
  objects: dict[str, bytes] = {}
  stores = [
    SimulatedStore(world, objects, exchanges.latency_s)
    for _ in range(exchanges.num_all)
  ]
  records: dict[int, list[_EventCost]] = {}
  entry_requests: dict[int, int] = {}
  # Replicas enter one after the other, and each of them has three seconds.
  start_s = 3.0 * exchanges.num_all

  def run_replica(number: int) -> None:
    store = stores[number]
    store.pause(3.0 * number)
    mailbox = _entered(
      store, number, exchanges, clock=store.clock, pause=store.pause
    )
    entry_requests[number] = store.requests.total()
    store.pause(start_s - store.now_s)
    is_absent = number >= exchanges.num_replicas
    num_events = 2 if is_absent else exchanges.num_events
    records[number] = _run_events(
      mailbox, num_events, exchanges, clock=store.clock
    )

  before_cpu_s = time.process_time()
  world.run(
    [
      functools.partial(run_replica, number)
      for number in range(exchanges.num_all)
    ]
  )
  cpu_s = time.process_time() - before_cpu_s
  measured = [
    event
    for number in range(exchanges.num_replicas)
    for event in records[number][exchanges.num_unmeasured :]
  ]
  return dataclasses.replace(
    _cost_of(measured, entry_requests[exchanges.num_all - 1]),
    cpu_s=cpu_s / exchanges.num_events / exchanges.num_replicas,
  )


def _cost_of(measured: Sequence[_EventCost], entry_requests: int) -> Cost:
  """Returns the median time, and mean or largest counts, of some exchanges."""
  return Cost(
    event_s=statistics.median(event.duration_s for event in measured),
    requests=statistics.mean(event.requests for event in measured),
    entry_requests=entry_requests,
    most_requests=max(event.requests for event in measured),
    messages_down=statistics.mean(event.messages_down for event in measured),
    messages_up=statistics.mean(event.messages_up for event in measured),
  )


def _rules(exchanges: Exchanges) -> MailboxRules:
  """Returns the rules of the mailbox for the settings of a bench."""
  return MailboxRules(
    replicas=exchanges.num_all,
    quorum=1,
    grace_s=20.0,
    shares=exchanges.shares,
  )


def _entered(
  store: Any, number: int, exchanges: Exchanges, **times: Any
) -> Mailbox:
  """Opens the mailbox of a replica, and lets the replica join the run.

  If time is simulated, `times` has the mailbox's arguments `clock` and `pause`.
  """
  mailbox = Mailbox(
    store,
    name=f"r{number}",
    secret=_SECRET,
    config={},
    rules=_rules(exchanges),
    **times,
  )
  mailbox.newest()  # No snapshot is there, so it begins at event 0.
  mailbox.announce(0)
  return mailbox


def _run_events(
  mailbox: Mailbox,
  num_events: int,
  exchanges: Exchanges,
  clock: Callable[[], float],
) -> list[_EventCost]:
  """Lets a replica take part in exchanges, and returns the cost of each."""
  arrays, tables = _message(exchanges)
  num_bytes = sum(array.nbytes for array in arrays)
  costs = []
  for event in range(num_events):
    before_s = clock()
    before = mailbox.usage
    mailbox.announce(event)
    mailbox.exchange(event, turn=0, arrays=arrays, tables=tables)
    after = mailbox.usage
    bytes_down = after["bytes_down"] - before["bytes_down"]
    bytes_up = after["bytes_up"] - before["bytes_up"]
    costs.append(
      _EventCost(
        duration_s=clock() - before_s,
        requests=num_requests(after) - num_requests(before),
        messages_down=bytes_down / num_bytes,
        messages_up=bytes_up / num_bytes,
      )
    )
  return costs


def _message(exchanges: Exchanges) -> tuple[list[np.ndarray], Tables]:
  """Returns a message of random values, and how the rows in it are encoded."""
  num_values = exchanges.message_bytes * 8 // exchanges.bits
  codec = FloatRows() if exchanges.bits == 32 else IntRows(exchanges.bits)
  tables = Tables(codec, widths=(_WIDTH,), has_residual=not codec.is_exact)
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(max(num_values // _WIDTH, 1), _WIDTH))
  arrays = codec.encode(rows.astype(np.float32))
  if codec.is_exact:
    arrays = [array.view(np.float32) for array in arrays]
  else:
    # A mailbox takes the norm of a message from its floating-point arrays.
    arrays[1] = arrays[1].view(np.float16)
  return arrays, tables


class DelayedStore(Store):
  """A store of a mailbox in a folder, with requests as slow as a bucket's."""

  def __init__(self, where: str, latency_s: float):
    """Opens a folder, with a delay of `latency_s` seconds for each request."""
    super().__init__(where)
    self._latency_s = latency_s

  def _count(self, kind: str) -> None:
    """Counts a request, e.g. "get", and waits for the delay."""
    super()._count(kind)
    time.sleep(self._latency_s)


def run_replica(where: str, number: int, exchanges: Exchanges) -> Cost:
  """Runs one replica in this process, and returns what an exchange costs it."""
  store = DelayedStore(where, exchanges.latency_s)
  mailbox = _entered(store, number, exchanges)
  entry_requests = store.requests.total()
  costs = _run_events(
    mailbox, exchanges.num_events, exchanges, clock=time.monotonic
  )
  measured = costs[exchanges.num_unmeasured :]
  return _cost_of(measured, entry_requests)


def processes_cost(exchanges: Exchanges) -> Cost:
  """Measures what an exchange costs, with a process for each replica.

  Raises:
    ValueError: If a process fails. The process has printed its error.
  """
  with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY) as folder:
    processes = []
    for number in range(exchanges.num_replicas):
      arguments = {
        "where": os.path.join(folder, "run"),
        "number": number,
        "exchanges": dataclasses.asdict(exchanges),
      }
      # The end of this module runs the replica, and prints its cost as JSON.
      command = [sys.executable, "-m", __name__, json.dumps(arguments)]
      processes.append(
        subprocess.Popen(
          command,
          stdout=subprocess.PIPE,
          text=True,
          cwd=pathlib.Path(__file__).parents[2],
        )
      )
    lines = [process.communicate()[0] for process in processes]
  costs = [Cost(**json.loads(line)) for line in lines]
  return Cost(
    event_s=statistics.median(cost.event_s for cost in costs),
    requests=statistics.mean(cost.requests for cost in costs),
    entry_requests=max(cost.entry_requests for cost in costs),
    most_requests=max(cost.most_requests for cost in costs),
    messages_down=statistics.mean(cost.messages_down for cost in costs),
    messages_up=statistics.mean(cost.messages_up for cost in costs),
  )


def signing_rates(num_bytes: int, repeats: int = 5) -> tuple[float, float]:
  """Measures how fast messages are signed, and how fast signatures are checked.

  Args:
    num_bytes: Size of the message (bytes).
    repeats: Number of measurements, of which the medians are returned.

  Returns:
    How many GB are signed in one CPU second, and how many are checked.
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
  signed_gb = size_gb / statistics.median(sign_s)
  checked_gb = size_gb / statistics.median(check_s)
  return signed_gb, checked_gb


if __name__ == "__main__":  # A replica of `processes_cost`.
  given = json.loads(sys.argv[1])
  cost = run_replica(
    given["where"], given["number"], Exchanges(**given["exchanges"])
  )
  print(json.dumps(dataclasses.asdict(cost)))
