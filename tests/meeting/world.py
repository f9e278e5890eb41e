"""Replicas in threads of which one moves at a time, and a store that fails.

A thread stops before every call of the store and in every pause, until the test
lets it go on and says what happens to the call. Time is what the test says.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from dilocox_jax.meeting.mailbox import Mailbox
from dilocox_jax.meeting.rules import MailboxRules
from dilocox_jax.meeting.store import AwayError
from tests.meeting.toy import Toy

SECRET = b"s" * 64
CONFIG = {"model": {"size": 50}}


class KilledError(BaseException):
  """Ends a thread as kill -9 ends a process."""


class World:
  """The objects of a store, the time, and what is on its way to the store."""

  def __init__(self):
    self.objects: dict[str, bytes] = {}
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

  def finish(self, processes: "Iterable[Process]", turns: int = 20_000) -> None:
    """Goes on until all have ended, and raises the errors that ended them."""
    processes = list(processes)
    for _ in range(turns):
      if all(process.has_ended for process in processes):
        break
      self.turn(processes)
    for process in processes:
      if process.error is not None:
        raise process.error
      assert process.has_ended, "a replica waits for ever"

  def records(self, folder: str) -> dict[str, Any]:
    """Returns the JSON objects of a folder by path, sorted."""
    paths = [path for path in sorted(self.objects) if path.startswith(folder)]
    return {path: json.loads(self.objects[path])["is"] for path in paths}


class FakeStore:
  """The store as one process sees it."""

  where = "the fake store"

  def __init__(self, world: World, gate: Callable[[], str]):
    self._world, self._gate = world, gate
    self.requests: Counter[str] = Counter()

  def get(self, path: str, at_most: int) -> bytes | None:
    data = self._do("get", lambda: self._world.objects.get(path), False)
    return data if data is None or len(data) <= at_most else None

  def create(self, path: str, data: bytes) -> bool:
    def effect():
      return self._world.objects.setdefault(path, data) is data

    return self._do("put", effect, True)

  def put(self, path: str, data: bytes) -> None:
    self._do("put", lambda: self._world.objects.update({path: data}), True)

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
        raise AwayError(outcome)
      return answer
    if "kill" in outcome:
      raise KilledError
    raise AwayError(outcome)


class Process:
  """A replica in a thread, which moves when `step` is called."""

  def __init__(
    self, world: World, toy: Toy, rules: MailboxRules, skew: float = 0.0
  ):
    self.world, self.toy, self._skew = world, toy, skew
    self.has_ended, self.wakes_at = False, 0.0
    self.error: BaseException | None = None
    self._outcome = "ok"
    self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
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
