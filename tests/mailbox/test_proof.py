"""A store is proved before a replica trusts it."""

import logging
import threading

import pytest

from dilocox_jax.mailbox_protocol.answers import (
  ClosedError,
  StoreUnavailableError,
  UnfitStoreError,
)
from dilocox_jax.mailbox_protocol.mailbox import Mailbox
from dilocox_jax.mailbox_protocol.messages import RUN, RUN_COPY
from dilocox_jax.mailbox_protocol.roster import MailboxRules
from dilocox_jax.mailbox_protocol.store import Store

RULES = MailboxRules(replicas=2, quorum=1, grace_s=0.2)


class Clock:
  """Time goes on when somebody pauses."""

  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now

  def pause(self, seconds):
    self.now += seconds
    assert self.now < 1000, "it waits for ever"


def enter(store, name="oslo"):
  clock = Clock()
  return Mailbox(
    store,
    name=name,
    secret=b"s" * 64,
    config={},
    rules=RULES,
    clock=clock,
    pause=clock.pause,
  )


class Overwrites(Store):
  """A server that does not know If-None-Match, and ignores it."""

  def create(self, path, data):
    self.put(path, data)
    return True


class OverwritesAndErrs(Store):
  """A server that overwrites, and then fails."""

  def create(self, path, data):
    exists = super().get(path, 100) is not None
    self.put(path, data)
    if exists:
      raise StoreUnavailableError("500 Internal Server Error")
    return True


class OverwritesInSilence(Store):
  """A server that says that the object exists, and overwrites it."""

  def create(self, path, data):
    is_new = super().create(path, data)
    self.put(path, data)
    return is_new


class ErrsIfItExists(Store):
  """A server that fails where it should say that the object exists."""

  def create(self, path, data):
    if super().get(path, 100) is not None:
      raise StoreUnavailableError("500 Internal Server Error")
    return super().create(path, data)


class Forgets(Store):
  """A store whose answers lag behind what was written."""

  def get(self, path, at_most):
    return None if path.startswith("probe/") else super().get(path, at_most)


UNFIT = {
  Overwrites: "overwrites an object that was to be created only if it is mis",
  OverwritesAndErrs: "overwrites an object that was to be created only",
  OverwritesInSilence: "overwrites an object that was to be created only",
  ErrsIfItExists: r"cannot say that an object exists \(500 Internal Server",
  Forgets: "does not give back an object that was just written",
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_store_that_is_unfit_is_refused_in_one_line_at_every_replica(kind):
  store = kind("memory:///")
  for name in ("oslo", "rome"):
    with pytest.raises(UnfitStoreError, match=UNFIT[kind]) as error:
      enter(store, name)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("memory:/// ")
  assert store.sizes("probe") == {}
  assert Store.get(store, RUN, 10**6) is None  # Nothing was begun.


def test_a_fit_store_is_entered_with_few_requests_and_nothing_is_left():
  store = Store("memory:///")
  enter(store)
  assert store.requests.total() <= 12
  assert store.sizes("probe") == {}


class Disturbed(Store):
  """What the other half does to it happens at its n-th call."""

  def __init__(self, where, at, disturb):
    super().__init__(where)
    self.count = 0
    self.at = at
    self.disturb = disturb

  def _call(self, call, *given):
    self.count += 1
    if self.count == self.at:
      return self.disturb(self, call, *given)
    return call(*given)

  def get(self, path, at_most):
    return self._call(super().get, path, at_most)

  def create(self, path, data):
    return self._call(super().create, path, data)

  def delete(self, paths):
    return self._call(super().delete, paths)


def fails(store, call, *given):
  raise StoreUnavailableError("it fails")


def loses_the_answer(store, call, *given):
  call(*given)
  raise StoreUnavailableError("the answer is lost")


def loses_the_object(store, call, *given):
  """Somebody deletes what is there before the call."""
  Store.delete(store, list(store.sizes("probe")))
  return call(*given)


def has_another_object(store, call, *given):
  """Somebody overwrites what is there before the call."""
  for path in store.sizes("probe"):
    store.put(path, b"other")
  return call(*given)


@pytest.mark.parametrize(
  "disturb", [fails, loses_the_answer, loses_the_object, has_another_object]
)
@pytest.mark.parametrize("at", range(1, 8))
def test_what_happens_once_is_no_reason_to_refuse(disturb, at, caplog):
  caplog.set_level(logging.CRITICAL)
  store = Disturbed("memory:///", at, disturb)
  enter(store)
  enter(store, "rome")
  assert len(store.sizes("probe")) <= 1  # A deletion may have come to nothing.


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_many_may_enter_at_once_also_under_one_name(kind, tmp_path):
  where = "memory:///" if kind == "memory" else tmp_path
  shared = Store(where)
  entered = []
  errors = []

  def one(number):
    store = shared if kind == "memory" else Store(where)
    try:
      entered.append(enter(store, f"r{number // 2}"))
    except BaseException as error:
      errors.append(error)

  threads = [threading.Thread(target=one, args=[n]) for n in range(10)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not errors and len(entered) == 10
  assert shared.sizes("probe") == {}


def test_no_two_proofs_share_an_object():
  class Noting(Store):
    """Notes the names of objects that are created."""

    created = set()

    def create(self, path, data):
      self.created.add(path)
      return super().create(path, data)

  store = Noting("memory:///")
  for _ in range(3):
    enter(store)  # As three processes of one name would.
  probes = store.created - {RUN, RUN_COPY}
  assert len(probes) == 3
  assert all(path.startswith("probe/oslo.") for path in probes)


class Closed(Store):
  """A bucket that does not exist, or no more."""

  is_closed = True

  def get(self, path, at_most):
    if self.is_closed:
      raise ClosedError("there is no such bucket (404 NoSuchBucket)")
    return super().get(path, at_most)


def test_a_missing_bucket_is_refused_when_entering_and_waited_for_later(caplog):
  store = Closed("memory:///")
  says = r"^memory:///: there is no such bucket \(404 NoSuchBucket\)$"
  with pytest.raises(UnfitStoreError, match=says):
    enter(store)
  store.is_closed = False
  box = enter(store)
  clock = Clock()
  store.is_closed = True

  def pause(seconds):
    clock.pause(seconds)
    store.is_closed = clock.now < 150

  box._store.clock = clock
  box._store.pause = pause
  assert box.announce(0)
  assert 150 <= clock.now < 160
  *waits, _ = [each for each in caplog.messages if "memory" in each]
  assert len(waits) == 3  # One line a minute.
