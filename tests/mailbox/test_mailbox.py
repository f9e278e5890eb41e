"""Replicas that meet in a store, one call at a time."""

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest

from dilocox_jax.mailbox_protocol.agreement import (
  ReplicaStaleError,
  StoppedError,
)
from dilocox_jax.mailbox_protocol.mailbox import Mailbox
from dilocox_jax.mailbox_protocol.roster import MailboxRules
from dilocox_jax.mailbox_protocol.store import Store
from dilocox_jax.threads import in_thread
from tests.mailbox.world import CONFIG, SECRET, FakeStore, Process, Toy, World
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
    self.rules = rules
    self.options = {"events": EVENTS, **options}
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

  def listed(self):
    """Names and weights of the listed replicas by event, in their order."""
    records = self.records("manifest").values()
    return [[(name, w) for name, _, w, _ in one["listed"]] for one in records]

  def lists(self):
    """Names of the listed replicas by event, in the order of messages."""
    return ["".join(name for name, _ in one) for one in self.listed()]

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
  expected = twin.under(run.listed()[:-1], delay)
  assert run.end() == expected.tobytes()
  assert set(run.lists()[-1]) == set(run.running)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_who_differs_takes_the_newest_snapshot(name):
  run = Run("", KEPT)
  for each in "abc":
    run.start(each, Flipped if each == name else Toy)
  assert run.end() == twin.under(run.listed()[:-1]).tobytes()
  assert run.losses == dict.fromkeys("abc", 0) | {name: 1}
  (record,) = [r for r in run.records("manifest").values() if r["left_out"]]
  assert list(record["left_out"]) == [name]
  assert record["left_out"][name].startswith("its shared state differs: block")


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
  with pytest.raises(ReplicaStaleError, match="event 0 was deleted"):
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


# A snapshot of 33,840 bytes is as much as one replica sends in 45 events.
@pytest.mark.parametrize(("unused", "every"), [(0, 8), (4180, 45)])
def test_the_store_and_the_requests_stay_bounded(unused, every):
  run = Run(events=200, unused=unused)
  most = 0
  run.until(2 * every - 1)
  run.kill("c")  # It comes again, and most events follow the snapshot.
  run.start("c")
  while not all(process.has_ended for process in run.running.values()):
    run.turn(run.running.values())
    most = max(most, len(run.objects))
  assert run.end() and run.lists()[-1] == "abc"
  found = [e for e in range(200) if f"snapshot/{e:010d}/index" in run.objects]
  assert found == [*range(0, 200, every)][-3:]
  # Four snapshots, the events of four intervals, each with three messages, a
  # proposal and a manifest, two marks of each deleted interval, and the seats.
  assert most < 4 * 3 + 4 * every * 5 + 2 * 200 / 8 + 10
  for process in run.running.values():
    requests = process.store.requests
    assert requests.total() / 200 < 16  # Measured: 10.
    # Each snapshot lists the four folders that it deletes from, and whoever
    # enters lists seats and snapshots.
    assert requests["list"] <= 4 * 200 / RULES.snapshot_every + 4


# Objects that a stranger damages.


def damaged_before_the_first_manifest(run, path, how):
  while len(run.records("seat")) < 3:
    run.turn(run.running.values())
  if how == "delete":
    del run.objects[path]
  else:
    run.objects[path] = run.objects[path][:-3] + b"???"


@pytest.mark.parametrize("seat", range(3))
@pytest.mark.parametrize("how", ["delete", "flip"])
def test_a_seat_that_vanishes_is_taken_again(seat, how):
  run = Run()
  damaged_before_the_first_manifest(run, f"seat/{seat:04d}", how)
  run.end()
  assert set(run.lists()[-1]) == set("abc")
  assert run.now < 3 * RULES.grace_s


@pytest.mark.parametrize("how", ["delete", "flip"])
@pytest.mark.parametrize("path", ["run.json", "run.copy.json"])
def test_what_the_run_is_survives_the_loss_of_one_object(path, how):
  run = Run()
  damaged_before_the_first_manifest(run, path, how)
  run.start("d")
  run.end()
  assert run.lists()[-1] == "abcd"
  assert run.objects["run.json"] and run.objects["run.copy.json"]


def test_no_second_run_begins_where_a_run_has_lost_its_name():
  run = Run()
  run.until(3)
  del run.objects["run.json"], run.objects["run.copy.json"]
  run.start("d")
  newcomer = run.running.pop("d")
  while not newcomer.has_ended:
    newcomer.step()
  assert "holds events of a run, and its run.json" in str(newcomer.error)
  # A member that waits writes both again.
  run.kill("a")
  run.until(6, "bc")
  assert run.objects["run.json"] and run.objects["run.copy.json"]


def test_a_manifest_that_vanishes_is_decided_as_before():
  run = Run()
  run.until(4, "ab")
  assert run.running["c"].toy.event < 4
  del run.objects["manifest/0000000003.0"]
  run.end()
  assert run.losses == dict.fromkeys("abc", 0)


def test_a_listed_message_of_an_earlier_turn_is_written_again():
  run = Run("ab", dataclasses.replace(RULES, replicas=2), turns=2)
  store = run.running["b"].store
  read = store.get
  damaged = "event/0000000000/0/a"

  def read_too_late(path, at_most):
    """The message is damaged after it was listed and before it is read."""
    is_listed = "manifest/0000000000.0" in run.objects
    if path == damaged and store.get is read_too_late:
      if not is_listed:
        return None
      run.objects[path] = b"damaged"
      store.get = read
    return read(path, at_most)

  store.get = read_too_late
  run.end()
  assert store.get is read and run.objects[damaged] != b"damaged"


def test_a_newcomer_that_is_overtaken_takes_a_newer_snapshot():
  run = Run("a", MailboxRules(replicas=1, grace_s=5.0, snapshot_every=2))
  run.until(5)
  passing = run.running["a"]

  class Slow(FakeStore):
    """While it reads arrays, three newer snapshots are written."""

    def get(self, path, at_most):
      if path == "snapshot/0000000004/arrays":
        while passing.toy.event < 11:
          run.turn([passing])
      return super().get(path, at_most)

  store = Slow(run, lambda: "ok")
  box = Mailbox(
    store, name="b", secret=SECRET, config=CONFIG, rules=passing._rules
  )
  snapshot = box.newest()
  assert "snapshot/0000000004/arrays" not in run.objects
  assert snapshot is not None and snapshot.event == 10


def test_a_newcomer_that_sleeps_before_the_first_snapshot_finds_a_later_one():
  run = Run(events=40)

  class Slow(FakeStore):
    """After it has listed no snapshot, the first events are deleted."""

    def sizes(self, prefix):
      listed = super().sizes(prefix)
      if prefix == "snapshot":
        run.until(30)
      return listed

  store = FakeStore(run, lambda: "ok")
  box = Mailbox(
    store,
    name="d",
    secret=SECRET,
    config=CONFIG,
    rules=RULES,
    pause=lambda seconds: None,
  )
  assert box.newest() is None
  store.sizes = Slow(run, lambda: "ok").sizes
  snapshot = box.newest()
  assert snapshot is not None and snapshot.event > 0


def test_who_begins_again_in_place_pauses_and_says_so(caplog):
  slept = []
  box = Mailbox(
    Store("memory:///"),
    name="a",
    secret=SECRET,
    config=CONFIG,
    rules=RULES,
    pause=slept.append,
  )
  for _ in range(8):
    box.newest()
  assert slept == [2, 4, 8, 16, 32, 60, 60]
  assert "a has begun again 2 times and never got further than" in caplog.text


# Lives that begin again.


def of_life(store, name, state=None):
  rules = dataclasses.replace(RULES, replicas=2, quorum=1, grace_s=0.05)
  box = Mailbox(store, name=name, secret=SECRET, config=CONFIG, rules=rules)
  if state is None:
    box.newest()
  else:
    box.set_state(state)
  return box


def units(*numbers):
  return [np.isin(np.arange(8), numbers).astype(np.float32)]


def averaged(exchanged, name):
  """Units of a replica's work that an exchange averages."""
  for sender, _, (values,) in exchanged.messages:
    if sender == name:
      return np.flatnonzero(values).tolist()
  return []


@pytest.mark.parametrize("is_repeated", [True, False])
def test_no_work_counts_twice_after_a_kill(is_repeated):
  """A replica is late once, is counted later, and goes on from before that.

  Its second life repeats its work, or does other work in its place.
  """
  store = Store("memory:///")
  a = of_life(store, "a")
  b = of_life(store, "b")
  saved = {}
  credited = []

  def event(number, held_back, late=False, first=True):
    announced = a.announce(number)
    if first and late:
      b.announce(number)
      b.exchange(number, 0, units(7))
    if announced:
      held_back = [*held_back, number]
    if not is_repeated and not first:
      sent = [2 * values for values in units(*held_back)]
    else:
      sent = units(*held_back)
    exchanged = a.exchange(number, 0, sent, send=announced)
    if first:
      credited.extend(averaged(exchanged, "a"))
      if not late:
        b.announce(number)
        b.exchange(number, 0, units(7))
    return ([] if exchanged.is_own_listed else held_back), exchanged

  held_back, _ = event(0, [])
  held_back, _ = event(1, held_back, late=True)
  saved = a.get_state(), held_back
  held_back, _ = event(2, held_back, late=True)
  held_back, exchanged = event(3, held_back)
  assert credited == [0, 1, 2, 3] and not exchanged.is_superseded
  # It is killed, and goes on from its checkpoint before event 2.
  a = of_life(store, "a", saved[0])
  held_back, exchanged = event(2, saved[1], first=False)
  assert not exchanged.is_own_listed and held_back == [1]
  held_back, exchanged = event(3, held_back, first=False)
  assert exchanged.is_superseded and held_back == []
  _, exchanged = event(4, held_back, first=True)
  assert not exchanged.is_superseded
  assert sorted(credited) == [0, 1, 2, 3, 4]


def test_events_come_in_order():
  store = Store("memory:///")
  box = Mailbox(store, name="a", secret=b"s" * 32, config={}, rules=RULES)
  for event, turn in [(1, 0), (0, 1)]:
    with pytest.raises(ValueError, match="is not after -1"):
      box.exchange(event, turn, [np.zeros(1)])


def test_a_message_of_other_arrays_is_never_averaged():
  """Whoever agrees first goes on alone, and the other one ends."""
  store = Store("memory:///")
  rules = dataclasses.replace(RULES, replicas=2, quorum=1, grace_s=0.2)

  def exchange(name, size):
    box = Mailbox(store, name=name, secret=SECRET, config={}, rules=rules)
    assert box.announce(0)
    return box.exchange(0, 0, [np.zeros((2, size))])

  exchanges = [in_thread(exchange, "a", 3), in_thread(exchange, "b", 4)]
  errors = [each.exception(timeout=60) for each in exchanges]
  [error] = [error for error in errors if error is not None]
  assert isinstance(error, StoppedError)
  alone, ended = ("a", "b") if errors[1] else ("b", "a")
  [going_on] = [each for each in exchanges if each.exception() is None]
  assert [name for name, *_ in going_on.result().messages] == [alone]
  line = str(error)
  assert line.startswith(f"event 0: the messages of {alone} have other arrays")
  assert ended != alone and "\n" not in line


def test_the_same_rows_may_have_another_axis_of_layers():
  boxes = {}
  store = Store("memory:///")
  rules = dataclasses.replace(RULES, replicas=2, quorum=2)
  rows = np.arange(24, dtype=np.float32)

  def exchange(name, shape):
    boxes[name] = Mailbox(
      store, name=name, secret=SECRET, config={}, rules=rules
    )
    assert boxes[name].announce(0)
    return boxes[name].exchange(0, 0, [rows.reshape(shape)])

  shapes = {"a": (2, 4, 3), "b": (1, 8, 3)}
  exchanges = [in_thread(exchange, *item) for item in shapes.items()]
  for each, shape in zip(exchanges, shapes.values(), strict=True):
    messages = each.result(timeout=60).messages
    assert [arrays[0].shape for _, _, arrays in messages] == [shape, shape]
