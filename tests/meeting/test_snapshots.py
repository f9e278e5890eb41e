import numpy as np
import pytest

from dilocox_jax.meeting import snapshots as module
from dilocox_jax.meeting.paths import (
  manifest_path,
  message_path,
  snapshot_path,
)
from dilocox_jax.meeting.seal import Seal
from dilocox_jax.meeting.snapshots import Snapshot, Snapshots
from dilocox_jax.meeting.store import Store

ARRAYS = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7)]


@pytest.fixture(name="store")
def store_fixture(monkeypatch):
  monkeypatch.setattr(module, "PART_BYTES", 20)
  return Store("memory:///")


def of_run(store):
  return Snapshots(store, Seal(b"secret", "run"), every=4)


def snapshot(event, first=None):
  first = event if first is None else first
  return Snapshot(event, first, "ab", {"roster": [1]}, ARRAYS)


def test_a_snapshot_comes_back_from_its_parts(store):
  of_run(store).write(snapshot(8, 6))
  back = of_run(store).read(8)
  assert back is not None
  assert back[:4] == snapshot(8, 6)[:4]
  for mine, theirs in zip(ARRAYS, back.arrays, strict=True):
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    assert mine.tobytes() == theirs.tobytes()


def test_one_claims_a_snapshot_and_may_ask_again(store):
  first, second = of_run(store), of_run(store)
  assert first.is_claimed(8) and not second.is_claimed(8)
  assert first.is_claimed(8)
  assert second.is_claimed(12)


@pytest.mark.parametrize("part", ["0000", "0001", "index"])
@pytest.mark.parametrize("harm", ["missing", "cut", "other"])
def test_a_damaged_snapshot_is_none(store, part, harm):
  mine = of_run(store)
  mine.write(snapshot(8))
  path = snapshot_path(8, part)
  data = store.get(path, 10**6)
  store.delete([path])
  if harm == "cut":
    store.put(path, data[:-1])
  elif harm == "other":
    store.put(path, data[:-2] + b"xx")
  assert mine.read(8) is None


def test_only_whole_snapshots_are_found_the_newest_first(store):
  mine = of_run(store)
  for event in (4, 8):
    mine.is_claimed(event)
    mine.write(snapshot(event))
  mine.is_claimed(12)  # And its writer died.
  assert mine.events() == [8, 4]


def fill(store, events):
  for event in events:
    store.put(message_path(event, 0, "oslo"), b"x" * 10)
    store.put(manifest_path(event, 0), b"x" * 10)


def test_what_nobody_needs_is_deleted_and_marked(store):
  mine = of_run(store)
  fill(store, range(20))
  for event, first in [(8, 8), (12, 9), (16, 15)]:
    mine.is_claimed(event)
    number, size = mine.write(snapshot(event, first))
  # The snapshot before event 12 needs event 9, which is in the block from 8 on.
  left = store.sizes("event") | store.sizes("manifest")
  assert len(left) == 24 and min(left) == message_path(8, 0, "oslo")
  assert mine.events() == [16, 12]
  everything = left | store.sizes("snapshot")
  assert (number, size) == (len(everything), sum(everything.values()))
  assert [mine.is_gone(e) for e in (0, 7, 8, 16)] == [True, True, False, False]


def test_the_marks_do_not_grow_without_end(store, monkeypatch):
  monkeypatch.setattr(module, "KEPT_MARKS", 3)
  mine = of_run(store)
  for event in range(0, 80, 4):
    fill(store, range(event, event + 4))
    mine.write(snapshot(event))
  assert len(store.sizes("gone")) <= 4
  assert len(store.sizes("event")) <= 12


def test_a_mark_that_a_stranger_wrote_says_nothing(store):
  store.put("gone/0000000000", b"deleted")
  assert not of_run(store).is_gone(0)
