import numpy as np
import pytest

from dilocox_jax.meeting.inbox import Inbox
from dilocox_jax.meeting.packing import Content, layout_of
from dilocox_jax.meeting.paths import message_path
from dilocox_jax.meeting.seal import Seal
from dilocox_jax.meeting.store import Store

ARRAYS = [np.array([1, 2], np.float32)]
SEAL = Seal(b"secret", "run")


@pytest.fixture(name="store")
def store_fixture():
  return Store("memory:///")


def inbox(store, event=3, seal=SEAL):
  return Inbox(store, seal, event, 0, layout_of(ARRAYS))


def content(value=1.0):
  return Content(bytes(32), 1.0, [np.array([value, 2], np.float32)])


def test_a_message_arrives_and_is_read_once(store):
  own = inbox(store).send("oslo", content())
  reader = inbox(store)
  assert reader.has("oslo") and reader.has("oslo")
  assert store.requests["get"] == 1
  assert reader.held["oslo"].digest == own.digest
  received = reader.listed("oslo", own.digest)
  assert received is not None and received.message.arrays[0][0] == 1
  assert store.requests["get"] == 1


def test_ones_own_message_is_not_read(store):
  sender = inbox(store)
  sender.send("oslo", content())
  assert sender.has("oslo") and store.requests["get"] == 0


def test_a_message_of_an_earlier_life_stays(store):
  first = inbox(store).send("oslo", content(1))
  again = inbox(store)
  second = again.send("oslo", content(5))
  assert again.held["oslo"].digest == first.digest != second.digest


def test_another_message_than_the_listed_one_is_missing(store):
  reader = inbox(store)
  old = inbox(store).send("oslo", content(1))
  assert reader.has("oslo")
  store.delete([message_path(3, 0, "oslo")])
  new = inbox(store).send("oslo", content(5))
  received = reader.listed("oslo", new.digest)
  assert received is not None and received.message.arrays[0][0] == 5
  assert reader.listed("oslo", old.digest) is None


def test_garbage_in_the_place_of_ones_own_message_is_replaced(store):
  path = message_path(3, 0, "oslo")
  store.put(path, b"garbage")
  own = inbox(store).send("oslo", content())
  assert inbox(store).listed("oslo", own.digest)


def strange(store, path, data):
  """Objects that whoever has the bucket, but not the secret, may write."""
  other = inbox(store, event=4).send("oslo", content())
  forged = Inbox(store, Seal(b"guess", "run"), 5, 0, layout_of(ARRAYS))
  return {
    "forged": forged.send("oslo", content()).data,
    "of another event": other.data,
    "of another replica": store.get(message_path(3, 0, "rome"), 10**6),
    "of another run": Inbox(
      Store("memory:///"), Seal(b"secret", "before"), 3, 0, layout_of(ARRAYS)
    )
    .send("oslo", content())
    .data,
    "cut": data[:-1],
    "oversized": data + bytes(10**6),
    "changed": data[:-1] + bytes([data[-1] ^ 1]),
    "empty": b"",
  }


@pytest.mark.parametrize(
  "kind",
  [
    "forged",
    "of another event",
    "of another replica",
    "of another run",
    "cut",
    "oversized",
    "changed",
    "empty",
  ],
)
def test_what_a_stranger_writes_is_as_if_it_were_missing(store, kind):
  path = message_path(3, 0, "oslo")
  inbox(store).send("rome", content())
  own = inbox(store).send("oslo", content())
  store.put(path, strange(store, path, own.data)[kind])
  down = store.bytes_down
  reader = inbox(store)
  assert not reader.has("oslo")
  assert reader.listed("oslo", own.digest) is None
  assert store.bytes_down - down <= 2 * len(own.data)
  assert reader.has("rome")
