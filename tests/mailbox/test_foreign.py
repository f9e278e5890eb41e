"""Replicas that meet in a folder in which a stranger makes links and pipes.

He may write in the folder, and does not have the secret. Each of his acts comes
right before an event, in place of what the replicas are about to read or write.
"""

import threading

import numpy as np
import pytest

from dilocox_jax.mailbox_protocol.mailbox import Mailbox
from dilocox_jax.mailbox_protocol.roster import MailboxRules
from dilocox_jax.mailbox_protocol.store import Store
from tests.mailbox.foreign import (
  FOREIGN,
  NO_FOLDER,
  fifo,
  link_to_folder,
  planted,
)

RULES = MailboxRules(replicas=2, quorum=1, grace_s=0.3, snapshot_every=2)
WITHIN_S = 60.0  # An event takes a grace time, if the machine is idle.


class Replica:
  """One of two replicas, which goes through one event when it is asked to."""

  def __init__(self, place, name):
    self.box = Mailbox(
      place, name=name, secret=b"s" * 64, config={}, rules=RULES
    )
    self.box.newest()
    self.theta = np.zeros(4, np.float32)
    self.lists = []

  def run(self, event):
    self.box.announce(event)
    before = self.theta
    exchanged = self.box.exchange(
      event,
      0,
      [np.full(4, 1 + len(self.box.name), np.float32)],
      state=self.box.fingerprint(event, [before]),
      snapshot=lambda: (event, [before]),
    )
    self.theta = before + sum(arrays[0] for _, _, arrays in exchanged.messages)
    self.lists.append([name for name, *_ in exchanged.messages])


class Pair:
  """Two replicas, oslo and rome, in one folder."""

  def __init__(self, place):
    self.replicas = [Replica(place, name) for name in ("oslo", "rome")]

  def run(self, event):
    threads = [
      threading.Thread(target=replica.run, args=[event], daemon=True)
      for replica in self.replicas
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(WITHIN_S)
    assert not any(thread.is_alive() for thread in threads), "it waits for ever"
    oslo, rome = self.replicas
    assert len(oslo.lists) == event + 1, "a replica has failed"
    assert oslo.lists == rome.lists
    assert oslo.theta.tobytes() == rome.theta.tobytes()


PLACES = {
  "manifest/{:010d}.0": FOREIGN,
  "proposal/{:010d}.0": FOREIGN,
  "event/{:010d}/0/oslo": FOREIGN,
  "event/{:010d}/0": NO_FOLDER,
  "event/{:010d}": NO_FOLDER,
  "snapshot/{:010d}": NO_FOLDER,
  "snapshot/{:010d}/claim": FOREIGN,
  "snapshot/{:010d}/arrays": FOREIGN,
  "snapshot/{:010d}/index": FOREIGN,
}


@pytest.mark.parametrize("path", PLACES)
def test_one_act_of_a_stranger_stops_nobody(tmp_path, victim, path):
  place = tmp_path / "place"
  step = 2 if path.startswith("snapshot") else 1
  pair = Pair(place)
  event = 0
  for kind in PLACES[path]:
    for _ in range(step):
      pair.run(event)
      event += 1
    planted(place, victim, kind, path.format(event))
  pair.run(event)
  # What a stranger does costs a grace time at most.
  assert pair.replicas[0].lists[-1]


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_in_the_way_of_a_mark_or_a_seat_stops_nobody(
  tmp_path, victim, kind
):
  place = tmp_path / "place"
  pair = Pair(place)
  pair.run(0)
  planted(place, victim, kind, "gone/0000000000")
  planted(place, victim, kind, "seat/0002")
  for event in range(1, 8):
    pair.run(event)
  lima = Replica(place, "lima")
  lima.box.announce(8)
  seat = Store(place).get("seat/0002", 10**6)
  assert seat is not None and b'"lima"' in seat
  assert Store(place).get("gone/0000000000", 10**6) is not None


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_run_may_begin_where_something_foreign_is_its_record(
  tmp_path, victim, kind
):
  planted(tmp_path / "place", victim, kind, "run.json")
  pair = Pair(tmp_path / "place")
  pair.run(0)
  assert (tmp_path / "place" / "run.json").is_file()


@pytest.mark.parametrize(
  "folder",
  ["event", "proposal", "manifest", "snapshot", "seat", "gone", "probe"],
)
@pytest.mark.parametrize("kind", [link_to_folder, fifo])
def test_whole_folders_may_be_foreign(tmp_path, victim, folder, kind):
  planted(tmp_path / "place", victim, kind, folder)
  pair = Pair(tmp_path / "place")
  for event in range(7):
    pair.run(event)


# Nearly names of old messages, manifests and snapshots.
NEARLY = [
  "event/0000000000/0/oslo.tex",
  "event/0000000000/0/oslo\n",
  "event/0000000000/0/rome/thesis.tex",
  "event/0000000000/x/oslo",
  "event/0000000000/oslo",
  "event/000000000\u0660/0/oslo",  # A zero that no replica writes.
  "manifest/0000000000.0.tex",
  "manifest/0000000000.x",
  "snapshot/0000000000/thesis",
  "snapshot/0000000000/arrays.tex",
]


def test_with_old_events_nothing_is_deleted_but_what_replicas_wrote(
  tmp_path, victim
):
  place = tmp_path / "place"
  pair = Pair(place)
  for event in range(3):
    pair.run(event)
  (place / "event/0000000000/0/rome").unlink()
  for path in NEARLY:
    planted(place, victim, lambda path, _: path.write_text("kept"), path)
  links = ["event/0000000000/x/y", "event/0000000000/0/paris", "event/x"]
  for path in links:
    planted(place, victim, link_to_folder, path)
  for event in range(3, 9):
    pair.run(event)
  assert not (place / "manifest/0000000000.0").exists()
  assert not (place / "event/0000000000/0/oslo").exists()
  for path in NEARLY:
    assert (place / path).read_text() == "kept"
  for path in links:
    assert (place / path).is_symlink()
