"""Replicas that meet in a store, one call at a time."""

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest

from dilocox_jax.meeting.agreement import LostError
from dilocox_jax.meeting.mailbox import Mailbox
from dilocox_jax.meeting.members import MailboxRules
from dilocox_jax.meeting.store import Store
from tests.meeting.world import CONFIG, SECRET, FakeStore, Process, Toy, World
from tests.oracles import mailbox as twin

RULES = MailboxRules(replicas=3, quorum=2, grace_s=5.0, snapshot_every=8)
# With so few snapshots no manifest is deleted, and the twin needs all of them.
KEPT = dataclasses.replace(RULES, snapshot_every=16)
EVENTS = 20


class Run(World):
  """A world with replicas in it."""

  def __init__(self, names="abc", rules=RULES, **options):
    super().__init__()
    self.options: dict[str, Any]
    self.rules, self.options = rules, {"events": EVENTS, **options}
    self.running: dict[str, Process] = {}
    for name in names:
      self.start(name)

  def start(self, name, kind=Toy):
    toy = kind(name, **self.options)
    self.running[name] = Process(self, toy, self.rules)

  def kill(self, *names):
    for name in names:
      self.running[name].step("kill")

  def until(self, event, names=()):
    """Lets these, or all, move until the first of them is at an event."""
    processes = [self.running[n] for n in names or self.running]
    for _ in range(20_000):
      if processes[0].toy.event >= event:
        return
      self.turn(processes)
    raise AssertionError(processes[0].error or "it waits for ever")

  def end(self):
    """Returns the shared parameters, which must be equal at the end."""
    self.finish(self.running.values())
    (theta,) = {p.toy.theta.tobytes() for p in self.running.values()}
    return theta

  def lists(self):
    """Names of the listed replicas by event, in the order of messages."""
    records = self.records("manifest").values()
    return ["".join(each[0] for each in one["listed"]) for one in records]

  @property
  def losses(self):
    return {name: p.toy.losses for name, p in self.running.items()}


class Flipped(Toy):
  """Its shared parameters change by themselves once, as by a bad memory."""

  def _one_event(self, box):
    if self.event == 10 and not self.losses:
      self.theta = self.theta + np.float32(1)
    super()._one_event(box)


def nothing(run):
  run.end()
  assert run.lists() == ["abc"] * EVENTS


def one_dies_and_comes_back(run):
  """Nobody waits for the dead, and soon it is one of them again.

  As in torchft's scene of recovery it dies at the second exchange.
  """
  run.until(2)
  run.kill("b")
  run.until(6)
  assert RULES.grace_s < run.now < 2 * RULES.grace_s
  run.start("b")
  run.end()
  away = [event for event, names in enumerate(run.lists()) if names == "ac"]
  assert run.lists()[0] == "abc" and away and max(away) <= 8


def one_takes_a_snapshot(run):
  """With a delay it follows events from before the snapshot."""
  run.until(18)
  run.kill("c")
  run.start("c")
  run.end()


def one_comes(run):
  run.until(5)
  run.start("d")
  run.end()
  assert run.lists()[4] == "abc"
  assert run.lists()[9:] == ["abcd"] * (EVENTS - 9)


def all_die(run):
  run.until(7)
  run.kill(*"abc")
  for name in "abc":
    run.start(name)
  run.end()
  assert run.lists()[10:] == ["abc"] * (EVENTS - 10)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize(
  "scene",
  [nothing, one_dies_and_comes_back, one_takes_a_snapshot, one_comes, all_die],
)
def test_all_have_what_the_twin_computes(scene, delay):
  run = Run(rules=KEPT, delay=delay)
  scene(run)
  expected = twin.under(run.lists()[:-1], delay)
  assert run.end() == expected.tobytes()
  assert set(run.lists()[-1]) == set(run.running)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_who_differs_takes_the_newest_snapshot(name):
  run = Run("", KEPT)
  for each in "abc":
    run.start(each, Flipped if each == name else Toy)
  assert run.end() == twin.under(run.lists()[:-1]).tobytes()
  assert run.losses == dict.fromkeys("abc", 0) | {name: 1}
  (record,) = [r for r in run.records("manifest").values() if r["left_out"]]
  assert record["left_out"] == {name: "its shared state differs"}


def test_who_differs_each_time_ends_with_one_line():
  class Wrong(Toy):
    def _begin(self, box):
      super()._begin(box)
      self.theta = self.theta + np.float32(1)

  run = Run(rules=KEPT)
  run.until(18)
  run.kill("c")
  run.start("c", Wrong)
  with pytest.raises(Exception, match="c computes another shared state"):
    run.end()


def test_who_slept_past_the_deletion_takes_the_newest_snapshot():
  run = Run(events=40)
  run.until(3)
  run.until(30, "ab")
  run.end()
  assert run.losses == {"a": 0, "b": 0, "c": 1}
  assert run.lists()[-1] == "abc"


def test_who_was_away_does_not_train_for_a_deleted_event():
  run = Run(events=40)
  run.until(30)
  store = FakeStore(run, lambda: "ok")
  box = Mailbox(store, name="d", secret=SECRET, config=CONFIG, rules=RULES)
  with pytest.raises(LostError, match="event 0 was deleted"):
    box.announce(0)
  snapshot = box.newest()
  assert snapshot is not None and not box.announce(snapshot.event)


class WrongSnapshot(Toy):
  """It writes another state before event 8 than it says."""

  def saved(self, theta, momentum):
    return super().saved(theta + np.float32(self.event == 8), momentum)


@pytest.mark.parametrize("kind", [Toy, WrongSnapshot])
def test_a_wrong_newest_snapshot_is_passed_over(kind, caplog):
  caplog.set_level(logging.INFO)
  run = Run("")
  for name in "abc":
    run.start(name, kind)
  run.until(12)
  run.kill("c")
  if kind is Toy:
    path = "snapshot/0000000008/arrays"
    run.objects[path] = run.objects[path][:-1] + b"?"
  run.start("c")
  run.end()
  is_damaged = "the snapshot before event 8 is damaged" in caplog.text
  assert is_damaged == (kind is Toy)
  assert "c takes the snapshot before event 0" in caplog.text


# A snapshot of 20,400 bytes is as much as one replica sends in 47 events.
@pytest.mark.parametrize(("unused", "every"), [(0, 8), (2500, 48)])
def test_the_store_and_the_requests_stay_bounded(unused, every):
  run, most = Run(events=200, unused=unused), 0
  run.until(2 * every - 1)
  run.kill("c")  # It comes again, and most events follow the snapshot.
  run.start("c")
  while not all(process.has_ended for process in run.running.values()):
    run.turn(run.running.values())
    most = max(most, len(run.objects))
  assert run.end() and run.lists()[-1] == "abc"
  found = [e for e in range(200) if f"snapshot/{e:010d}/index" in run.objects]
  assert found == [*range(0, 200, every)][-2:]
  # Three snapshots, and the events of three blocks: messages and a manifest.
  assert most < 3 * 3 + 3 * every * 4 + 200 / 8 + 10
  for process in run.running.values():
    requests = process.store.requests
    assert requests.total() / 200 < 16  # Measured: 10.
    assert requests["list"] <= 3 * 200 / RULES.snapshot_every


def test_events_come_in_order():
  store = Store("memory:///")
  box = Mailbox(store, name="a", secret=b"s" * 32, config={}, rules=RULES)
  for event, turn in [(1, 0), (0, 1)]:
    with pytest.raises(ValueError, match="is not after -1"):
      box.exchange(event, turn, [np.zeros(1)])
