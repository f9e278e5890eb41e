"""What a manifest lists, and how a turn is settled if something is missing."""

import dataclasses
import itertools
import json
import logging
import math

import ml_dtypes
import numpy as np
import pytest

from dilocox_jax.mailbox_protocol import messages
from dilocox_jax.mailbox_protocol import snapshots as snapshots_module
from dilocox_jax.mailbox_protocol.agreement import (
  Agreement,
  Memory,
  ReplicaStaleError,
)
from dilocox_jax.mailbox_protocol.fingerprints import SharedState
from dilocox_jax.mailbox_protocol.manifest import (
  Listed,
  Manifest,
  make_manifest,
  norm_of,
  too_large,
  weight_factors,
)
from dilocox_jax.mailbox_protocol.messages import Inbox, Message
from dilocox_jax.mailbox_protocol.roster import MailboxRules, Roster, Seats
from dilocox_jax.mailbox_protocol.signer import Signer
from dilocox_jax.mailbox_protocol.snapshots import Snapshot, Snapshots
from dilocox_jax.mailbox_protocol.store import RetryingStore, Store
from dilocox_jax.mailbox_protocol.votes import Vote

SIGNER = Signer(b"secret", "run")
RULES = MailboxRules(replicas=2, quorum=2, grace_s=10.0, snapshot_every=4)
ARRAYS = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7)]
BOTH = Roster(("a", "b"))


@pytest.fixture(name="store")
def store_fixture():
  return Store("memory:///")


# Lists.


@pytest.mark.parametrize(
  ("norms", "differing", "listed", "reason"),
  [
    ({"b": 1, "a": 1}, "", ["b", "a"], ""),
    ({"a": 1, "b": 1, "c": 1}, "a", ["b", "c"], "its shared state differs"),
    ({"a": 1, "b": 1e6, "c": 1}, "", ["a", "c"], "over 8 times"),
    # Norms of another state are not usual.
    ({"a": 99, "b": 1, "c": 99, "d": 1}, "a", ["b", "d"], "over 8 times"),
    ({}, "", [], ""),
  ],
)
def test_a_manifest_lists_those_who_agree(norms, differing, listed, reason):
  manifest = make_manifest(
    {
      name: Message(name.encode(), 2.0, [np.array([norm], np.float32)])
      for name, norm in norms.items()
    },
    states=Vote(dict.fromkeys(differing, "its shared state differs")),
    before="x",
    accepted=[],
    max_norm_ratio=8.0,
    roster=Roster(("a", "b", "c"), {"c": 3}),
  )
  assert manifest.names == listed
  assert all(each.weight == 2.0 for each in manifest.listed)
  left_out = " ".join(manifest.left_out.values())
  assert reason in left_out and bool(reason) == bool(left_out)
  back = Manifest.from_json(
    json.loads(json.dumps(dataclasses.asdict(manifest)))
  )
  assert back == manifest and back.digest() == manifest.digest()
  assert dataclasses.replace(back, before="y").digest() != back.digest()


def left_out(norms, accepted=(), ratio=5.0):
  named = {str(number): norm for number, norm in enumerate(norms)}
  return set(map(int, too_large(named, accepted, ratio)))


def test_what_is_usual_follows_the_run():
  floats = [np.array([3], np.float32), np.array([[4]], ml_dtypes.bfloat16)]
  assert norm_of([*floats, np.array([100])]) == pytest.approx(5)
  assert not math.isfinite(norm_of([np.array([1, np.inf], np.float32)]))
  assert left_out([9.0], [1.0] * 6) == {0}  # A lone one, and those before.
  # Its first messages are of fewer steps, at learning rates that rise from 0.
  rising = [0.0, 9.0, 25.0, 41.0, 49.0, 49.0, 49.0, 49.0]
  assert not any(left_out([x], rising[:n]) for n, x in enumerate(rising))
  assert left_out([9.0]) == set() and left_out([np.nan]) == {0}
  assert left_out([50.0, 60.0, 55.0], [1.0] * 20) == set()  # All at once.
  assert left_out([9.0], [1.0] * 100 + [5.0] * 20) == set()
  assert left_out([0.0, 0.0], [0.0]) == set()
  # What was usual before the learning rate fell hides nobody among three.
  assert left_out([1.0, 9.0, 1.0], [3.0] * 6) == {1}


def test_replicas_that_made_no_progress_say_nothing_of_what_is_usual():
  assert left_out([0.0, 0.005]) == set()
  assert left_out([0.0, 0.0, 0.005], [0.004]) == set()
  assert left_out([0.0, 1.0, 9.0, 1.0]) == {2}
  assert weight_factors({"a": 0.0, "b": 5.0}, [], 1.0) == {"a": 1, "b": 1}
  assert weight_factors({"a": 0.0, "b": 0.0}, [], 1.0) == {"a": 1, "b": 1}


def test_a_larger_message_weighs_less():
  norms = {"a": 1.0, "b": 2.0, "c": 1.0, "d": 0.5}
  assert weight_factors(norms, [], 1.0) == {"a": 1, "b": 0.25, "c": 1, "d": 1}
  assert weight_factors(norms, [], 1.6)["b"] == pytest.approx(0.8**2)
  # Of two messages neither has more influence than the other.
  assert weight_factors({"a": 1.0, "b": 4.0}, [], 1.0) == {"a": 1, "b": 0.25}
  assert weight_factors({"a": 1.0, "b": 4.0}, [2.0], 1.0) == {"a": 1, "b": 0.5}


def trained_beside_a_faulty_replica(num_replicas, factor):
  """Distance to the optimum, 1 at the start, after 100 events of a toy."""
  rng = np.random.default_rng(0)
  theta = np.zeros(20, np.float32)
  target = rng.normal(size=20).astype(np.float32)
  momentum = np.zeros(20, np.float32)
  for _ in range(100):
    sent = {}
    for number in range(num_replicas):
      noise = 0.1 * rng.normal(size=20)
      delta = np.float32(0.2 * (theta - target) + 0.2 * noise)
      delta *= factor if number == 0 else 1
      data = str(number).encode()
      arrays = [np.asarray(delta, np.float32)]
      sent[str(number)] = Message(data, 3.0, arrays)
    manifest = make_manifest(
      sent, before="", accepted=[], max_norm_ratio=5.0, roster=Roster()
    )
    weights = [each.weight for each in manifest.listed]
    deltas = [sent[name].arrays[0] for name in manifest.names]
    mean = np.average(deltas, axis=0, weights=weights).astype(np.float32)
    momentum = np.float32(0.5) * momentum + mean
    theta = theta - np.float32(0.7) * (mean + np.float32(0.5) * momentum)
  return np.linalg.norm(theta - target) / np.linalg.norm(target)


@pytest.mark.parametrize("factor", [0.0, -1.0, -2.0, -3.0, -4.9, 4.9, 100.0])
def test_three_replicas_converge_beside_a_faulty_one(factor):
  assert trained_beside_a_faulty_replica(3, factor) < 0.1


@pytest.mark.parametrize("factor", [-2.0, -3.0, -4.9])
def test_two_replicas_stand_still_at_worst(factor):
  assert trained_beside_a_faulty_replica(2, factor) < 1.5


# A turn.


class One:
  """One replica's view of a store; time goes on when it pauses."""

  def __init__(self, store=None, **rules):
    self.now = 0.0
    self.store = store or Store("memory:///")
    self.patient = RetryingStore(self.store, lambda: self.now, self._pause)
    self.snapshots = Snapshots(self.patient, SIGNER)
    self.seats = Seats(self.patient, SIGNER, "a")
    self.at_pause = lambda: None
    self.agreement = Agreement(
      self.patient,
      SIGNER,
      self.seats,
      self.snapshots,
      dataclasses.replace(RULES, **rules),
    )

  def _pause(self, seconds):
    self.now += seconds
    assert self.now < 1000, "it waits for ever"
    self.at_pause()

  def inbox(self, event=3, turn=0, **options):
    return Inbox(self.patient, SIGNER, event, turn, ARRAYS, **options)

  def send(self, names, event=3, turn=0):
    for name in names:
      state = SharedState(name=self.name_of_state(turn))
      self.inbox(event, turn).send(name, 1.0, ARRAYS, state)

  def name_of_state(self, turn):
    return self.agreement.first.digest() if turn else ""

  def settle(self, event=3, turn=0, memory=None, inbox=None):
    self.agreement.memory = memory or Memory(event=event, roster=BOTH)
    inbox = inbox or self.inbox(event, turn)
    self.agreement.open(inbox)
    agreed = self.agreement.wait_for_manifest(inbox)
    self.agreement.fetch_messages(inbox, agreed)
    return agreed

  def settled(self, event=3):
    self.send("ab", event)
    return self.settle(event)

  def waits(self, **given):
    with pytest.raises(AssertionError, match="waits for ever"):
      self.settle(**given)


def test_a_turn_is_settled_when_all_have_sent_or_the_grace_time_is_over():
  one = One()
  assert one.settled().names == ["a", "b"] and one.now == 0
  one.send("b", 5)
  one.waits(event=5)  # It is less than a quorum.
  one = One(quorum=1)
  one.send("b")
  agreed = one.settle()
  assert agreed.names == ["b"] and agreed.roster.away == {"a": 3}
  assert 10 < one.now < 12


@pytest.mark.parametrize("names", ["bca", "b", ""])
def test_a_later_turn_belongs_to_those_of_the_first_who_still_send(names):
  one = One()
  one.settled()
  one.send(names, turn=1)
  assert one.settle(turn=1).names == sorted(set("ab") & set(names))
  assert (one.now > 10) == (len(names) < 3)


def test_what_was_settled_otherwise_is_noticed():
  one = One()
  one.settled()
  memory = Memory(event=3, before="another", roster=BOTH)
  with pytest.raises(ReplicaStaleError, match="another list before"):
    one.settle(memory=memory)
  path, _ = messages.gone_paths(0)
  one.store.put(path, b"deleted")  # A mark that a stranger wrote says nothing.
  one.settle()
  one.store.put(path, SIGNER.sign(path, b"deleted"))
  with pytest.raises(ReplicaStaleError, match="event 3 was deleted"):
    one.settle()


def test_a_forged_manifest_does_not_count():
  one = One()
  one.store.put(messages.manifest_path(3, 0), b"forged")
  assert one.settled().names == ["a", "b"]


def wait_beside(one, other):
  """Lets one wait for event 4 once the other has waited for 30 s."""

  def keep_waiting():
    if other.now > 30 and one.now == 0:
      one.waits(event=4)

  other.at_pause = keep_waiting


def test_a_listed_message_that_vanished_is_waited_for_and_written_again():
  one = One()
  one.settled()
  path = messages.message_path(3, 0, "b")
  data = one.store.get(path, 10**6)
  one.store.delete([path])
  other = One(one.store)
  wait_beside(one, other)
  assert other.settle().names == ["a", "b"]
  assert one.store.get(path, 10**6) == data


def test_a_new_life_does_not_keep_the_listed_message_of_its_last_life_away():
  """The message is lost, and the next life of its sender writes another one."""
  one = One()
  one.settled()
  path = messages.message_path(3, 0, "b")
  data = one.store.get(path, 10**6)
  one.store.delete([path])
  other = One(one.store)
  inbox = other.inbox()
  inbox.send("b", 0.5, ARRAYS)
  assert one.store.get(path, 10**6) != data
  wait_beside(one, other)
  assert other.settle(inbox=inbox).names == ["a", "b"]
  assert one.store.get(path, 10**6) == data


def test_who_has_read_a_listed_message_writes_it_again_in_place_of_another():
  """As above, but the replica that has read it waits for the same event."""
  one = One()
  one.send("ab")
  path_of_a, path_of_b = [messages.message_path(3, 0, name) for name in "ab"]
  data = one.store.get(path_of_b, 10**6)
  inbox = one.inbox()
  one.agreement.memory = Memory(event=3, roster=BOTH)
  agreed = one.agreement.wait_for_manifest(inbox)
  one.store.delete([path_of_a, path_of_b])
  one.inbox().send("b", 0.5, ARRAYS)
  inbox.held.pop("a")
  with pytest.raises(AssertionError, match="waits for ever"):
    one.agreement.fetch_messages(inbox, agreed)
  assert one.store.get(path_of_b, 10**6) == data


def with_lost_message():
  """Returns a replica that has read a message which is then lost.

  The message's inbox and its path are returned, too.
  """
  one = One()
  one.send("a")
  inbox = one.inbox()
  assert inbox.has("a")
  path = messages.message_path(3, 0, "a")
  one.store.delete([path])
  return one, inbox, path


def test_a_message_that_no_list_names_yet_does_not_replace_another():
  one, inbox, path = with_lost_message()
  one.inbox().send("a", 0.5, ARRAYS)
  data = one.store.get(path, 10**6)
  one.waits(inbox=inbox)
  assert one.store.get(path, 10**6) == data


@pytest.mark.parametrize("seats", [("a",), ("a", "b", "c")])
def test_another_valid_manifest_stays_also_if_it_is_larger(seats):
  """A manifest and its proposal are lost, and others decide on another one."""
  one = One()
  agreed = one.settled()
  one.store.delete([messages.proposal_path(3, 0)])
  path = messages.manifest_path(3, 0)
  other = dataclasses.replace(agreed, roster=Roster(seats))
  data = SIGNER.sign_json(path, dataclasses.asdict(other))
  one.store.put(path, data)
  one.waits(event=4)
  assert one.store.get(path, 10**6) == data


def test_garbage_is_replaced_by_the_manifest_also_if_it_is_larger():
  one = One()
  one.settled()
  path = messages.manifest_path(3, 0)
  data = one.store.get(path, 10**6)
  one.store.put(path, b"x" * 10**5)
  one.waits(event=4)
  assert one.store.get(path, 10**6) == data


def test_a_valid_object_that_was_created_a_moment_ago_stays(monkeypatch):
  """A sender's next life writes a message that was just found to be lost."""
  one, inbox, path = with_lost_message()
  create = one.store.create

  def late(created_path, data):
    if created_path == path:
      monkeypatch.undo()
      one.inbox().send("a", 0.5, ARRAYS)
    return create(created_path, data)

  monkeypatch.setattr(one.store, "create", late)
  one.waits(inbox=inbox)
  message = one.inbox()
  assert message.has("a") and message.held["a"].weight == 0.5


def test_two_that_wait_for_each_others_message_write_theirs_again():
  one = One()
  one.send("ab")
  paths = [messages.message_path(3, 0, name) for name in "ab"]
  data = one.store.get(paths[0], 10**6)
  inbox = one.inbox()
  one.agreement.memory = Memory(event=3, roster=BOTH)
  one.agreement.open(inbox)
  agreed = one.agreement.wait_for_manifest(inbox)
  one.store.delete(paths)
  inbox.held.pop("b")
  with pytest.raises(AssertionError, match="waits for ever"):
    one.agreement.fetch_messages(inbox, agreed)
  assert one.store.get(paths[0], 10**6) == data


def test_a_message_that_vanished_before_the_manifest_is_written_again():
  one = One()
  one.send("a")
  path = messages.message_path(3, 0, "a")

  def delete_early():
    if 0.1 < one.now < 9:  # It has read the message by then.
      one.store.delete([path])

  one.at_pause = delete_early
  one.waits()
  assert one.store.get(path, 10**6) is not None


def test_who_waits_for_what_was_deleted_looks_for_a_newer_snapshot():
  one = One()
  manifest = Manifest(
    listed=(Listed("b", "0" * 64, 1.0, 5.0),),
    roster=BOTH,
    layout=one.inbox().layout,
  )
  path = messages.manifest_path(3, 0)
  one.store.put(path, SIGNER.sign_json(path, dataclasses.asdict(manifest)))
  one.snapshots.write(Snapshot(8, 8, {}, ARRAYS), starts=[0, 8])
  with pytest.raises(ReplicaStaleError, match="gone on from event 3"):
    one.settle()
  assert one.now < 1


def test_what_is_waited_for_is_said_once_a_minute(caplog):
  caplog.set_level(logging.INFO)
  one = One()
  one.send("b")
  one.waits()
  lines = [line for line in caplog.messages if "waits for a quorum" in line]
  assert len(set(lines)) == 1 and lines[0].endswith("there are messages of b")
  assert 1000 / 60 - 2 < len(lines) < 1000 / 60 + 2
  one = One()
  one.settled()
  one.store.delete([messages.message_path(3, 0, "b")])
  caplog.clear()
  other = One(one.store)
  other.waits()
  (line,) = set(caplog.messages)
  assert "waits for the message of b, which is listed and not there" in line
  assert "delete manifest/0000000003.0 and proposal/0000000003.0" in line


def test_a_replica_that_waits_asks_less_and_less():
  one = One()
  one.send("b")
  one.waits()
  # Pauses grow to a sixth of the grace time, and it looks around once a minute.
  pauses = 1000 / (RULES.grace_s / 6)
  assert one.store.requests.total() < 5 * pauses + 10 * 1000 / 60


def test_a_deleted_event_is_not_agreed_on_again_without_its_first_mark():
  one = One()
  one.send("ab")
  _, second = messages.gone_paths(0)
  one.store.put(second, SIGNER.sign(second, b"deleted"))
  for _ in range(2):  # The manifest that it writes there is not followed.
    with pytest.raises(ReplicaStaleError, match="event 3 was deleted"):
      one.settle()


def test_a_turn_before_the_snapshot_is_only_read():
  one = One()
  one.send("ab")
  memory = Memory(event=5, roster=BOTH)
  one.waits(memory=memory, inbox=one.inbox(is_past=True))
  assert one.store.get(messages.manifest_path(3, 0), 10**6) is None


def test_the_memory_keeps_the_last_norms_of_each_kind():
  memory = Memory(roster=BOTH)
  one = One()
  listed = tuple(Listed(n, "", 1.0, 2.0) for n in "abc")
  manifest = Manifest("", listed, {}, BOTH)
  for event, turn in [(event, turn) for event in range(14) for turn in (0, 1)]:
    memory = memory.after(manifest, one.inbox(event, turn, kind=event % 2))
  assert memory.event == 14 and memory.before == manifest.digest()
  assert {key: len(v) for key, v in memory.accepted.items()} == dict.fromkeys(
    ["0.0", "0.1", "1.0", "1.1"], 6
  )
  back = Memory.from_json(json.loads(json.dumps(dataclasses.asdict(memory))))
  assert back == memory


# Snapshots.


def of_run(store):
  return Snapshots(store, SIGNER)


def snapshot(event, first=None):
  first = event if first is None else first
  return Snapshot(event, first, {"roster": [1]}, ARRAYS)


@pytest.mark.parametrize(
  ("part", "harm"),
  [
    *itertools.product(
      ["arrays", "index"], ["missing", "cut", "longer", "other"]
    ),
    ("arrays", "signed, shorter"),
  ],
)
def test_a_damaged_snapshot_is_none(store, part, harm):
  mine = of_run(store)
  mine.write(snapshot(8), starts=[0, 8])
  path = messages.snapshot_path(8, part)
  data = bytes(store.get(path, 10**6))
  store.delete([path])
  changed = {"cut": data[:-1], "other": data[:-2] + b"xx"}
  changed |= {"longer": data + b"x"}
  changed |= {"signed, shorter": SIGNER.sign(path, data[32:-8])}
  if harm in changed:
    store.put(path, changed[harm])
  assert mine.read(8) is None


def test_one_claims_a_snapshot_and_only_whole_ones_are_found(store):
  first = of_run(store)
  second = of_run(store)
  for event in (4, 8):
    assert first.claim(event) and not second.claim(event)
    assert first.claim(event)  # It may ask again.
    first.write(snapshot(event), starts=range(0, event + 1, 4))
  assert second.claim(12)  # And its writer died.
  for event, part in [(6, "index"), (9**9, "index"), (16, "claim")]:
    store.put(messages.snapshot_path(event, part), b"of a stranger")
  assert first.events() == [8, 4] and first.claim(16)


def fill(store, events):
  for event in events:
    store.put(messages.message_path(event, 0, "oslo"), b"x" * 10)
    store.put(messages.manifest_path(event, 0), b"x" * 10)


def test_what_nobody_needs_is_deleted_and_marked(store, caplog):
  caplog.set_level(logging.INFO)
  mine = of_run(store)
  fill(store, range(20))
  store.put(messages.snapshot_path(10, "index"), b"of a stranger")
  starts = [0, 5, 8, 12, 16, 18]
  for event, first in [(8, 8), (12, 9), (16, 15), (18, 18)]:
    mine.claim(event)
    mine.write(snapshot(event, first), starts[: starts.index(event) + 1])
  # The snapshot before event 12 needs event 9, of the interval from 8 on.
  left = store.sizes("event") | store.sizes("manifest")
  assert len(left) == 24 and min(left) == messages.message_path(8, 0, "oslo")
  assert mine.events() == [18, 16, 12]
  assert f"the store has 0.0 MB in {24 + 3 * 3} objects" in caplog.messages[-1]
  assert [mine.is_gone(start) for start in starts[:3]] == [True, True, False]


def test_the_marks_do_not_grow_without_end(store, monkeypatch):
  monkeypatch.setattr(snapshots_module, "KEPT_MARKS", 3)
  mine = of_run(store)
  for event in range(0, 80, 4):
    fill(store, range(event, event + 4))
    mine.write(snapshot(event), starts=range(0, event + 1, 4))
  assert len(store.sizes("gone")) <= 8
  assert len(store.sizes("event")) <= 16


def test_events_that_no_memory_has_are_deleted_without_a_mark(store):
  mine = of_run(store)
  fill(store, range(2, 12))
  for event in (4, 8, 12):
    mine.write(snapshot(event), starts=[4, 8, 12])
  # The oldest snapshot that is kept needs the interval from 4 on.
  assert not mine.is_gone(4) and not store.sizes("gone")
  assert min(store.sizes("event")) == messages.message_path(4, 0, "oslo")
