import pytest

from dilocox_jax.meeting.paths import seat_path
from dilocox_jax.meeting.roster import Roster
from dilocox_jax.meeting.seal import Seal
from dilocox_jax.meeting.seats import Seats
from dilocox_jax.meeting.store import Store


@pytest.fixture(name="store")
def store_fixture():
  return Store("memory:///")


def seats(store, name):
  return Seats(store, Seal(b"secret", "run"), name)


def test_newcomers_take_seats_one_after_the_other(store):
  seats(store, "a").announce(0, Roster())
  seats(store, "b").announce(2, Roster())
  reader = seats(store, "c")
  assert reader.read(0) == {"name": "a", "since": 0}
  assert reader.read(1) == {"name": "b", "since": 2}
  assert reader.read(2) is None


def test_who_comes_back_keeps_its_seat(store):
  seats(store, "a").announce(0, Roster())
  seats(store, "b").announce(0, Roster())
  seats(store, "a").announce(7, Roster(("a", "b")))
  assert seats(store, "c").read(0) == {"name": "a", "since": 7}


def test_a_second_life_that_knows_no_roster_finds_its_seat(store):
  seats(store, "a").announce(0, Roster())
  seats(store, "b").announce(0, Roster())
  seats(store, "b").announce(0, Roster())
  assert seats(store, "c").read(2) is None


def test_the_same_event_is_announced_once(store):
  mine = seats(store, "a")
  mine.announce(3, Roster())
  before = store.requests["put"]
  mine.announce(3, Roster())
  assert store.requests["put"] == before


def test_a_seat_that_a_stranger_wrote_is_free(store):
  store.put(seat_path(0), b"garbage")
  assert seats(store, "a").read(0) is None
  seats(store, "a").announce(0, Roster())
  assert seats(store, "a").read(0) == {"name": "a", "since": 0}


def test_a_newcomer_sits_behind_all_who_are_known(store):
  seats(store, "c").announce(5, Roster(("a", "b")))
  assert seats(store, "c").read(2) == {"name": "c", "since": 5}
