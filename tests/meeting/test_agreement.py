"""How a turn is settled when something is missing or not as it was."""

import dataclasses

import numpy as np
import pytest

from dilocox_jax.meeting.agreement import Agreement, LostError, Memory
from dilocox_jax.meeting.inbox import Inbox
from dilocox_jax.meeting.manifest import Listed, Manifest
from dilocox_jax.meeting.norms import norm_of
from dilocox_jax.meeting.packing import Content, layout_of
from dilocox_jax.meeting.paths import gone_path, manifest_path, message_path
from dilocox_jax.meeting.patience import Patient
from dilocox_jax.meeting.roster import Roster
from dilocox_jax.meeting.rules import MailboxRules
from dilocox_jax.meeting.seal import Seal
from dilocox_jax.meeting.seats import Seats
from dilocox_jax.meeting.snapshots import Snapshot, Snapshots
from dilocox_jax.meeting.store import Store

SEAL = Seal(b"secret", "run")
RULES = MailboxRules(replicas=2, quorum=2, grace_s=10.0, snapshot_every=4)
ARRAYS = [np.array([3, 4], np.float32)]
BOTH = Roster(("a", "b"))


class One:
  """One replica's view of a store; time goes on when it pauses."""

  def __init__(self, store=None, **rules):
    self.now = 0.0
    self.store = store or Store("memory:///")
    patient = Patient(self.store, lambda: self.now, self._pause)
    self.patient = patient
    self.snapshots = Snapshots(patient, SEAL, RULES.snapshot_every)
    self.at_pause = lambda: None
    self.agreement = Agreement(
      patient,
      SEAL,
      Seats(patient, SEAL, "a"),
      self.snapshots,
      dataclasses.replace(RULES, **rules),
    )

  def _pause(self, seconds):
    self.now += seconds
    assert self.now < 1000, "it waits for ever"
    self.at_pause()

  def inbox(self, event, turn=0):
    return Inbox(self.patient, SEAL, event, turn, layout_of(ARRAYS))

  def send(self, name, event, turn=0):
    content = Content(bytes(32), 1.0, ARRAYS)
    return self.inbox(event, turn).send(name, content)

  def settle(self, event, turn=0, memory=None):
    memory = memory or Memory(event=event, roster=BOTH)
    inbox = self.inbox(event, turn)
    agreed = self.agreement.reached(inbox, memory, 0, norm_of)
    self.agreement.collected(inbox, memory, agreed)
    return agreed

  def settle_first(self, event):
    for name in "ab":
      self.send(name, event)
    return self.settle(event)


def names(manifest):
  return [each.replica for each in manifest.listed]


def test_a_turn_is_settled_at_once_when_all_have_sent():
  one = One()
  assert names(one.settle_first(3)) == ["a", "b"]
  assert one.now == 0


def test_who_does_not_send_is_waited_for_up_to_the_grace_time():
  one = One(quorum=1)
  one.send("b", 3)
  agreed = one.settle(3)
  assert names(agreed) == ["b"] and agreed.roster.away == {"a": 3}
  assert 10 < one.now < 12


def test_less_than_a_quorum_settles_nothing():
  one = One()
  one.send("b", 3)
  with pytest.raises(AssertionError, match="waits for ever"):
    one.settle(3)


def test_the_first_event_waits_for_the_replicas_of_the_rules():
  one = One(quorum=1)
  seats = Seats(one.patient, SEAL, "a")
  seats.announce(0, Roster())
  one.send("a", 0)
  assert names(one.settle(0, memory=Memory())) == ["a"]
  assert one.now > 10


def test_a_later_turn_belongs_to_those_of_the_first():
  one = One()
  one.settle_first(3)
  one.send("b", 3, 1)
  one.send("c", 3, 1)
  one.send("a", 3, 1)
  agreed = one.settle(3, 1)
  assert names(agreed) == ["a", "b"] and one.now == 0


def test_a_later_turn_goes_on_without_those_who_died_in_between():
  one = One()
  one.settle_first(3)
  one.send("b", 3, 1)
  assert names(one.settle(3, 1)) == ["b"]
  one.settle_first(4)
  assert names(one.settle(4, 1)) == []


def test_a_manifest_of_a_deleted_event_is_not_used():
  one = One()
  one.settle_first(3)
  path = gone_path(0)
  one.store.put(path, SEAL.closed(path, b"deleted"))
  with pytest.raises(LostError, match="event 3 was deleted"):
    one.settle(3)


def test_another_list_before_is_noticed():
  one = One()
  one.settle_first(3)
  memory = Memory(event=3, before="another", roster=BOTH)
  with pytest.raises(LostError, match="another list before"):
    one.settle(3, memory=memory)


def test_a_forged_manifest_is_deleted_and_written_by_a_member():
  one = One()
  one.store.put(manifest_path(3, 0), b'{"seal":"' + b"0" * 64 + b'","is":{}}\n')
  assert names(one.settle_first(3)) == ["a", "b"]


def test_a_manifest_of_another_event_does_not_count():
  one = One()
  one.settle_first(3)
  old = one.store.get(manifest_path(3, 0), 10**6)
  assert old is not None
  one.store.put(manifest_path(4, 0), old)
  for name in "ab":
    one.send(name, 4)
  agreed = one.settle(4, memory=Memory(event=4, before="x", roster=BOTH))
  assert agreed.before == "x"


def test_a_listed_message_that_vanished_is_waited_for_and_written_again():
  one, other = One(), None
  one.settle_first(3)
  path = message_path(3, 0, "b")
  data = one.store.get(path, 10**6)
  one.store.delete([path])
  other = One(one.store)

  def keep_waiting():
    if other.now > 30 and one.now == 0:  # The other waits for event 4.
      with pytest.raises(AssertionError, match="waits for ever"):
        one.settle(4)

  other.at_pause = keep_waiting
  assert names(other.settle(3)) == ["a", "b"]
  assert one.store.get(path, 10**6) == data


def test_two_that_wait_for_each_others_message_write_theirs_again():
  one = One()
  for name in "ab":
    one.send(name, 3)
  path = message_path(3, 0, "a")
  data = one.store.get(path, 10**6)
  memory = Memory(event=3, roster=BOTH)
  inbox = one.inbox(3)
  agreed = one.agreement.reached(inbox, memory, 0, norm_of)
  for name in "ab":
    one.store.delete([message_path(3, 0, name)])
  inbox.held.pop("b")
  with pytest.raises(AssertionError, match="waits for ever"):
    one.agreement.collected(inbox, memory, agreed)
  assert one.store.get(path, 10**6) == data


def test_a_message_that_vanished_before_the_manifest_is_written_again():
  one = One()
  one.send("a", 3)
  path = message_path(3, 0, "a")
  one.at_pause = lambda: one.store.delete([path] if one.now < 9 else [])
  with pytest.raises(AssertionError, match="waits for ever"):
    one.settle(3)
  assert one.store.get(path, 10**6) is not None


def test_who_waits_for_what_was_deleted_looks_for_a_newer_snapshot():
  one = One()
  listed = Listed("b", "0" * 64, 1.0, 5.0)
  manifest = Manifest("", "", (listed,), {}, BOTH)
  path = manifest_path(3, 0)
  one.store.put(path, SEAL.closed_json(path, manifest.to_json()))
  one.snapshots.write(Snapshot(8, 8, "", {}, ARRAYS))
  with pytest.raises(LostError, match="gone on from event 3"):
    one.settle(3)
  assert one.now == 0


def test_a_turn_before_the_snapshot_is_only_read():
  one = One()
  for name in "ab":
    one.send(name, 3)
  inbox = Inbox(one.patient, SEAL, 3, 0, layout_of(ARRAYS), is_past=True)
  with pytest.raises(AssertionError, match="waits for ever"):
    one.agreement.reached(inbox, Memory(event=5, roster=BOTH), 0, norm_of)
  assert one.store.get(manifest_path(3, 0), 10**6) is None


def test_the_memory_keeps_the_last_norms_of_each_kind():
  memory = Memory(roster=BOTH)
  listed = tuple(Listed(n, "", 1.0, 2.0) for n in "abc")
  manifest = Manifest("s", "", listed, {}, BOTH)
  for event in range(4):
    memory = memory.after(manifest, event, 0, kind=event % 2)
    memory = memory.after(manifest, event, 1, kind=event % 2)
  assert memory.event == 4 and memory.before == manifest.digest()
  assert {key: len(v) for key, v in memory.accepted.items()} == dict.fromkeys(
    ["0.0", "0.1", "1.0", "1.1"], 6
  )
  assert Memory.from_json(memory.to_json()) == memory
