import pytest

from dilocox_jax.meeting.store import AwayError, Store
from tests.meeting import s3_server


@pytest.fixture(params=["folder", "file", "memory", "s3"], name="store")
def store_fixture(request, tmp_path):
  places = {
    "folder": str(tmp_path / "run"),
    "file": f"file://{tmp_path}/run",
    "memory": "memory:///",
    "s3": "s3://bucket/run",
  }
  if request.param == "s3":
    with s3_server.serving() as options:
      yield Store(places["s3"], **options)
  else:
    yield Store(places[request.param])


def test_a_bucket_that_is_not_reached_is_away():
  with s3_server.serving() as options:
    pass
  store = Store("s3://bucket/run", **options)
  with pytest.raises(AwayError) as error:
    store.get("a", 10)
  assert "\n" not in str(error.value)


def test_of_two_who_create_an_object_one_wins(store):
  assert store.create("a/b", b"first")
  assert not store.create("a/b", b"second")
  assert store.get("a/b", 10) == b"first"


def test_an_object_is_replaced_and_deleted(store):
  store.put("a/b", b"first")
  store.put("a/b", b"second")
  assert store.get("a/b", 10) == b"second"
  store.delete(["a/b", "a/missing"])
  assert store.get("a/b", 10) is None


def test_what_is_too_large_is_not_downloaded(store):
  store.put("a", b"x" * 11)
  before = store.bytes_down
  assert store.get("a", 10) is None
  assert store.bytes_down == before


def test_a_folder_is_listed_with_sizes(store):
  store.put("b/2", b"xx")
  store.put("b/1", b"x")
  store.put("c/1", b"x")
  assert list(store.sizes("b").items()) == [("b/1", 1), ("b/2", 2)]
  assert store.sizes("d") == {}


def test_requests_and_bytes_are_counted(store):
  store.create("a", b"xxx")
  store.get("a", 10)
  store.get("b", 10)
  store.sizes("a")
  store.delete(["a"])
  assert store.requests == {"put": 1, "get": 2, "list": 1, "delete": 1}
  assert (store.bytes_up, store.bytes_down) == (3, 3)


def test_a_folder_that_became_a_file_is_away(tmp_path):
  store = Store(tmp_path / "run")
  store.put("a/b", b"x")
  (tmp_path / "run").rename(tmp_path / "elsewhere")
  (tmp_path / "run").touch()
  for call in (
    lambda: store.get("a/b", 10),
    lambda: store.create("a/b", b"x"),
    lambda: store.put("a/b", b"x"),
    lambda: store.delete(["a/b"]),
    lambda: store.sizes("a"),
  ):
    with pytest.raises(AwayError) as error:
      call()
    assert "\n" not in str(error.value)


def test_a_bucket_deletes_many_objects_by_one_request():
  with s3_server.serving() as options:
    store = Store("s3://bucket/run", **options)
    for number in range(3):
      store.put(f"a/{number}", b"x")
    store.delete(["a/0", "a/1", "a/2"])
    assert store.requests["delete"] == 1 and store.sizes("a") == {}


@pytest.mark.parametrize("where", ["nowhere://bucket/run", "s3://"])
def test_no_place_is_refused_in_one_line(where):
  with pytest.raises(ValueError, match="cannot open") as error:
    Store(where)
  assert "\n" not in str(error.value)
