import json

from dilocox_jax.meeting.manifest import Manifest, Sent, drawn_up
from dilocox_jax.meeting.roster import Roster

ROSTER = Roster(("a", "b", "c"), {"c": 3})


def drawn(**sent):
  return drawn_up(
    {name: Sent("d" + name, *rest) for name, rest in sent.items()},
    before="x",
    accepted=[],
    max_norm_ratio=8.0,
    roster=ROSTER,
  )


def names(manifest):
  return [each.replica for each in manifest.listed]


def test_messages_are_listed_in_the_order_of_seats():
  manifest = drawn(b=("s", 2.0, 1.0), a=("s", 1.0, 1.0))
  assert names(manifest) == ["b", "a"]
  assert manifest.listed[0] == ("b", "db", 2.0, 1.0)
  assert (manifest.state, manifest.before) == ("s", "x")


def test_the_state_that_most_have_counts_and_of_two_the_earlier_seat():
  manifest = drawn(a=("t", 1, 1), b=("s", 1, 1), c=("s", 1, 1))
  assert names(manifest) == ["b", "c"]
  assert manifest.left_out == {"a": "its shared state differs"}
  assert names(drawn(a=("t", 1, 1), b=("s", 1, 1))) == ["a"]


def test_a_message_that_is_too_large_is_left_out_with_the_reason():
  manifest = drawn(a=("s", 1, 1), b=("s", 1, 1e6), c=("s", 1, 2))
  assert names(manifest) == ["a", "c"]
  assert "over 8 times" in manifest.left_out["b"]


def test_norms_of_another_state_are_not_usual():
  manifest = drawn(a=("t", 1, 99), b=("s", 1, 1), c=("s", 1, 99), d=("s", 1, 1))
  assert names(manifest) == ["b", "d"]


def test_nobody_sent():
  assert names(drawn()) == []


def test_a_manifest_comes_back_from_json_and_its_digest_covers_it():
  manifest = drawn(a=("s", 1.0, 0.1), b=("s", 2.0, 1e9))
  back = Manifest.from_json(json.loads(json.dumps(manifest.to_json())))
  assert back == manifest and back.digest() == manifest.digest()
  assert drawn(a=("s", 1.5, 0.1), b=("s", 2.0, 1e9)).digest() != back.digest()
