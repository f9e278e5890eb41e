"""Stores in folders, in memory, and behind the requests of S3."""

import re

import pytest

from dilocox_jax.meeting.store import AwayError, Patient, Store

CALLS = {
  "get": ("a/b", 10),
  "create": ("a/b", b"x"),
  "put": ("a/b", b"x"),
  "delete": (["a/b"],),
  "sizes": ("a",),
}


REAL = pytest.param("s3", marks=pytest.mark.slow)


@pytest.fixture(params=["folder", "file", "memory", REAL], name="store")
def store_fixture(request, tmp_path):
  places = {"folder": f"{tmp_path}/run", "file": f"file://{tmp_path}/run"}
  if request.param == "s3":
    return Store("s3://bucket/store", **request.getfixturevalue("bucket"))
  return Store(places.get(request.param, "memory:///"))


def test_objects_are_created_once_replaced_read_listed_and_deleted(store):
  assert store.create("a/b", b"first")
  assert not store.create("a/b", b"second")  # Of two who create it one wins.
  assert store.get("a/b", 5) == b"first"
  store.put("a/b", b"third")
  assert store.get("a/b", 10) == b"third"
  before = store.bytes_down
  assert store.get("a/b", 4) is None and store.get("a/c", 4) is None
  assert store.bytes_down == before == 10  # What is too large is not read.
  store.put("a/a", b"x")
  store.put("c/1", b"x")
  assert list(store.sizes("a").items()) == [("a/a", 1), ("a/b", 5)]
  assert store.sizes("d") == {}
  store.delete(["a/b", "a/missing"])
  assert store.get("a/b", 10) is None and store.sizes("a") == {"a/a": 1}
  made = {kind: n for kind, n in store.requests.items() if kind != "delete"}
  assert made == {"put": 5, "get": 5, "list": 3}
  assert store.bytes_up == 5 + 5 + 1 + 1
  # A bucket deletes many objects by one request.
  is_file = not store.where.startswith(("s3", "memory"))
  assert store.requests["delete"] == (2 if is_file else 1)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["bucket", "folder"])
def test_a_store_that_cannot_be_used_is_away(call, kind, tmp_path):
  if kind == "bucket":
    place = {"endpoint": "http://127.0.0.1:1", "region": "us-east-1"}
    store = Store("s3://bucket/run", skip_signature=True, **place)
  else:
    store = Store(tmp_path / "run")
    store.put("a/b", b"x")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    (tmp_path / "run").touch()
  with pytest.raises(AwayError) as error:
    getattr(store, call)(*CALLS[call])
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("where", ["nowhere://bucket/run", "s3://"])
def test_no_place_is_refused_in_one_line(where):
  with pytest.raises(ValueError, match="cannot open") as error:
    Store(where)
  assert "\n" not in str(error.value)


def test_a_store_that_is_away_is_waited_for_with_one_line_a_minute(caplog):
  now = [0.0]

  class Away:
    where = "the place"

    def get(self, path, at_most):
      if now[0] < 200:
        raise AwayError("no route")
      return b"x"

  def pause(seconds):
    now[0] += seconds

  assert Patient(Away(), lambda: now[0], pause).get("a", 1) == b"x"
  *waits, back = caplog.messages
  assert waits == ["waiting for the place: no route"] * 4
  assert re.fullmatch("the place is back after 20[0-9] s", back)
