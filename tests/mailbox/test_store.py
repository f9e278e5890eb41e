"""What every store promises: folders, memory, and the requests of S3."""

import functools
import re
import threading

import pytest

from dilocox_jax.mailbox_protocol.answers import (
  ClosedError,
  StoreUnavailableError,
  UnfitStoreError,
)
from dilocox_jax.mailbox_protocol.store import (
  RetryingStore,
  Store,
  at_once,
  get_all,
)

CALLS = {
  "get": ("a/b", 10),
  "get_range": ("a/b", 0, 1),
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
    place = f"s3://bucket/{tmp_path.name}"
    return Store(place, **request.getfixturevalue("bucket"))
  return Store(places.get(request.param, "memory:///"))


class TestEveryStore:
  """The contract; a store of one's own has to keep it, too."""

  def test_of_two_who_create_an_object_one_wins(self, store):
    assert store.create("a/b", b"first")
    assert not store.create("a/b", b"second")
    assert store.get("a/b", 5) == b"first"

  def test_of_many_who_create_an_object_at_once_one_wins(self, store):
    won = []
    start = threading.Barrier(8)

    def create(number):
      start.wait()
      if store.create("a/b", b"%d" % number):
        won.append(number)

    threads = [threading.Thread(target=create, args=[n]) for n in range(8)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    assert len(won) == 1
    assert store.get("a/b", 1) == b"%d" % won[0]

  def test_what_is_put_replaces_the_whole_object(self, store):
    store.put("a/b", b"longer than the next one")
    store.put("a/b", b"short")
    assert store.get("a/b", 100) == b"short"

  def test_what_is_missing_or_too_large_is_not_read(self, store):
    store.put("a/b", b"12345")
    assert store.get("a/b", 4) is None
    assert store.get("a/c", 4) is None
    assert store.get("c/b", 4) is None
    assert store.bytes_down == 0
    assert store.get("a/b", 5) == b"12345"
    assert store.bytes_down == 5

  def test_a_range_is_read_without_the_rest(self, store):
    store.put("a/b", b"0123456789")
    assert store.get_range("a/b", 0, 10) == b"0123456789"
    assert store.get_range("a/b", 3, 6) == b"345"
    assert store.get_range("a/b", 8, 11) is None
    assert store.get_range("a/b", 10, 11) is None
    assert store.get_range("a/b", 20, 21) is None
    assert store.get_range("a/c", 0, 1) is None
    assert store.get_range("c/b", 0, 1) is None
    assert store.bytes_down == 10 + 3
    assert dict(store.requests) == {"put": 1, "get": 7}

  def test_an_object_may_be_written_in_parts(self, store):
    part = memoryview(bytes(range(256)) * 2**13)  # 2 MiB.
    parts = [b"head", part, b"", part]
    whole = b"".join(parts)
    assert store.create("a/b", parts)
    assert not store.create("a/b", parts)
    assert store.get("a/b", len(whole)) == whole
    store.put("a/b", [*parts, *parts])
    assert store.get("a/b", 2 * len(whole)) == 2 * whole
    assert store.bytes_up == 3 * len(whole)

  def test_threads_may_use_it_at_once_and_each_request_counts(self, store):
    store.put("a/b", b"12345")
    found = at_once([lambda: store.get("a/b", 5)] * 50)
    assert [bytes(data) for data in found] == [b"12345"] * 50
    assert store.requests["get"] == 50 and store.bytes_down == 250

  def test_an_object_may_be_empty_or_large(self, store):
    large = bytes(range(256)) * 2**15  # 8 MiB: more than a part of an upload.
    assert store.create("a/empty", b"") and store.get("a/empty", 0) == b""
    assert store.create("a/large", large)
    assert not store.create("a/large", large[::-1])
    assert store.get("a/large", len(large)) == large
    store.put("a/large", large[::-1])
    assert store.get("a/large", len(large)) == large[::-1]

  def test_objects_below_a_folder_are_listed_in_order(self, store):
    for path in ("a/c/1", "a/b", "ab/1", "c", "a/c/0/x"):
      store.put(path, path.encode())
    expected = [("a/b", 3), ("a/c/0/x", 7), ("a/c/1", 5)]
    assert list(store.sizes("a").items()) == expected
    assert list(store.sizes("a/c")) == ["a/c/0/x", "a/c/1"]
    assert store.sizes("d") == store.sizes("c") == {}

  def test_what_is_deleted_is_gone_and_can_be_created_again(self, store):
    store.put("a/b", b"1")
    store.put("a/c/d", b"2")
    store.delete(["a/c/missing", "a/b", "e/f", "a/c/d"])
    assert store.get("a/b", 1) is None
    assert store.sizes("a") == {}
    assert store.create("a/c/d", b"3")
    store.delete([])
    assert store.sizes("a") == {"a/c/d": 1}

  def test_requests_and_bytes_are_counted(self, store):
    store.create("a/b", b"12345")
    store.create("a/b", b"12345")
    store.put("a/c", b"1")
    store.get("a/b", 5)
    store.get("a/d", 5)
    store.sizes("a")
    store.delete(["a/b", "a/missing"])
    # A bucket deletes many objects by one request.
    is_file = not store.where.startswith(("s3", "memory"))
    deleted = 2 if is_file else 1
    expected = {"put": 3, "get": 2, "list": 1, "delete": deleted}
    assert dict(store.requests) == expected
    assert store.bytes_up == 6 and store.bytes_down == 5


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["bucket", "folder", "folder that is gone"])
def test_a_store_that_cannot_be_used_is_away(call, kind, tmp_path):
  if kind == "bucket":
    place = {"endpoint": "http://127.0.0.1:1", "region": "us-east-1"}
    store = Store("s3://bucket/run", skip_signature=True, **place)
  else:
    store = Store(tmp_path / "run")
    store.put("a/b", b"x")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    if kind == "folder":
      (tmp_path / "run").touch()
  with pytest.raises(StoreUnavailableError) as error:
    getattr(store, call)(*CALLS[call])
  assert "\n" not in str(error.value)
  if kind == "folder that is gone":
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    assert store.get("a/b", 1) == b"x"  # It may come back.


@pytest.mark.parametrize("where", ["nowhere://bucket/run", "s3://"])
def test_no_place_is_refused_in_one_line(where):
  with pytest.raises(ValueError, match="cannot open") as error:
    Store(where)
  assert "\n" not in str(error.value)


def test_a_file_is_no_place(tmp_path):
  (tmp_path / "file").touch()
  for where in (tmp_path / "file", tmp_path / "file" / "run"):
    with pytest.raises(ValueError, match=f"cannot open {where}: ") as error:
      Store(where)
    assert "\n" not in str(error.value)


class Away:
  """A store that refuses for a while."""

  where = "the place"

  def __init__(self, error, until_s=200.0):
    self.now = 0.0
    self._error = error
    self._until_s = until_s

  def at_once(self, calls):
    return at_once(calls)

  def get(self, path, at_most):
    if self.now < self._until_s:
      raise self._error
    return b"x"

  def pause(self, seconds):
    self.now += seconds


@pytest.mark.parametrize("kind", [StoreUnavailableError, ClosedError])
def test_a_store_that_is_away_is_waited_for_with_one_line_a_minute(
  kind, caplog
):
  store = Away(kind("no route"))
  patient = RetryingStore(store, lambda: store.now, store.pause)
  assert patient.get("a", 1) == b"x"
  *waits, back = caplog.messages
  assert waits == ["waiting for the place: no route"] * 4
  assert re.fullmatch("the place is back after 20[0-9] s", back)


def test_many_calls_that_wait_at_once_say_so_in_one_line_a_minute(caplog):
  store = Away(StoreUnavailableError("no route"), until_s=100.0)
  lock = threading.Lock()

  def pause(seconds):
    with lock:
      store.now += seconds / 20

  patient = RetryingStore(store, lambda: store.now, pause)
  found = get_all(patient, {str(number): 1 for number in range(20)})
  assert found == [b"x"] * 20
  *waits, back = caplog.messages
  assert waits == ["waiting for the place: no route"] * 2
  assert back.startswith("the place is back after 10")
  assert patient.get("a", 1) == b"x"


def test_a_failure_from_before_the_store_was_back_is_no_news(caplog):
  store = Away(StoreUnavailableError("no route"), until_s=10.0)
  patient = RetryingStore(store, lambda: store.now, store.pause)
  answers = iter([StoreUnavailableError("no route"), b"y"])

  def late():
    answer = next(answers)
    if isinstance(answer, Exception):
      # Another call waits until the store is back, before this one ends.
      assert patient.get("a", 1) == b"x"
      raise answer
    return answer

  assert patient.retry(late) == b"y"
  *waits, back = caplog.messages
  assert waits == ["waiting for the place: no route"]
  assert back.startswith("the place is back after 1")


def test_calls_at_once_are_made_at_once_and_answered_in_order():
  start = threading.Barrier(9)

  def call(number):
    start.wait(timeout=60)
    return number

  calls = [functools.partial(call, number) for number in range(9)]
  assert at_once(calls) == list(range(9))
  assert at_once([]) == []

  def fail():
    raise ValueError("it fails")

  with pytest.raises(ValueError, match="it fails"):
    at_once([lambda: 1, fail])


def test_who_enters_is_told_that_a_place_is_closed():
  store = Away(ClosedError("no such bucket"))
  entering = RetryingStore(
    store, lambda: store.now, store.pause, is_entering=True
  )
  with pytest.raises(UnfitStoreError, match="^the place: no such bucket$"):
    entering.get("a", 1)
  store = Away(StoreUnavailableError("no route"))
  entering = RetryingStore(
    store, lambda: store.now, store.pause, is_entering=True
  )
  assert entering.get("a", 1) == b"x"  # A link that is down is waited for.
