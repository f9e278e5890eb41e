"""A folder that others may write to: no link is followed, nothing blocks."""

import contextlib
import itertools
import logging
import os
import threading
import time

import pytest

from dilocox_jax.mailbox_protocol import folder as folder_module
from dilocox_jax.mailbox_protocol.answers import (
  ClosedError,
  StoreUnavailableError,
)
from dilocox_jax.mailbox_protocol.folder import Folder
from tests.mailbox.foreign import (
  FOREIGN,
  NO_FOLDER,
  fifo,
  full_folder,
  link_to_folder,
  planted,
)

PATH = "event/0000000001/0/oslo"


@pytest.fixture(name="place")
def place_fixture(tmp_path):
  return tmp_path / "place"


@pytest.fixture(name="store")
def store_fixture(place):
  return Folder(str(place))


@pytest.mark.parametrize("kind", FOREIGN)
class TestForeignThings:
  """They count as absent, and what is written takes their place."""

  def test_in_place_of_an_object(self, store, place, victim, kind):
    planted(place, victim, kind, PATH)
    assert store.get(PATH, 10**6) is None
    assert store.get_range(PATH, 0, 1) is None
    if kind is not full_folder:
      assert store.sizes("event") == {}
    store.delete([PATH])
    assert os.path.lexists(place / PATH)  # Only what is ours is deleted.
    assert store.create(PATH, b"created")
    assert not store.create(PATH, b"again")
    assert store.get(PATH, 10) == b"created"

  @pytest.mark.parametrize("write", ["create", "put"])
  def test_it_is_kept_when_an_object_takes_its_place(
    self, store, place, victim, kind, write, caplog
  ):
    planted(place, victim, kind, PATH)
    before = os.lstat(place / PATH)
    getattr(store, write)(PATH, b"new")
    assert store.get(PATH, 10) == b"new"
    assert store.sizes("event") == {PATH: 3}
    (aside,) = (place / PATH).parent.glob(".aside.oslo.*")
    assert os.path.samestat(os.lstat(aside), before)
    (line,) = caplog.messages
    assert line.startswith(f"{place}/{PATH} was a ")


@pytest.mark.parametrize("kind", NO_FOLDER)
@pytest.mark.parametrize("write", ["create", "put"])
@pytest.mark.parametrize(
  "path", ["event", "event/0000000001", "event/0000000001/0", ".staged"]
)
def test_foreign_things_in_place_of_a_folder(
  store, place, victim, kind, path, write, caplog
):
  planted(place, victim, kind, path)
  assert store.get(PATH, 10) is None
  assert store.get_range(PATH, 0, 1) is None
  assert store.sizes("event") == {}
  store.delete([PATH])
  assert os.path.lexists(place / path)
  getattr(store, write)(PATH, b"x")
  assert store.get(PATH, 10) == b"x"
  assert store.sizes("event") == {PATH: 1}
  (line,) = caplog.messages
  assert line.startswith(f"{place}/{path} was a ")
  store.delete([PATH])
  assert store.sizes("event") == {}


def test_a_strangers_file_in_place_of_a_folder_is_kept(store, place):
  planted(place, None, lambda path, _: path.write_text("notes"), "event")
  assert store.get(PATH, 10) is None
  store.put(PATH, b"x")
  assert store.get(PATH, 10) == b"x"
  (aside,) = place.glob(".aside.event.*")
  assert aside.read_text() == "notes"


def test_the_folder_itself_may_be_a_link_or_behind_one(tmp_path):
  (tmp_path / "disk" / "runs").mkdir(parents=True)
  (tmp_path / "home").symlink_to("disk")
  (tmp_path / "disk" / "run").symlink_to("runs")
  store = Folder(str(tmp_path / "home" / "run"))
  assert store.create(PATH, b"x")
  assert (tmp_path / "disk" / "runs" / PATH).read_bytes() == b"x"


def test_the_folder_stays_where_it_was_when_it_was_opened(
  tmp_path, monkeypatch
):
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.chdir(tmp_path)
  stores = [Folder("place"), Folder("~/place")]
  (tmp_path / "elsewhere").mkdir()
  monkeypatch.chdir(tmp_path / "elsewhere")
  assert stores[0].create("a", b"x") and not stores[1].create("a", b"x")
  assert (tmp_path / "place" / "a").exists()


def test_a_list_passes_over_links_dots_and_what_is_deep(store, place, victim):
  store.put(PATH, b"x")
  (place / "event" / "to_root").symlink_to("/")
  (place / "event" / "to_itself").symlink_to(".")
  (place / "event" / ".hidden").write_text("x")
  os.mkdir(os.fsencode(place) + b"/event/\xff\n")
  below = place / "event"
  for _ in range(200):
    below /= "deep"
    below.mkdir()
  (below / "0000000000").write_text("x")
  assert store.sizes("event") == {PATH: 1}


def test_a_name_never_leads_out_of_the_folder(store, tmp_path):
  (tmp_path / "thesis").write_text("precious")
  for path in ("../thesis", "a/../../thesis", "/etc/passwd", "a//b", "", "a/."):
    for call in (
      lambda path: store.get(path, 100),
      lambda path: store.get_range(path, 0, 1),
      lambda path: store.put(path, b"x"),
      lambda path: store.create(path, b"x"),
      lambda path: store.delete([path]),
      store.sizes,
    ):
      with pytest.raises(StoreUnavailableError, match="is no path"):
        call(path)
  assert (tmp_path / "thesis").read_text() == "precious"


# Races.


@contextlib.contextmanager
def beside(work):
  """Repeats something in a thread while the block lasts."""
  is_over = threading.Event()

  def repeat():
    while not is_over.is_set():
      with contextlib.suppress(OSError):
        work()

  thread = threading.Thread(target=repeat)
  thread.start()
  try:
    yield
  finally:
    is_over.set()
    thread.join()


@pytest.mark.parametrize("path", ["event", "event/0000000001", PATH])
def test_a_link_that_comes_in_between_is_not_followed(
  store, place, victim, path
):
  ours = place / path
  numbers = itertools.count()

  def swap():
    """Puts a link to what is precious where the store has just been."""
    ours.rename(place / f".was_ours_{next(numbers)}")
    ours.symlink_to(victim / ours.relative_to(place / "event"))

  store.put(PATH, b"x")
  with beside(swap):
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
      with contextlib.suppress(StoreUnavailableError):
        store.put(PATH, b"ours")
        store.create(PATH, b"ours")
        store.sizes("event")
        assert store.get(PATH, 100) != b"precious"
        assert store.get_range(PATH, 0, 4) != b"prec"
        store.delete([PATH])


@pytest.mark.parametrize("kind", [link_to_folder, fifo, full_folder])
def test_of_many_who_create_where_something_foreign_is_one_wins(
  place, victim, kind, caplog
):
  caplog.set_level(logging.ERROR)
  stores = [Folder(str(place)) for _ in range(6)]
  for number in range(20):
    path = f"manifest/{number}"
    planted(place, victim, kind, path)
    won = []
    start = threading.Barrier(len(stores))

    def create(index, path=path, won=won, start=start):
      start.wait()
      if stores[index].create(path, b"%d" % index):
        won.append(index)

    threads = [
      threading.Thread(target=create, args=[index])
      for index in range(len(stores))
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    assert len(won) == 1
    assert stores[0].get(path, 1) == b"%d" % won[0]


def test_what_another_one_has_just_created_is_not_taken_for_foreign(
  store, place, victim, monkeypatch
):
  planted(place, victim, fifo, PATH)
  rename = os.rename
  others = []
  began = []

  def create():
    others.append(Folder(str(place)).create(PATH, b"other"))

  def slow(*given, **named):
    """Gives another replica time between the look and the renaming."""
    if not began:
      began.append(threading.Thread(target=create))
      began[0].start()
      began[0].join(0.3)
    return rename(*given, **named)

  monkeypatch.setattr(os, "rename", slow)
  is_ours = store.create(PATH, b"ours")
  began[0].join()
  assert [is_ours, *others] == [True, False]
  assert store.get(PATH, 10) == b"ours"


def test_a_folder_that_is_removed_as_empty_meanwhile_is_made_again(place):
  store = Folder(str(place))
  other = Folder(str(place))

  def come_and_go():
    other.put("event/1/x", b"x")
    other.delete(["event/1/x"])

  with beside(come_and_go):
    for number in range(100):
      assert store.create(f"event/1/{number}", b"y")
      assert store.get(f"event/1/{number}", 1) == b"y"
      store.delete([f"event/1/{number}"])


def test_who_holds_the_lock_for_ever_stops_nobody_in_silence(
  store, place, victim, monkeypatch
):
  monkeypatch.setattr(folder_module, "_LOCK_PAUSE_S", 0.001)
  planted(place, victim, fifo, PATH)
  holder = os.open(place, os.O_RDONLY)
  folder_module.fcntl.flock(holder, folder_module.fcntl.LOCK_EX)
  store.put("seat/0000", b"x")  # Nothing foreign is there.
  with pytest.raises(
    StoreUnavailableError, match="another process holds a lock"
  ):
    store.create(PATH, b"x")
  os.close(holder)
  assert store.create(PATH, b"x")


# What writers leave, and what systems answer.


def test_empty_folders_go_and_staged_files_of_killed_writers_too(store, place):
  store.put(PATH, b"x")
  store.put("seat/0000", b"x")
  staged = place / ".staged"
  for name, age_s in (("dead", 7200), ("at_work", 60)):
    (staged / name).write_bytes(b"half")
    then = time.time() - age_s
    os.utime(staged / name, (then, then))
  (staged / "folder").mkdir()
  os.utime(staged / "folder", (0, 0))
  assert store.sizes("event") == {PATH: 1}
  assert {each.name for each in staged.iterdir()} == {"at_work", "folder"}
  store.delete([PATH])
  assert {each.name for each in place.iterdir()} == {"seat", ".staged"}


def test_what_cannot_be_written_leaves_nothing(store, place, monkeypatch):
  def full(descriptor):
    raise OSError(28, "No space left on device")

  store.put("a", b"old")
  monkeypatch.setattr(os, "fsync", full)
  for write in (store.put, store.create):
    with pytest.raises(
      StoreUnavailableError, match="^a: No space left on device$"
    ):
      write("a", b"new")
  assert store.get("a", 10) == b"old"
  assert not list((place / ".staged").iterdir())


@pytest.mark.parametrize(
  ("call", "given", "named"),
  [
    ("get", (PATH, 9), PATH),
    ("get_range", (PATH, 0, 1), PATH),
    ("put", (PATH, b"x"), ".staged"),
    ("create", (PATH, b"x"), ".staged"),
    ("sizes", ("event",), "event"),
  ],
)
def test_what_the_system_forbids_is_named_with_what_to_do(
  store, place, monkeypatch, call, given, named
):
  def forbidden(name, flags, *mode, dir_fd=None):
    # Root may read everything, so it is not enough to take permissions away.
    is_file = name == "oslo" or (mode and flags & os.O_CREAT)
    if is_file or (call == "sizes" and name == "0"):
      raise PermissionError(13, "Permission denied")
    return opened(name, flags, *mode, dir_fd=dir_fd)

  store.put(PATH, b"x")
  opened = os.open
  monkeypatch.setattr(os, "open", forbidden)
  says = f"^{named}: Permission denied: let all replicas read and write it, or"
  with pytest.raises(StoreUnavailableError, match=says):
    getattr(store, call)(*given)


@pytest.mark.parametrize("write", ["create", "put"])
def test_an_object_is_on_the_disk_before_it_has_its_name(
  store, monkeypatch, write
):
  store.put("event/x", b"x")
  done = []
  for name in ("fsync", "link", "replace"):
    call = getattr(os, name)

    def noted(*given, name=name, call=call, **named):
      done.append(name)
      return call(*given, **named)

    monkeypatch.setattr(os, name, noted)
  getattr(store, write)("event/y", b"y")
  named = {"create": "link", "put": "replace"}[write]
  assert done == ["fsync", named, "fsync"]


def test_a_creation_whose_answer_was_lost_is_known(store, monkeypatch):
  link = os.link

  def lost(*given, **named):
    link(*given, **named)
    raise FileExistsError(17, "File exists")

  monkeypatch.setattr(os, "link", lost)
  assert store.create("a/b", b"x")
  monkeypatch.setattr(os, "link", link)
  assert not store.create("a/b", b"y")


def test_a_file_system_without_links_is_closed(store, place, monkeypatch):
  def none(*given, **named):
    raise PermissionError(1, "Operation not permitted")

  monkeypatch.setattr(os, "link", none)
  with pytest.raises(ClosedError, match="it has no hard links") as error:
    store.create("a/b", b"x")
  assert "\n" not in str(error.value)
  assert not list((place / ".staged").iterdir())


def test_what_cannot_be_renamed_is_said(store, place, victim, monkeypatch):
  def refused(*given, **named):
    raise OSError(16, "Device or resource busy")

  planted(place, victim, full_folder, PATH)
  monkeypatch.setattr(os, "rename", refused)
  says = f"^{PATH} is a folder and has to be a file .*busy.*: remove it$"
  for write in (store.put, store.create):
    with pytest.raises(StoreUnavailableError, match=says):
      write(PATH, b"x")
