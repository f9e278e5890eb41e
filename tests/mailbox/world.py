"""Replicas that train by hand through a mailbox, as a client would.

Their inner steps end at a place that depends on the shared parameters and on
their name alone. So a twin can compute what all must have, from the lists of
messages (tests/oracles/mailbox.py). They are threads of which one moves at a
time, before a store that fails: a thread stops before every call of the store
and in every pause, until the test lets it go on and says what happens to the
call. Time is what the test says.

Event e brings a replica its unit of work number e, whichever of its lives does
it. A message carries marks of the units that are in it, so a test can see that
no unit is averaged twice.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import threading
from collections import Counter
from collections.abc import (
  Callable,
  Iterable,
  Iterator,
  MutableMapping,
  Sequence,
)
from typing import Any

import numpy as np

from dilocox_jax.mailbox_protocol.agreement import ReplicaStaleError
from dilocox_jax.mailbox_protocol.buffers import Data, parts_of
from dilocox_jax.mailbox_protocol.mailbox import Exchanged, Mailbox
from dilocox_jax.mailbox_protocol.roster import MailboxRules
from dilocox_jax.mailbox_protocol.store import Store, StoreUnavailableError
from dilocox_jax.reference.row_codecs import FloatRows
from dilocox_jax.reference.shares import Tables
from tests.oracles import mailbox as twin

# Least part of a mean that is a mark. Less is the loss of `CoarseRows`.
MARK = 0.05
MARKS = 16  # 64-bit words with one bit for every unit of work.


@dataclasses.dataclass(frozen=True)
class CoarseRows(FloatRows):
  """A codec that loses something: it rounds values to multiples of 1/64."""

  @property
  def is_exact(self) -> bool:
    return False

  def encode(self, rows: np.ndarray) -> list[np.ndarray]:
    return super().encode(np.rint(rows * 64) / np.float32(64))


class Toy:
  """One replica.

  Attributes:
    history: Digest of what was averaged, by event, as this replica saw it.
    credited: Event, replica and marks of each message that was averaged.
    held_back: Marks of the units that this replica has done, or taken from a
      checkpoint, and that no listed message of it has carried yet.
    done: Marks of all units that this life has had.
    losses: How often it had to begin again from a snapshot.
    superseded: How often a message of an earlier life counted instead.
    wrong_shares: The wrong shares that it has found.
  """

  def __init__(
    self,
    name: str,
    events: int,
    *,
    turns: int = 1,
    delay: int = 0,
    unused: int = 0,
    noise: float = 0.0,
    rounds_up: bool = False,
    in_shares_of: Sequence[str] = (),
    checkpoint: dict[str, Any] | None = None,
  ):
    """Begins a life of a replica.

    Args:
      name: Its name.
      events: Events of the run.
      turns: Messages of an event.
      delay: Events between a send and its apply.
      unused: Values of a snapshot that nobody reads.
      noise: How much the work of this life differs from that of another one.
      rounds_up: Whether its machine rounds parameters up to the next number.
      in_shares_of: Names of all replicas of a run whose means are made in
        shares. Then marks are a row of floats for each replica.
      checkpoint: What `checkpoint` of an earlier life was; None: it begins with
        the newest snapshot.
    """
    self.name = name
    self.events = events
    self.turns = turns
    self.delay = delay
    self.unused = np.zeros(unused)
    self.noise = noise
    self.rounds_up = rounds_up
    self.in_shares_of = in_shares_of
    self.tables = None
    if in_shares_of:
      self.tables = Tables(CoarseRows(), widths=(5, events), has_residual=True)
    self.history: dict[int, str] = {}
    self.credited: list[tuple[int, str, bytes]] = []
    self.held_back = np.zeros(MARKS, np.uint64)
    self.done = np.zeros(MARKS, np.uint64)
    self.theta, self.momentum = twin.start()
    self.pending: list[np.ndarray] = []
    self.event = 0
    self.losses = 0
    self.superseded = 0
    self.wrong_shares: list[tuple[int, int, str]] = []
    self._start = checkpoint
    self._box: Mailbox | None = None
    self.checkpoint: dict[str, Any] | None = None

  def run(self, box: Mailbox) -> None:
    """Goes through all events."""
    self._box = box
    if self._start is None:
      self._begin(box)
    else:
      self._go_on(box, self._start)
    while self.event < self.events:
      self.checkpoint = self._saved_state(box)
      try:
        self._one_event(box)
      except ReplicaStaleError:
        self.losses += 1
        self.held_back = np.zeros(MARKS, np.uint64)
        self._begin(box)

  def _saved_state(self, box: Mailbox) -> dict[str, Any]:
    """Returns what a checkpoint before the next event holds."""
    return {
      "mailbox": json.loads(json.dumps(box.get_state())),
      "event": self.event,
      "theta": self.theta,
      "momentum": self.momentum,
      "pending": list(self.pending),
      "held_back": self.held_back.copy(),
    }

  def _go_on(self, box: Mailbox, saved: dict[str, Any]) -> None:
    """Goes on where a checkpoint was written."""
    box.set_state(saved["mailbox"])
    self.event = saved["event"]
    self.theta = saved["theta"]
    self.momentum = saved["momentum"]
    self.pending = list(saved["pending"])
    self.held_back = saved["held_back"].copy()
    self.done = saved["held_back"].copy()

  def _begin(self, box: Mailbox) -> None:
    self.pending: list[np.ndarray] = []
    snapshot = box.newest()
    if snapshot is None:
      self.theta, self.momentum = twin.start()
      self.event = 0
    else:
      self.theta, self.momentum, _ = snapshot.arrays
      self.event = snapshot.first

  def saved(self, theta, momentum) -> list[np.ndarray]:
    """Returns what a snapshot holds."""
    return [theta, momentum, self.unused]

  def _one_event(self, box: Mailbox) -> None:
    event = self.event
    while len(self.pending) > self.delay:
      mean = self.pending.pop(0)
      self.theta, self.momentum = twin.outer(self.theta, self.momentum, mean)
      if self.rounds_up:
        self.theta = np.nextafter(self.theta, np.float32(np.inf))
    theta = self.theta
    momentum = self.momentum
    is_there = box.announce(event)
    delta = np.zeros_like(theta)
    if is_there:
      unit = np.uint64(1 << event % 64)
      self.held_back[event // 64] |= unit
      self.done[event // 64] |= unit
      delta = twin.delta(self.name, theta)
      delta = delta * np.float32(1 + self.noise)
    first = event - len(self.pending)
    exchanged = Exchanged([], False, {})
    state = box.fingerprint(event, [theta, momentum])
    is_own_listed = False
    for turn in range(self.turns):
      exchanged = box.exchange(
        event,
        turn,
        self._message(delta),
        weight=twin.weight(self.name),
        send=is_there,
        state=state,
        snapshot=lambda: (first, self.saved(theta, momentum)),
        tables=self.tables,
      )
      self.superseded += exchanged.is_superseded
      self.wrong_shares += exchanged.wrong_shares
      is_own_listed |= exchanged.is_superseded or (
        turn == self.turns - 1 and exchanged.is_own_listed
      )
    if is_own_listed:
      self.held_back = np.zeros(MARKS, np.uint64)
    self._take(event, exchanged)
    self.event += 1

  def _message(self, delta: np.ndarray) -> list[np.ndarray]:
    if not self.in_shares_of:
      return [delta, self.held_back.copy()]
    marks = np.zeros((len(self.in_shares_of), self.events), np.float32)
    row = self.in_shares_of.index(self.name)
    for event in range(self.events):
      bit = self.held_back[event // 64] >> np.uint64(event % 64)
      marks[row, event] = bit & np.uint64(1)
    return [delta.reshape(-1, 5).astype(np.float32), marks]

  def _take_mean(self, event: int, mean: list[np.ndarray]) -> None:
    self.history[event] = hashlib.sha256(
      mean[0].tobytes() + mean[1].tobytes()
    ).hexdigest()
    self._credit(event, mean[1])
    self.pending.append(mean[0].reshape(-1))

  def _credit(self, event: int, all_marks: np.ndarray) -> None:
    for name, row in zip(self.in_shares_of, all_marks, strict=True):
      marks = np.zeros(MARKS, np.uint64)
      for unit in np.flatnonzero(row > MARK):
        marks[unit // 64] |= np.uint64(1 << int(unit) % 64)
      if marks.any():
        self.credited.append((event, name, marks.tobytes()))

  def _take(self, event: int, exchanged: Exchanged) -> None:
    if exchanged.mean is not None:
      self._take_mean(event, exchanged.mean)
      return
    if self.in_shares_of and exchanged.messages:
      self._take_messages(event, exchanged)
      return
    told: Any = hashlib.sha256()
    for name, weight, arrays in exchanged.messages:
      told.update(f"{name} {weight}".encode() + arrays[0].tobytes())
      self.credited.append((event, name, arrays[1].tobytes()))
    self.history[event] = told.hexdigest()
    self.pending.append(
      twin.mean([(w, arrays[0]) for _, w, arrays in exchanged.messages])
    )

  def _take_messages(self, event: int, exchanged: Exchanged) -> None:
    """Takes whole messages of a run that also makes means in shares."""
    weights = [weight for _, weight, _ in exchanged.messages]
    mean = []
    for index in range(2):
      arrays = [arrays[index] for _, _, arrays in exchanged.messages]
      average = np.average(arrays, axis=0, weights=weights)
      mean.append(average.astype(np.float32))
    self._take_mean(event, mean)


def assert_same_lists(toys: Iterable[Toy]) -> None:
  """All that was averaged at one event was averaged from the same list."""
  seen: dict[int, str] = {}
  for toy in toys:
    for event, digest in toy.history.items():
      assert seen.setdefault(event, digest) == digest, event


SECRET = b"s" * 64
CONFIG = {"model": {"size": 50}}


class KilledError(BaseException):
  """Ends a thread as kill -9 ends a process."""


class FolderObjects(MutableMapping):
  """The objects of a folder, as a mapping from path to content."""

  def __init__(self, place: pathlib.Path):
    self.place = place
    self._store = Store(place)

  def __getitem__(self, path: str) -> bytes:
    data = self._store.get(path, 2**30)
    if data is None:
      raise KeyError(path)
    return bytes(data)

  def __setitem__(self, path: str, data: bytes) -> None:
    self._store.put(path, data)

  def __delitem__(self, path: str) -> None:
    self[path]  # Raises an error if it is missing.
    self._store.delete([path])

  def setdefault(self, path: str, data: bytes) -> bytes:
    return data if self._store.create(path, data) else self[path]

  def __iter__(self) -> Iterator[str]:
    for folder, folders, names in os.walk(self.place):
      folders[:] = [name for name in folders if not name.startswith(".")]
      for name in names:
        path = pathlib.Path(folder, name)
        is_object = not name.startswith(".") and path.is_file()
        if is_object and not path.is_symlink():
          yield str(path.relative_to(self.place))

  def __len__(self) -> int:
    return sum(1 for _ in self)


class World:
  """The objects of a store, the time, and what is on its way to the store."""

  def __init__(self, objects: MutableMapping[str, bytes] | None = None):
    self.objects = {} if objects is None else objects
    self.now = 0.0
    self.on_its_way: list[Callable[[], Any]] = []

  def turn(self, processes: "Iterable[Process]") -> None:
    """Everybody who is awake moves once; if nobody is, time goes on."""
    there = [process for process in processes if not process.has_ended]
    awake = [process for process in there if process.wakes_at <= self.now]
    if there and not awake:
      self.now = min(process.wakes_at for process in there)
    for process in awake:
      process.step()

  def move_to_end(
    self, processes: "Sequence[Process]", turns: int = 20_000
  ) -> bool:
    """Goes on until all have ended. Returns whether they did."""
    for _ in range(turns):
      if all(process.has_ended for process in processes):
        return True
      self.turn(processes)
    return False

  def finish(self, processes: "Iterable[Process]") -> None:
    """Goes on until all have ended, and raises the errors that ended them."""
    processes = list(processes)
    has_ended = self.move_to_end(processes)
    for process in processes:
      if process.error is not None:
        raise process.error
    assert has_ended, "a replica waits for ever"

  def records(self, folder: str) -> dict[str, Any]:
    """Returns the JSON objects of a folder by path, sorted."""
    paths = [path for path in sorted(self.objects) if path.startswith(folder)]
    return {path: json.loads(self.objects[path])["is"] for path in paths}


class FakeStore:
  """The store as one process sees it."""

  where = "the fake store"

  def __init__(self, world: World, gate: Callable[[], str]):
    self._world = world
    self._gate = gate
    self.requests: Counter[str] = Counter()
    self.bytes_up = 0
    self.bytes_down = 0

  def at_once(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Calls functions in turn, so that a test may disturb each request."""
    return [call() for call in calls]

  def get(self, path: str, at_most: int) -> bytes | None:
    data = self._do("get", lambda: self._world.objects.get(path), False)
    return data if data is None or len(data) <= at_most else None

  def get_range(self, path: str, start: int, stop: int) -> bytes | None:
    data = self._do("get", lambda: self._world.objects.get(path), False)
    return None if data is None or len(data) < stop else data[start:stop]

  def create(self, path: str, data: Data) -> bool:
    content = b"".join(parts_of(data))

    def effect():
      return self._world.objects.setdefault(path, content) is content

    return self._do("put", effect, True)

  def put(self, path: str, data: Data) -> None:
    content = b"".join(parts_of(data))
    self._do("put", lambda: self._world.objects.update({path: content}), True)

  def delete(self, paths: Iterable[str]) -> None:
    paths = list(paths)

    def effect():
      for path in paths:
        self._world.objects.pop(path, None)

    self._do("delete", effect, True)

  def sizes(self, prefix: str) -> dict[str, int]:
    objects = self._world.objects

    def effect():
      found = [path for path in sorted(objects) if path.startswith(prefix)]
      return {path: len(objects[path]) for path in found}

    return self._do("list", effect, False)

  def _do(self, kind: str, effect: Callable[[], Any], writes: bool) -> Any:
    self.requests[kind] += 1
    outcome = self._gate()
    if "later" in outcome and writes:
      self._world.on_its_way.append(effect)
    elif "fail" not in outcome and "kill" not in outcome:
      answer = effect()
      if outcome == "answer lost":
        raise StoreUnavailableError(outcome)
      return answer
    if "kill" in outcome:
      raise KilledError
    raise StoreUnavailableError(outcome)


class Process:
  """A replica in a thread, which moves when `step` is called."""

  def __init__(
    self, world: World, toy: Toy, rules: MailboxRules, skew: float = 0.0
  ):
    self.world = world
    self.toy = toy
    self._skew = skew
    self.has_ended = False
    self.wakes_at = 0.0
    self.error: BaseException | None = None
    self._outcome = "ok"
    self._go = threading.Semaphore(0)
    self._back = threading.Semaphore(0)
    self._rules = rules
    self.store = FakeStore(world, self._gate)
    thread = threading.Thread(target=self._run, daemon=True)
    thread.start()
    self._back.acquire()

  def step(self, outcome: str = "ok") -> None:
    """Lets the replica go on up to its next call or pause."""
    if not self.has_ended:
      self._outcome = outcome
      self._go.release()
      self._back.acquire()

  def _gate(self) -> str:
    self._back.release()
    self._go.acquire()
    return self._outcome

  def _pause(self, seconds: float) -> None:
    self.wakes_at = self.world.now + seconds
    if "kill" in self._gate():
      raise KilledError

  def _run(self) -> None:
    try:
      box = Mailbox(
        self.store,
        name=self.toy.name,
        secret=SECRET,
        config=CONFIG,
        rules=self._rules,
        clock=lambda: self.world.now + self._skew,
        pause=self._pause,
      )
      self.toy.run(box)
    except KilledError:
      pass
    except BaseException as error:
      self.error = error
    finally:
      self.has_ended = True
      self._back.release()
