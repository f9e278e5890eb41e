"""Replicas that meet in a store, one call at a time."""

import dataclasses
import logging
import re
import threading
import time

import numpy as np
import pytest

from dilocox_jax.meeting.agreement import LostError
from dilocox_jax.meeting.mailbox import Mailbox
from dilocox_jax.meeting.rules import MailboxRules
from dilocox_jax.meeting.store import Store
from tests.meeting import s3_server
from tests.meeting.toy import Toy
from tests.meeting.world import CONFIG, SECRET, FakeStore, Process, World
from tests.oracles import mailbox as twin

RULES = MailboxRules(replicas=3, quorum=2, grace_s=5.0, snapshot_every=8)
EVENTS = 20


@pytest.fixture(name="world")
def world_fixture():
  return World()


def started(world, name, events=EVENTS, rules=RULES, kind=Toy, **options):
  return Process(world, kind(name, events, **options), rules)


def members(world):
  """Names of the listed replicas by event, in the order of their messages."""
  records = world.records("manifest").values()
  return [[each[0] for each in record["listed"]] for record in records]


def until(world, processes, event):
  """Lets all move until the first of them is at an event."""
  for _ in range(20_000):
    if processes[0].toy.event >= event:
      return
    world.turn(processes)
  raise AssertionError(processes[0].error or "it waits for ever")


def same_as_twin(world, processes, delay=0):
  lists = members(world)
  assert len(lists) == processes[0].toy.events
  expected = twin.under(lists[:-1], delay)
  for process in processes:
    assert process.toy.theta.tobytes() == expected.tobytes()


# With so few snapshots no manifest is deleted, and the twin needs all of them.
KEPT = dataclasses.replace(RULES, snapshot_every=16)


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_all_have_what_the_twin_computes(world, delay):
  running = [started(world, n, rules=KEPT, delay=delay) for n in "abc"]
  world.finish(running)
  assert members(world) == [["a", "b", "c"]] * EVENTS
  same_as_twin(world, running, delay)


@pytest.mark.parametrize("delay", [0, 2])
def test_one_is_killed_and_comes_back(world, delay):
  running = [started(world, n, rules=KEPT, delay=delay) for n in "abc"]
  until(world, running, 5)
  running[1].step("kill")
  until(world, running, 9)
  running[1] = started(world, "b", rules=KEPT, delay=delay)
  world.finish(running)
  lists = members(world)
  assert lists[2] == ["a", "b", "c"] and ["a", "c"] in lists
  # Nobody waits for the dead, and within two rounds it is one of them again.
  away = [event for event, names in enumerate(lists) if names == ["a", "c"]]
  assert max(away) <= 11 and lists[-1] == ["a", "b", "c"]
  same_as_twin(world, running, delay)


def test_a_newcomer_takes_a_seat_and_is_waited_for(world):
  running = [started(world, n, rules=KEPT) for n in "abc"]
  until(world, running, 5)
  running.append(started(world, "d", rules=KEPT))
  world.finish(running)
  lists = members(world)
  assert lists[4] == ["a", "b", "c"]
  assert lists[9:] == [["a", "b", "c", "d"]] * (EVENTS - 9)
  same_as_twin(world, running)


def test_all_are_killed_at_once_and_go_on(world):
  running = [started(world, n, rules=KEPT) for n in "abc"]
  until(world, running, 7)
  for process in running:
    process.step("kill")
  running = [started(world, n, rules=KEPT) for n in "abc"]
  world.finish(running)
  same_as_twin(world, running)
  assert members(world)[10:] == [["a", "b", "c"]] * (EVENTS - 10)


def test_without_a_quorum_nothing_is_settled(world):
  running = [started(world, "a"), started(world, "b")]
  until(world, running, 3)
  running[1].step("kill")
  for _ in range(2000):
    world.turn(running)
  assert world.now > 100 and running[0].toy.event <= 4
  running[1] = started(world, "b")
  world.finish(running)


def test_one_alone_goes_on_where_the_quorum_is_one(world):
  rules = dataclasses.replace(KEPT, quorum=1)
  running = [started(world, "a", rules=rules)]
  world.finish(running)
  assert world.now < 2 * rules.grace_s  # It waited for others once.
  same_as_twin(world, running)


def test_who_slept_past_the_deletion_takes_the_newest_snapshot(world):
  running = [started(world, n, events=40) for n in "abc"]
  until(world, running, 3)
  until(world, running[:2], 30)
  world.finish(running)
  assert [process.toy.losses for process in running] == [0, 0, 1]
  assert len({process.toy.theta.tobytes() for process in running}) == 1
  assert members(world)[-1] == ["a", "b", "c"]


class Flipped(Toy):
  """Its shared parameters change by themselves once, as by a bad memory."""

  def _one_event(self, box):
    if self.event == 10 and not self.losses:
      self.theta = self.theta + np.float32(1)
    super()._one_event(box)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_who_differs_takes_the_newest_snapshot(world, name):
  kinds = {name: Flipped}
  running = [
    started(world, n, rules=KEPT, kind=kinds.get(n, Toy)) for n in "abc"
  ]
  world.finish(running)
  losses = {process.toy.name: process.toy.losses for process in running}
  assert losses == dict.fromkeys("abc", 0) | {name: 1}
  (record,) = [r for r in world.records("manifest").values() if r["left_out"]]
  assert record["left_out"] == {name: "its shared state differs"}
  same_as_twin(world, running)


def test_who_differs_each_time_ends_with_one_line(world):
  class Wrong(Toy):
    def _begin(self, box):
      super()._begin(box)
      self.theta = self.theta + np.float32(1)

  running = [started(world, n, rules=KEPT) for n in "abc"]
  until(world, running, 18)
  running[2].step("kill")
  running[2] = started(world, "c", rules=KEPT, kind=Wrong)
  with pytest.raises(Exception, match="c computes another shared state"):
    world.finish(running)


@pytest.mark.parametrize("factor", [-10, 1e3, 1e12, np.nan])
def test_wrong_values_are_left_out_by_all_and_reported(
  world, caplog, monkeypatch, factor
):
  caplog.set_level(logging.INFO)
  right = twin.delta

  def delta(name, theta):
    is_wrong = name == "b" and wild.toy.event >= 6
    return np.float32(factor if is_wrong else 1) * right(name, theta)

  monkeypatch.setattr(twin, "delta", delta)
  wild = started(world, "b", rules=KEPT)
  running = [started(world, "a", rules=KEPT), wild]
  running.append(started(world, "c", rules=KEPT))
  world.finish(running)
  monkeypatch.setattr(twin, "delta", right)
  lists = members(world)
  assert all("b" in names for names in lists[:6])
  assert not any("b" in names for names in lists[6:])
  same_as_twin(world, running)
  reason = "not finite" if np.isnan(factor) else "over 5 times the usual"
  said = [r.getMessage() for r in caplog.records]
  found = [line for line in said if line.startswith("event 6: b is left out")]
  assert len(found) == 3 and all(reason in line for line in found)


def test_a_damaged_newest_snapshot_is_passed_over(world, caplog):
  caplog.set_level(logging.INFO)
  running = [started(world, n, events=40) for n in "abc"]
  until(world, running, 18)
  running[2].step("kill")
  path = "snapshot/0000000016/0000"
  world.objects[path] = world.objects[path][:-1] + b"?"
  running[2] = started(world, "c", events=40)
  world.finish(running)
  assert "the snapshot before event 16 is damaged" in caplog.text
  assert "c takes the snapshot before event 8" in caplog.text
  assert len({process.toy.theta.tobytes() for process in running}) == 1


def test_a_snapshot_of_another_state_than_it_says_is_passed_over(world, caplog):
  class Wrong(Toy):
    def saved(self, theta, momentum):
      return [theta + np.float32(self.event == 8), momentum]

  caplog.set_level(logging.INFO)
  running = [started(world, n, kind=Wrong) for n in "abc"]
  until(world, running, 12)
  running[2].step("kill")
  running[2] = started(world, "c")
  world.finish(running)
  assert "c takes the snapshot before event 8" in caplog.text
  assert "c takes the snapshot before event 0" in caplog.text


def test_requests_and_the_size_of_the_store_are_said(world, caplog):
  caplog.set_level(logging.INFO)
  world.finish([started(world, n) for n in "abc"])
  for name in "abc":
    assert re.search(rf"event 16: {name} makes \d+\.\d requests", caplog.text)
  said = r"before event 16 is written; the store holds \d+ objects, 0\.0 MB"
  assert len(re.findall(said, caplog.text)) == 1


def test_the_store_and_the_requests_stay_bounded(world):
  running = [started(world, n, events=200) for n in "abc"]
  most = 0
  while not all(process.has_ended for process in running):
    world.turn(running)
    most = max(most, len(world.objects))
  # Three snapshots, and the events of three blocks: messages and a manifest.
  assert most < 3 * 3 + 3 * RULES.snapshot_every * 4 + 200 / 8 + 10
  for process in running:
    requests = sum(process.store.requests.values())
    assert requests / 200 < 16  # Measured: 10.
    assert process.store.requests["list"] <= 3 * 200 / RULES.snapshot_every


def test_who_was_away_does_not_train_for_a_deleted_event(world):
  running = [started(world, n, rules=RULES, events=40) for n in "abc"]
  until(world, running, 30)
  box = Mailbox(
    FakeStore(world, lambda: "ok"),
    name="d",
    secret=SECRET,
    config=CONFIG,
    rules=RULES,
  )
  with pytest.raises(LostError, match="event 0 was deleted"):
    box.attends(0)
  snapshot = box.newest()
  assert snapshot is not None and not box.attends(snapshot.event)


def test_events_come_in_order(tmp_path):
  box = Mailbox(
    Store("memory:///"), name="a", secret=b"s" * 32, config={}, rules=RULES
  )
  for event, turn in [(1, 0), (0, 1)]:
    with pytest.raises(ValueError, match="is not after -1"):
      box.exchange(event, turn, [np.zeros(1)])


def test_a_folder_and_a_bucket_give_the_same_bits(tmp_path):
  """Two threads, once through files and once through S3's requests."""

  def run(store, options):
    toys = [Toy(name, 6, delay=1) for name in "ab"]

    def go(toy):
      rules = MailboxRules(replicas=2, quorum=2, grace_s=30.0)
      where = Store(store, **options)
      toy.run(
        Mailbox(where, name=toy.name, secret=SECRET, config={}, rules=rules)
      )

    threads = [threading.Thread(target=go, args=[toy]) for toy in toys]
    for number, thread in enumerate(threads):
      thread.start()
      seat = Store(store, **options)
      while not seat.get(f"seat/{number:04d}", 1000):  # In this order.
        time.sleep(0.01)
    for thread in threads:
      thread.join(60)
    return [toy.theta.tobytes() for toy in toys]

  through_files = run(str(tmp_path), {})
  with s3_server.serving() as options:
    assert run("s3://bucket/run", options) == through_files
  expected = twin.under([["a", "b"]] * 5, delay=1).tobytes()
  assert through_files == [expected, expected]
