"""The parts of a meeting by themselves: who enters, messages, lists, seats."""

import itertools
import json
import logging
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dilocox_jax.meeting import paths
from dilocox_jax.meeting.admission import (
  DiffersError,
  admitted,
  code_digest,
  run_terms,
)
from dilocox_jax.meeting.inbox import Inbox
from dilocox_jax.meeting.manifest import Manifest, Sent, drawn_up
from dilocox_jax.meeting.norms import norm_of, too_large
from dilocox_jax.meeting.packing import (
  Content,
  layout_of,
  packed,
  raw_bytes,
  unpacked,
)
from dilocox_jax.meeting.patience import Patient
from dilocox_jax.meeting.roster import Roster
from dilocox_jax.meeting.rules import MailboxRules
from dilocox_jax.meeting.seal import JSON_BYTES, TAG_BYTES, Seal
from dilocox_jax.meeting.seats import Seats
from dilocox_jax.meeting.secret import read_secret, write_secret
from dilocox_jax.meeting.store import AwayError, Store

SEAL = Seal(b"secret", "run")
CONFIG = {"inner": {"learning_rate": 0.008, "betas": (0.9, 0.95)}, "seed": 1}


@pytest.fixture(name="store")
def store_fixture():
  return Store("memory:///")


# Who enters.


def terms(**changes):
  return run_terms(CONFIG, "t" * 64, {"grace_s": 5.0}) | changes


def enter(store, new=None, secret=b"secret", **options):
  new = terms() if new is None else new
  return admitted(store, secret, new, where="s3://bucket/run", **options)


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
    ({"code": "x"}, "code is 'x' here and .*: install the same, or accept"),
    ({"versions": {"jax": "9"}}, "versions.jax is '9' here and"),
  ],
)
def test_who_differs_is_refused_in_one_line_that_names_the_field(
  store, changes, says
):
  assert enter(store) == enter(store) != enter(Store("memory:///"))
  before = store.get(paths.RUN, 10**6)
  with pytest.raises(DiffersError, match=says) as error:
    enter(store, terms(**changes))
  assert "\n" not in str(error.value)
  assert store.get(paths.RUN, 10**6) == before
  with pytest.raises(DiffersError, match="not sealed with this secret"):
    enter(store, secret=b"another")
  is_version = not changes.keys().isdisjoint({"code", "versions"})
  try:
    enter(store, terms(**changes), accept_version=True)
  except DiffersError:
    assert not is_version
  else:
    assert is_version


def test_the_digest_of_code_sees_texts_and_names(tmp_path):
  (tmp_path / "a.py").write_text("x = 1\n")
  first = code_digest(tmp_path)
  (tmp_path / "notes.txt").write_text("not code")
  assert code_digest(tmp_path) == first
  (tmp_path / "a.py").write_text("x = 2\n")
  second = code_digest(tmp_path)
  (tmp_path / "a.py").rename(tmp_path / "b.py")
  assert len({first, second, code_digest(tmp_path)}) == 3


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


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "a.b", "x" * 33, "-a"])
def test_a_name_that_could_be_another_path_is_refused(name):
  with pytest.raises(ValueError, match="must be 1 to 32"):
    paths.checked_name(name)


@pytest.mark.parametrize(
  "field", ["replicas", "quorum", "grace_s", "snapshot_every", "max_norm_ratio"]
)
def test_no_rule_may_be_zero(field):
  with pytest.raises(ValueError, match=f"meet.{field}=0"):
    MailboxRules(**{field: 0})


# Messages.

ARRAYS = [
  np.arange(6, dtype=np.float32).reshape(2, 3),
  np.array([1, 255], np.uint8),
  np.array([0.5], ml_dtypes.bfloat16),
  np.array([1], ">i4"),
  np.array(3, np.int64),
  np.zeros([0, 2], np.float16),
]
LAYOUT = layout_of(ARRAYS)


def joined(weight, arrays=ARRAYS):
  return b"".join(packed(Content(b"s" * 32, weight, arrays)))


def test_arrays_come_back_as_they_were_and_the_size_is_known():
  content = joined(2.5)
  assert TAG_BYTES + len(content) == LAYOUT.sealed_bytes
  back = unpacked(content, LAYOUT)
  assert back is not None and back[:2] == (b"s" * 32, 2.5)
  for mine, theirs in zip(ARRAYS, back[2], strict=True):
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    assert mine.tobytes() == theirs.tobytes()
  assert bytes(raw_bytes(np.array([1], ">i4"))) == b"\1\0\0\0"


@pytest.mark.parametrize(
  "content",
  [
    *(joined(1.0)[:-1], joined(1.0) + b"\0", None),
    *(joined(weight) for weight in (0.0, -1.0, np.nan, np.inf)),
    joined(1.0, [np.zeros([3, 2], np.float32), *ARRAYS[1:]]),
    joined(1.0, [np.zeros([2, 3], np.int32), *ARRAYS[1:]]),
    joined(1.0, ARRAYS[:-1]),
  ],
)
def test_what_is_no_message_of_this_layout_is_refused(content):
  assert unpacked(content, LAYOUT) is None


def test_nothing_but_what_was_closed_at_its_place_opens():
  cases: Any = (
    (Seal.closed, Seal.opened, b"content"),
    (Seal.closed_json, Seal.opened_json, {"x": [1, 2.5]}),
  )
  for closed, opened, content in cases:
    data = closed(SEAL, "a", content)
    assert opened(SEAL, "a", data) == content
    assert opened(SEAL, "b", data) is None and opened(SEAL, "a", None) is None
    for other in (Seal(b"another", "run"), Seal(b"secret", "another")):
      assert opened(SEAL, "a", closed(other, "a", content)) is None
    for end in range(len(data)):
      assert opened(SEAL, "a", data[:end]) is None
      changed = bytes([*data[:end], data[end] ^ 1, *data[end + 1 :]])
      assert opened(SEAL, "a", changed) is None
    assert opened(SEAL, "a", data + b" ") is None
  assert Seal(b"s", "ab").opened("c", Seal(b"s", "a").closed("bc", b"")) is None
  assert json.loads(SEAL.closed_json("a", {"x": 1}))["is"] == {"x": 1}
  endless = SEAL.closed_json("a", {"x": "y" * JSON_BYTES})
  assert SEAL.opened_json("a", endless) is None


PAIR = [np.array([1, 2], np.float32)]


def inbox(store, event=3, seal=SEAL):
  return Inbox(store, seal, event, 0, layout_of(PAIR))


def content(value=1.0):
  return Content(bytes(32), 1.0, [np.array([value, 2], np.float32)])


def test_a_message_is_read_once_and_that_of_an_earlier_life_stays(store):
  sender = inbox(store)
  own = sender.send("oslo", content(1))
  assert sender.has("oslo") and store.requests["get"] == 0  # Its own.
  reader = inbox(store)
  assert reader.has("oslo") and reader.has("oslo")
  received = reader.listed("oslo", own.digest)
  assert received and received.message.arrays[0][0] == 1
  assert store.requests["get"] == 1
  again = inbox(store)
  later = again.send("oslo", content(5))
  assert again.held["oslo"].digest == own.digest != later.digest
  store.delete([paths.message_path(3, 0, "oslo")])
  new = inbox(store).send("oslo", content(5))
  received = reader.listed("oslo", new.digest)
  assert received and received.message.arrays[0][0] == 5
  assert reader.listed("oslo", own.digest) is None


STRANGE = ["forged", "event", "replica", "run", "cut", "oversized", "empty"]


@pytest.mark.parametrize("kind", STRANGE)
def test_what_a_stranger_writes_is_as_if_it_were_missing(store, kind):
  path = paths.message_path(3, 0, "oslo")
  rome = inbox(store).send("rome", content())
  own = inbox(store).send("oslo", content())
  elsewhere = Store("memory:///")
  written = {
    "forged": inbox(elsewhere, 5, Seal(b"guess", "run")).send(
      "oslo", content()
    ),
    "event": inbox(elsewhere, event=4).send("oslo", content()),
    "replica": rome,
    "run": inbox(elsewhere, 3, Seal(b"secret", "before")).send(
      "oslo", content()
    ),
  }
  data = {"cut": own.data[:-1], "oversized": own.data + bytes(10**6)}
  data |= {name: each.data for name, each in written.items()}
  store.put(path, data.get(kind, b""))
  down, reader = store.bytes_down, inbox(store)
  assert not reader.has("oslo")
  assert reader.listed("oslo", own.digest) is None
  assert store.bytes_down - down <= 2 * len(own.data)
  assert reader.has("rome")
  again = inbox(store).send("oslo", content())  # It replaces what is garbage.
  assert inbox(store).listed("oslo", again.digest)


# Lists.


def drawn(**sent):
  return drawn_up(
    {name: Sent("d" + name, *rest) for name, rest in sent.items()},
    before="x",
    accepted=[],
    max_norm_ratio=8.0,
    roster=Roster(("a", "b", "c"), {"c": 3}),
  )


@pytest.mark.parametrize(
  ("sent", "listed", "reason"),
  [
    ({"b": ("s", 2.0, 1.0), "a": ("s", 1.0, 1.0)}, ["b", "a"], ""),
    # The state that most have counts, and of two the earlier seat's.
    (
      {"a": ("t", 1, 1), "b": ("s", 1, 1), "c": ("s", 1, 1)},
      ["b", "c"],
      "its shared state differs",
    ),
    ({"a": ("t", 1, 1), "b": ("s", 1, 1)}, ["a"], "differs"),
    (
      {"a": ("s", 1, 1), "b": ("s", 1, 1e6), "c": ("s", 1, 2)},
      ["a", "c"],
      "8 ",
    ),
    # Norms of another state are not usual.
    (
      {
        "a": ("t", 1, 99),
        "b": ("s", 1, 1),
        "c": ("s", 1, 99),
        "d": ("s", 1, 1),
      },
      ["b", "d"],
      "over 8 times",
    ),
    ({}, [], ""),
  ],
)
def test_a_manifest_lists_those_who_agree(sent, listed, reason):
  manifest = drawn(**sent)
  assert [each.replica for each in manifest.listed] == listed
  left_out = " ".join(manifest.left_out.values())
  assert reason in left_out and bool(reason) == bool(left_out)
  back = Manifest.from_json(json.loads(json.dumps(manifest.to_json())))
  assert back == manifest and back.digest() == manifest.digest()
  if sent:
    first = next(iter(sent))
    state, weight, norm = sent[first]
    other = drawn(**sent | {first: (state, weight + 1, norm)})
    assert (other.digest() != manifest.digest()) == (first in listed)


def left_out(norms, accepted=(), ratio=8.0):
  named = {str(number): norm for number, norm in enumerate(norms)}
  return set(map(int, too_large(named, accepted, ratio)))


@pytest.mark.parametrize("factor", [10, 1e3, 1e12, np.nan, np.inf])
@pytest.mark.parametrize("accepted", [(), (1.0, 1.1, 0.9)])
def test_one_wrong_message_of_three_is_left_out(factor, accepted):
  assert left_out([1.0, 1.1, factor * 1.0], accepted) == {2}
  assert left_out([1.0, factor * 1.0], accepted) == {1}


def test_what_is_usual_follows_the_run():
  floats = [np.array([3], np.float32), np.array([[4]], ml_dtypes.bfloat16)]
  assert norm_of([*floats, np.array([100])]) == pytest.approx(5)
  assert not math.isfinite(norm_of([np.array([1, np.inf], np.float32)]))
  assert left_out([9.0], [1.0, 1.0]) == {0}  # A lone one, and those before.
  assert left_out([9.0]) == set() and left_out([np.nan]) == {0}
  assert left_out([50.0, 60.0, 55.0], [1.0] * 20) == set()  # All at once.
  assert left_out([9.0], [1.0] * 100 + [5.0] * 20) == set()
  assert left_out([0.0, 0.0], [0.0]) == set()


# Seats.


def reader(*seats):
  """Reads seats that are given as (name, since)."""
  named = [{"name": name, "since": since} for name, since in seats]
  return lambda index: named[index] if index < len(named) else None


def test_newcomers_are_waited_for_and_who_is_away_is_not():
  roster = Roster().renewed(0, reader(("b", 0), ("a", 0)))
  assert roster.expected() == ["b", "a"]
  seats = reader(("a", 0), ("b", 7))
  roster = Roster(("a",)).renewed(6, seats)
  assert roster.seats == ("a", "b") and roster.expected() == ["a"]
  assert roster.after(6, ["a"]).renewed(7, seats).expected() == ["a", "b"]
  away = Roster(("a", "b")).after(5, ["a"])
  assert away.away == away.after(6, ["a"]).away == {"b": 5}
  for event, since, is_back in [(6, 0, 0), (6, 5, 0), (6, 6, 1), (5, 6, 0)]:
    renewed = away.renewed(event, reader(("a", 0), ("b", since)))
    assert ("b" in renewed.expected()) == is_back
  assert away.after(6, ["a", "b"]).expected() == ["a", "b"]
  assert away.renewed(6, lambda index: None) == away


def seats(store, name):
  return Seats(store, SEAL, name)


def test_a_seat_is_taken_once_and_kept(store):
  store.put(paths.seat_path(0), b"garbage")  # A stranger's is free.
  assert seats(store, "a").read(0) is None
  seats(store, "a").announce(0, Roster())
  seats(store, "b").announce(2, Roster())
  seats(store, "b").announce(2, Roster())  # A second life, of no roster.
  seats(store, "a").announce(7, Roster(("a", "b")))
  found = [seats(store, "c").read(number) for number in range(3)]
  assert found == [{"name": "a", "since": 7}, {"name": "b", "since": 2}, None]
  mine = seats(store, "c")
  mine.announce(3, Roster(("a", "b")))
  before = store.requests["put"]
  mine.announce(3, Roster(("a", "b")))
  assert store.requests["put"] == before
  assert mine.read(2) == {"name": "c", "since": 3}


# A store that is away.


class AwayStore:
  """Answers from a moment on."""

  where = "s3://bucket/run"

  def __init__(self, back_at):
    self.now, self.back_at = 0.0, back_at

  def __getattr__(self, call):
    def answer(*given):
      if self.now < self.back_at:
        raise AwayError("no route to host")
      return call

    return answer

  def pause(self, seconds):
    self.now += seconds


CALLS = {
  "get": ("a", 1),
  "create": ("a", b""),
  "put": ("a", b""),
  "delete": (["a"],),
  "sizes": ("a",),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_waits_until_the_store_is_back(call, caplog):
  caplog.set_level(logging.INFO)
  store = AwayStore(170)
  waiting = Patient(store, lambda: store.now, store.pause)
  getattr(waiting, call)(*CALLS[call])
  assert 170 <= store.now < 176
  lines = [record.getMessage() for record in caplog.records]
  assert len(lines) == 4  # One a minute.
  assert lines[0] == "waiting for s3://bucket/run: no route to host"
  caplog.clear()
  getattr(waiting, call)(*CALLS[call])
  assert not caplog.records


def test_paths_sort_by_event_and_give_it_back():
  made = [
    paths.message_path(12, 1, "oslo"),
    paths.manifest_path(12, 1),
    paths.snapshot_path(12, "index"),
  ]
  assert [paths.event_of(path) for path in made] == [12, 12, 12]
  assert paths.event_of(paths.seat_path(3)) == paths.event_of(paths.RUN) == -1
  order = [paths.manifest_path(event, 0) for event in (9, 10, 101)]
  assert all(a < b for a, b in itertools.pairwise(order))
