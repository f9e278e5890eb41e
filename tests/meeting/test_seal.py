import json

import pytest

from dilocox_jax.meeting.seal import JSON_BYTES, Seal

SEAL = Seal(b"secret", "run")


def test_what_was_closed_opens_at_its_place():
  assert SEAL.opened("a", SEAL.closed("a", b"content")) == b"content"
  assert SEAL.opened_json("a", SEAL.closed_json("a", {"x": 1.5})) == {"x": 1.5}


@pytest.mark.parametrize(
  "other", [Seal(b"another", "run"), Seal(b"secret", "another")]
)
def test_another_secret_or_run_does_not_open_it(other):
  assert SEAL.opened("a", other.closed("a", b"content")) is None
  assert SEAL.opened_json("a", other.closed_json("a", {})) is None


def test_a_renamed_object_does_not_open():
  assert SEAL.opened("b", SEAL.closed("a", b"content")) is None
  assert SEAL.opened_json("b", SEAL.closed_json("a", {})) is None


def test_the_border_of_run_and_path_is_sealed_too():
  assert Seal(b"s", "ab").opened("c", Seal(b"s", "a").closed("bc", b"")) is None


@pytest.mark.parametrize("json_too", [False, True])
def test_no_changed_or_cut_object_opens(json_too):
  if json_too:
    data, opened = SEAL.closed_json("a", {"x": [1, 2]}), SEAL.opened_json
  else:
    data, opened = SEAL.closed("a", b"content"), SEAL.opened
  for end in range(len(data)):
    assert opened("a", data[:end]) is None
    changed = bytes([*data[:end], data[end] ^ 1, *data[end + 1 :]])
    assert opened("a", changed) is None
  assert opened("a", data + b" ") is None
  assert opened("a", None) is None


def test_anybody_can_read_the_json():
  assert json.loads(SEAL.closed_json("a", {"x": 1}))["is"] == {"x": 1}


def test_endless_json_is_not_looked_at():
  data = SEAL.closed_json("a", {"x": "y" * JSON_BYTES})
  assert SEAL.opened_json("a", data) is None
