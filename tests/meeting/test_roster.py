from typing import Any

from dilocox_jax.meeting.roster import Roster


def reader(*seats):
  """Reads seats that are given as (name, since)."""

  def read(index: int) -> dict[str, Any] | None:
    if index >= len(seats):
      return None
    name, since = seats[index]
    return {"name": name, "since": since}

  return read


def test_newcomers_are_found_in_the_order_of_seats():
  roster = Roster().renewed(0, reader(("b", 0), ("a", 0)))
  assert roster.expected() == ["b", "a"]


def test_a_newcomer_is_waited_for_from_its_event_on():
  seats = reader(("a", 0), ("b", 7))
  roster = Roster(("a",)).renewed(6, seats)
  assert roster.seats == ("a", "b") and roster.expected() == ["a"]
  assert roster.after(6, ["a"]).renewed(7, seats).expected() == ["a", "b"]


def test_who_misses_an_event_is_away_until_it_names_a_later_one():
  roster = Roster(("a", "b")).after(5, ["a"])
  assert roster.away == {"b": 5}
  assert roster.renewed(6, reader(("a", 0), ("b", 0))).expected() == ["a"]
  assert roster.renewed(6, reader(("a", 0), ("b", 5))).expected() == ["a"]
  assert roster.renewed(6, reader(("a", 0), ("b", 6))).expected() == ["a", "b"]
  assert roster.renewed(5, reader(("a", 0), ("b", 6))).expected() == ["a"]


def test_the_first_event_that_was_missed_stays():
  roster = Roster(("a", "b")).after(5, ["a"]).after(6, ["a"])
  assert roster.away == {"b": 5}


def test_who_sent_without_a_word_is_back():
  roster = Roster(("a", "b"), {"b": 3}).after(6, ["a", "b"])
  assert roster.expected() == ["a", "b"]


def test_a_seat_that_cannot_be_read_changes_nothing():
  roster = Roster(("a", "b"), {"b": 3})
  assert roster.renewed(6, lambda index: None) == roster
