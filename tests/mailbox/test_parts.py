"""Who enters a run, and what the store holds: objects of one's own alone."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dilocox_jax.mailbox_protocol import messages
from dilocox_jax.mailbox_protocol.buffers import num_bytes_of, parts_of
from dilocox_jax.mailbox_protocol.fingerprints import (
  SharedState,
  fingerprint_of,
  rows_bytes,
)
from dilocox_jax.mailbox_protocol.messages import Inbox, message_path
from dilocox_jax.mailbox_protocol.roster import (
  MailboxRules,
  Roster,
  RunMismatchError,
  Seats,
  checked_name,
  join_run,
  read_secret,
  run_terms,
  write_secret,
)
from dilocox_jax.mailbox_protocol.signer import Signer
from dilocox_jax.mailbox_protocol.store import RetryingStore, Store
from dilocox_jax.reference.fingerprint import random_signs

SIGNER = Signer(b"secret", "run")
SIGNER_OF_RECORDS = Signer(b"secret", "")
CONFIG = {"inner": {"learning_rate": 0.008, "betas": (0.9, 0.95)}, "seed": 1}


@pytest.fixture(name="store")
def store_fixture():
  return Store("memory:///")


# Who enters.


def enter(store, secret=b"secret", **changes):
  terms = run_terms(CONFIG, "t" * 64, MailboxRules(grace_s=5.0)) | changes
  return join_run(store, secret, terms, where="s3://bucket/run").run


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    (
      {"config": {**CONFIG, "inner": {"learning_rate": 0.5}}},
      "config.inner.learning_rate is 0.5 here and 0.008 in the run",
    ),
    ({"config": {**CONFIG, "new": 1}}, "config.new is 1 here and None"),
    ({"rules": {"grace_s": 6.0}}, "rules.grace_s is 6.0 here"),
    ({"text": "u" * 64}, r"text is uuuuuuuu\.\.\. here and tttttttt\.\.\. in"),
    (
      {"protocol": 5},
      "this replica has version 5 of the mailbox's protocol, and the run at "
      "s3://bucket/run has version 4: install",
    ),
  ],
)
def test_who_differs_is_refused_in_one_line_that_names_the_field(
  store, changes, says
):
  assert enter(store) == enter(store) != enter(Store("memory:///"))
  before = store.get(messages.RUN, 10**6)
  with pytest.raises(RunMismatchError, match=says) as error:
    enter(store, **changes)
  assert "\n" not in str(error.value)
  assert store.get(messages.RUN, 10**6) == before
  with pytest.raises(RunMismatchError, match="not signed with this secret"):
    enter(store, secret=b"another")


def test_a_run_of_the_first_protocol_is_refused_by_its_version(store):
  enter(store)
  record = SIGNER_OF_RECORDS.verify_json(
    messages.RUN, store.get(messages.RUN, 10**6)
  )
  assert record is not None
  del record["protocol"]
  for path in (messages.RUN, messages.RUN_COPY):
    store.put(path, SIGNER_OF_RECORDS.sign_json(path, record))
  with pytest.raises(RunMismatchError, match="has version 4 .* has version 1:"):
    enter(store)


def test_a_secret_is_its_owners_alone(tmp_path):
  file = tmp_path / "folder" / "secret"
  write_secret(file)
  write_secret(tmp_path / "other")
  assert file.stat().st_mode & 0o777 == 0o600
  assert len(read_secret(file)) == 64 != read_secret(tmp_path / "other")
  with pytest.raises(ValueError, match="exists"):
    write_secret(file)
  for mode in (0o640, 0o604, 0o620):
    file.chmod(mode)
    with pytest.raises(ValueError, match="chmod 600"):
      read_secret(file)
  file.chmod(0o600)
  file.write_text("password\n")
  with pytest.raises(ValueError, match="make_secret"):
    read_secret(file)
  for path in (tmp_path / "absent", tmp_path):
    with pytest.raises(ValueError, match=f"{path} cannot .*make_secret"):
      read_secret(path)


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "a.b", "x" * 33, "-a"])
def test_a_name_that_could_be_another_path_is_refused(name):
  with pytest.raises(ValueError, match="must be 1 to 32"):
    checked_name(name)


@pytest.mark.parametrize("field", vars(MailboxRules()))
def test_no_rule_may_be_zero(field):
  rule: dict[str, Any] = {field: 0}
  with pytest.raises(ValueError, match=f"mailbox.{field}=0"):
    MailboxRules(**rule)


# Messages.

ARRAYS = [
  np.arange(6, dtype=np.float32).reshape(2, 3),
  np.array([1, 255], np.uint8),
  np.array([0.5], ml_dtypes.bfloat16),
  np.array([1], ">i4"),
  np.array(3, np.int64),
  np.zeros([0, 2], np.float16),
]
OTHERS = [ARRAYS[0] + 1, *ARRAYS[1:]]  # pyright: ignore


def inbox(store, event=3, signer=SIGNER, like=ARRAYS):
  return Inbox(store, signer, event, 0, like, num_blocks=1)


STATE = SharedState(
  name="ab" * 32,
  base=64,
  fingerprint=fingerprint_of(
    [np.arange(3, dtype=np.float32), np.array([7])], random_signs("run", 3)
  ),
)


def sent(store, name="oslo", weight=2.5, arrays=ARRAYS, **where):
  own = inbox(store, **where, like=arrays)
  return own.send(name, weight, arrays, STATE)


def assert_same(mine, theirs):
  assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
  assert mine.tobytes() == theirs.tobytes()


def test_arrays_come_back_as_they_were_and_the_size_is_known(store):
  own = sent(store)
  size = sum(array.nbytes for array in ARRAYS)
  assert num_bytes_of(own.data) == messages.message_bytes(rows_bytes(1) + size)
  reader = inbox(store)
  assert reader.has("oslo") and reader.has("oslo")
  assert store.requests["get"] == 1  # It is read once.
  assert reader.has_listed("oslo", own.digest)
  back = reader.held["oslo"]
  assert back.data == b"".join(parts_of(own.data))
  assert back.weight == 2.5
  assert back.state[:2] == ("ab" * 32, 64)
  assert back.state.fingerprint.exact_digest == STATE.fingerprint.exact_digest
  assert_same(back.state.fingerprint.rows, STATE.fingerprint.rows)
  for mine, theirs in zip(ARRAYS, back.arrays, strict=True):
    assert_same(mine, theirs)
  assert bytes(messages.raw_bytes(np.array([1], ">i4"))) == b"\1\0\0\0"


def test_that_of_an_earlier_life_stays(store):
  own = sent(store)
  reader = inbox(store)
  again = inbox(store)
  assert reader.has("oslo")
  later = again.send("oslo", 2.5, OTHERS, STATE)
  assert again.held["oslo"].digest == own.digest != later.digest
  store.delete([message_path(3, 0, "oslo")])
  new = sent(store, arrays=OTHERS)
  assert not reader.has_listed("oslo", new.digest)
  reader.read("oslo")
  assert reader.has_listed("oslo", new.digest)
  assert reader.held["oslo"].arrays[0][0, 0] == 1
  assert not reader.has_listed("oslo", own.digest)


CHANGED = {
  "cut": lambda own: own[:-1],
  "oversized": lambda own: own + bytes(10**6),
  "empty": lambda own: b"",
  "signed, shorter": lambda own: SIGNER.sign(
    message_path(3, 0, "oslo"), own[64:-8]
  ),
}
ELSEWHERE = {
  "forged": {"signer": Signer(b"guess", "run")},
  "event": {"event": 4},
  "replica": {"name": "rome"},
  "run": {"signer": Signer(b"secret", "before")},
  # From somebody who has the secret, and another plan or a broken device.
  "weight -1": {"weight": -1.0},
  "weight nan": {"weight": np.nan},
  "weight inf": {"weight": np.inf},
  "shape": {"arrays": [ARRAYS[0].T, *ARRAYS[1:]]},
  "type": {"arrays": [ARRAYS[0].view(np.int32), *ARRAYS[1:]]},
  "fewer": {"arrays": ARRAYS[:-1]},
}


@pytest.mark.parametrize("kind", [*CHANGED, *ELSEWHERE])
def test_what_is_no_message_of_this_place_is_as_if_it_were_missing(store, kind):
  own = sent(store)
  path = message_path(3, 0, "oslo")
  sent(store, "rome")
  if kind in CHANGED:
    store.put(path, CHANGED[kind](b"".join(parts_of(own.data))))
  else:
    store.put(path, sent(Store("memory:///"), **ELSEWHERE[kind]).data)
  down = store.bytes_down
  reader = inbox(store)
  assert not reader.has("oslo")
  assert not reader.has_listed("oslo", own.digest)
  assert store.bytes_down - down <= 2 * num_bytes_of(own.data)
  assert reader.has("rome")
  again = sent(store)  # It replaces what is garbage.
  other = inbox(store)
  assert other.has("oslo") and other.has_listed("oslo", again.digest)


# Seats.


def seats(store, name):
  return Seats(RetryingStore(store, pause=lambda seconds: None), SIGNER, name)


def test_every_announcement_takes_the_next_free_seat(store):
  seats(store, "a").announce(0, Roster())
  seats(store, "b").announce(2, Roster())
  back = seats(store, "a")
  back.announce(7, Roster(("a", "b")))
  assert back.index == 0
  assert seats(store, "c").read_from(0) == [
    {"name": "a", "since": 0},
    {"name": "b", "since": 2},
    {"name": "a", "since": 7},
  ]
  mine = seats(store, "c")
  mine.announce(8, Roster(("a", "b"), later=1))
  before = store.requests["put"]
  mine.announce(8, Roster(("a", "b"), later=1))
  assert store.requests["put"] == before and mine.index == 2
  assert mine.read(3) == {"name": "c", "since": 8}


def test_a_seat_that_a_stranger_wrote_is_replaced(store):
  store.put(messages.seat_path(0), b"garbage")
  mine = seats(store, "a")
  mine.announce(0, Roster())
  assert mine.read(0) is None
  mine.look_after(Roster())
  assert mine.read_from(0) == [{"name": "a", "since": 0}] * 2


def test_the_last_of_many_takes_its_seat_with_two_requests(store):
  for number in range(63):
    seats(store, f"r{number}").announce(0, Roster())
  before = store.requests.total()
  seats(store, "last").announce(0, Roster())
  assert store.requests.total() - before == 2


def test_who_comes_later_is_not_waited_for_yet():
  taken = [{"name": "b", "since": 7}]
  roster = Roster(("a",)).renewed(6, taken)
  assert roster.seats == ("a", "b") and roster.expected() == ["a"]
  assert roster.after(6, ["a"]).renewed(7).expected() == ["a", "b"]


def test_who_was_away_is_expected_from_the_event_of_its_new_seat_on():
  roster = Roster(("a", "b"), away={"b": 3})
  again = roster.renewed(5, [{"name": "b", "since": 6}])
  assert again.seats == ("a", "b") and again.num_seats == 3
  assert again.expected() == ["a"]
  assert again.renewed(6).expected() == ["a", "b"]
  # A seat of before it was away says nothing.
  assert roster.renewed(5, [{"name": "b", "since": 2}]).expected() == ["a"]
