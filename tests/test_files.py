"""Files and folders below the one that a user names; no link is followed."""

import contextlib
import os
import pathlib
import threading
import time

import pytest

from dilocox_jax import files
from tests import runs


@pytest.fixture(name="victim")
def victim_fixture(tmp_path):
  victim = tmp_path / "victim"
  (victim / "sub" / "deep").mkdir(parents=True)
  for path in ("file", "sub/file", "sub/deep/file"):
    (victim / path).write_text("precious")
  before = runs.files(victim)
  yield victim
  assert runs.files(victim) == before


@pytest.fixture(name="root")
def root_fixture(tmp_path):
  """The folder that the user names; it is a link to another one."""
  (tmp_path / "disk" / "run").mkdir(parents=True)
  (tmp_path / "run").symlink_to("disk/run")
  return tmp_path / "run"


def write(path, root):
  with files.replaced(path, root=root) as file:
    file.write(b"ours")


def append(path, root):
  with files.opened_to_append(path, root=root) as file:
    file.write(b"ours")


@pytest.mark.parametrize("call", [write, append])
def test_what_is_below_the_root_is_written_there(root, call):
  files.folder_below(root, "sub", "deep")
  call(root / "sub" / "deep" / "file", root)
  call(root / "file", root)
  call(root / "other", None)
  found = runs.files(root)
  assert found == dict.fromkeys(["sub/deep/file", "file", "other"], b"ours")


@pytest.mark.parametrize("call", [write, append])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_link_below_the_root_is_refused(root, victim, call, depth):
  link = root / "sub" if depth == 0 else root / "sub" / "deep"
  link.parent.mkdir(exist_ok=True)
  link.symlink_to(victim / link.relative_to(root))
  with pytest.raises(NotADirectoryError) as error:
    call(root / "sub" / "deep" / "file", root)
  name = link.name
  says = f"{name} is a symbolic link and has to be a folder: remove it"
  assert error.value.strerror == says


@pytest.mark.parametrize(
  "call", [files.folder_below, files.check_folder, files.remove_folder]
)
def test_folders_behind_a_link_are_neither_made_nor_removed(root, victim, call):
  (root / "sub").symlink_to(victim / "sub")
  (root / "file").write_text("a stranger's")
  for names in (["sub"], ["sub", "deep"], ["sub", "new"], ["file", "x"]):
    with pytest.raises(NotADirectoryError) as error:
      call(root, *names)
    assert str(error.value.strerror).startswith(f"{names[0]} is a ")


def test_folders_are_made_checked_and_removed_with_all_that_is_in_them(
  root, victim
):
  files.check_folder(root, "a", "b")
  files.remove_folder(root, "a", "b")
  assert not (root / "a").exists()
  assert files.folder_below(root, "a", "b") == root / "a" / "b"
  assert files.folder_below(root, "a", "b").is_dir()
  (root / "a" / "b" / "link").symlink_to(victim)
  (root / "a" / "b" / "file").write_text("ours")
  (root / "a" / "other").write_text("ours")
  files.remove_folder(root, "a", "b")
  assert runs.files(root) == {"a/other": b"ours"}


def test_a_pipe_is_not_waited_for(root):
  os.mkfifo(root / "pipe")
  with pytest.raises(OSError) as error:
    append(root / "pipe", None)
  assert error.value.strerror == "it is a FIFO"
  reader = os.open(root / "pipe", os.O_RDONLY | os.O_NONBLOCK)
  with pytest.raises(OSError) as error:  # Nor written to, if somebody reads.
    append(root / "pipe", None)
  assert error.value.strerror == "it is a FIFO"
  os.close(reader)
  write(root / "pipe", None)
  assert (root / "pipe").read_bytes() == b"ours"


def test_a_link_that_comes_while_a_file_is_written_is_not_followed(
  root, victim
):
  files.folder_below(root, "sub")
  with files.replaced(root / "sub" / "file", root=root) as file:
    file.write(b"ours")
    (root / "sub").rename(root / "moved")
    (root / "sub").symlink_to(victim / "sub")
  assert runs.files(root / "moved") == {"file": b"ours"}


def test_a_link_that_comes_while_a_folder_is_removed_is_not_followed(
  root, victim
):
  is_over = threading.Event()
  place = pathlib.Path(os.path.realpath(root))

  def swap():
    number = 0
    while not is_over.is_set():
      with contextlib.suppress(OSError):
        number += 1
        (place / "sub").rename(place / f"was_{number}")
        (place / "sub").symlink_to(victim / "sub")
        (place / "sub").unlink()

  thread = threading.Thread(target=swap)
  thread.start()
  try:
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
      with contextlib.suppress(OSError):
        files.folder_below(root, "sub", "deep")
        files.remove_folder(root, "sub", "deep")
  finally:
    is_over.set()
    thread.join()


def test_what_is_no_file_is_not_read(root, victim):
  (root / "file").write_text("content")
  (root / "link").symlink_to("file")
  (root / "zero").symlink_to("/dev/zero")
  os.mkfifo(root / "pipe")
  (root / "folder").mkdir()
  folder = files.opened_root(root)
  assert files.read_file(folder, "file", 7) == b"content"
  assert files.read_file(folder, "file", 6) is None
  for name in ("link", "zero", "pipe", "folder", "missing"):
    assert files.read_file(folder, name, 100) is None
  os.close(folder)


def test_what_becomes_a_link_after_the_look_is_not_read(
  root, victim, monkeypatch
):
  (root / "link").symlink_to(victim / "file")
  os.mkfifo(root / "pipe")
  folder = files.opened_root(root)
  monkeypatch.setattr(files, "kind_of", lambda folder, name: files.FILE)
  assert files.read_file(folder, "link", 100) is None
  assert files.read_file(folder, "pipe", 100) is None
  assert files.read_file(folder, "missing", 100) is None
  os.close(folder)
