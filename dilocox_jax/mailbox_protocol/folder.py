"""Objects in a folder, as files; no symbolic link below the folder is followed.

An object is written to a file in `.staged`, flushed to the disk, and then given
its name: `create` links the name, which fails if the name is taken, and `put`
renames the file, which replaces what has the name. So nobody sees half of an
object, and a power cut takes none away.

Whatever is no file counts as absent: a link, a FIFO, a socket, a device, or a
folder. It is neither read nor waited for. If it stands where an object has to
be, it is renamed, and a line says so: nothing of anybody is deleted. Names that
begin with a dot are no objects.

Nobody follows a link, by race neither, because each folder is opened by its
name in the folder before (`dilocox_jax.files`). The folder that the user names
is opened anew for every call: its file system may have gone and come back.
"""

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dilocox_jax import files
from dilocox_jax.mailbox_protocol.answers import (
  ClosedError,
  StoreUnavailableError,
)

_LOG = logging.getLogger(__name__)
_STAGING, _ASIDE = ".staged", ".aside"
_OLD_S = 3600.0  # A writer that is at work has written since.
_DEEPEST = 8  # Folders of a path. What is deeper is not of a run.
_TRIES = 10  # How often something may come in between before it is waited for.
_LOCK_TRIES, _LOCK_PAUSE_S = 20, 0.05
# What `link` says on a file system that has no links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class _Staged(NamedTuple):
  """A file that has no name of an object yet: its open folder, and its name."""

  folder: int
  name: str


class Folder:
  """The objects of a folder.

  Attributes:
    deleted_at_once: Objects that one call of `delete` may have.
  """

  deleted_at_once = 1

  def __init__(self, path: str):
    """Opens a folder, which is made if missing.

    Args:
      path: The folder. It may be a link, or lie behind one.

    Raises:
      OSError: If the system refuses.
    """
    self._path = os.path.realpath(pathlib.Path(path).expanduser())
    os.makedirs(self._path, exist_ok=True)

  def get(self, path: str, at_most: int) -> bytes | None:
    """Returns an object; None if it is absent or larger than `at_most`."""
    *folders, name = _parts(path)
    with self._call(path) as root:
      try:
        with files.opened_folders(root, folders) as opened:
          return files.read_file(opened[-1], name, at_most)
      except (FileNotFoundError, NotADirectoryError):
        return None

  def create(self, path: str, data: bytes) -> bool:
    """Writes an object that must not exist; returns whether it was written."""
    *folders, _ = _parts(path)
    with self._call(path) as root, self._staged(root, data) as staged:
      for _ in range(_TRIES):
        # Another replica may remove a folder that is empty still.
        with contextlib.suppress(FileNotFoundError):
          with self._made(root, folders) as folder:
            is_new = self._linked(root, staged, folder, path)
            files.flush_folder(folder)
            return is_new
    raise StoreUnavailableError(
      f"{path}: its folder is removed again and again"
    )

  def put(self, path: str, data: bytes) -> None:
    """Writes an object, or replaces it as a whole."""
    *folders, _ = _parts(path)
    with self._call(path) as root, self._staged(root, data) as staged:
      for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):  # As above.
          with self._made(root, folders) as folder:
            self._renamed(root, staged, folder, path)
            files.flush_folder(folder)
            return
    raise StoreUnavailableError(
      f"{path}: its folder is removed again and again"
    )

  def delete(self, paths: Sequence[str]) -> None:
    """Deletes objects, and the folders that are empty without them."""
    for path in paths:
      *folders, name = _parts(path)
      with self._call(path) as root:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
          with files.opened_folders(root, folders) as opened:
            if files.kind_of(opened[-1], name) == files.FILE:
              os.unlink(name, dir_fd=opened[-1])
              _remove_empty(opened, folders)

  def sizes(self, prefix: str) -> dict[str, int]:
    """Returns the bytes of the objects below a folder, by path."""
    folders = _parts(prefix)
    with self._call(prefix) as root:
      self._clean(root)
      with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        with files.opened_folders(root, folders) as opened:
          return dict(_found(opened[-1], prefix, len(folders)))
    return {}

  @contextlib.contextmanager
  def _call(self, path: str) -> Iterator[int]:
    """Opens the folder; a refusal of the system is a StoreUnavailableError."""
    try:
      root = files.opened_root(self._path)
    except OSError as error:
      raise StoreUnavailableError(f"{self._path}: {error.strerror}") from None
    try:
      yield root
    except OSError as error:
      raise StoreUnavailableError(_said(path, error)) from None
    finally:
      os.close(root)

  @contextlib.contextmanager
  def _staged(self, root: int, data: bytes) -> Iterator[_Staged]:
    """Writes a file that has no name of an object yet, and removes it."""
    name = secrets.token_hex(16)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with self._made(root, [_STAGING]) as staging:
      try:
        descriptor = os.open(name, flags, 0o666, dir_fd=staging)
      except PermissionError as error:
        raise StoreUnavailableError(_said(_STAGING, error)) from None
      try:
        with open(descriptor, "wb") as file:
          file.write(data)
          file.flush()
          os.fsync(descriptor)
        yield _Staged(staging, name)
      finally:
        with contextlib.suppress(OSError):
          os.unlink(name, dir_fd=staging)

  def _linked(self, root: int, staged: _Staged, folder: int, path: str) -> bool:
    """Gives a staged file the name of an object; returns whether it was free.

    Args:
      root: The folder of the store.
      staged: The file.
      folder: The folder of the object.
      path: Path of the object.
    """
    name = path.rpartition("/")[2]
    for _ in range(_TRIES):
      try:
        os.link(
          staged.name,
          name,
          src_dir_fd=staged.folder,
          dst_dir_fd=folder,
          follow_symlinks=False,
        )
        return True
      except FileExistsError:
        if files.kind_of(folder, name) == files.FILE:
          # A server may have linked it, and its answer was lost.
          return _is_same(staged.folder, staged.name, folder, name)
        self._put_aside(root, folder, path, files.FILE)
      except OSError as error:
        if error.errno not in _NO_LINKS:
          raise
        raise ClosedError(
          f"it has no hard links ({error.strerror}), which make sure that an"
          " object is created once: take a folder of another file system, or a"
          " bucket"
        ) from None
    raise StoreUnavailableError(
      f"{path}: others write and remove it again and again"
    )

  def _renamed(
    self, root: int, staged: _Staged, folder: int, path: str
  ) -> None:
    """Gives a staged file the name of an object, whatever has it."""
    name = path.rpartition("/")[2]
    if files.kind_of(folder, name) == files.FOLDER:
      self._put_aside(root, folder, path, files.FILE)
    os.replace(staged.name, name, src_dir_fd=staged.folder, dst_dir_fd=folder)

  @contextlib.contextmanager
  def _made(self, root: int, names: Sequence[str]) -> Iterator[int]:
    """Opens folders of which each is in the one before; yields the last one.

    Those that are missing are made, and what stands there instead is renamed.
    """
    with contextlib.ExitStack() as stack:
      folder = root
      for number, name in enumerate(names, start=1):
        try:
          found = files.opened_folder(folder, name)
        except (FileNotFoundError, NotADirectoryError):
          path = "/".join(names[:number])
          self._put_aside(root, folder, path, files.FOLDER)
          files.make_folder(folder, name)
          found = files.opened_folder(folder, name)
        stack.callback(os.close, found)
        folder = found
      yield folder

  def _put_aside(self, root: int, folder: int, path: str, fit: str) -> None:
    """Renames what stands where an object or a folder has to be.

    Only one replica at a time does so: another one might have written the
    object a moment ago, and it must not be taken away.

    Args:
      root: The folder of the store.
      folder: The folder in which it stands.
      path: Path of the object or folder.
      fit: What has to be there: what is of this kind stays.
    """
    name = path.rpartition("/")[2]
    kind = files.kind_of(folder, name)
    if kind in ("", fit):
      return
    aside = f"{_ASIDE}.{name}.{secrets.token_hex(4)}"
    with _alone(root):
      if files.kind_of(folder, name) in ("", fit):
        return
      try:
        os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
      except OSError as error:
        raise StoreUnavailableError(
          f"{path} is a {kind} and has to be a {fit} of the run, and it cannot"
          f" be renamed ({error.strerror}): remove it"
        ) from None
    _LOG.warning(
      "%s/%s was a %s and has to be a %s of the run: it is called %s now",
      *(self._path, path, kind, fit, aside),
    )

  def _clean(self, root: int) -> None:
    """Removes what writers that were killed have left."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      with files.opened_folders(root, [_STAGING]) as opened:
        staging = opened[-1]
        # Time is that of the file system: when something came or went there.
        last_s = os.fstat(staging).st_mtime
        with os.scandir(staging) as entries:
          for entry in entries:
            with contextlib.suppress(OSError):
              written_s = entry.stat(follow_symlinks=False).st_mtime
              if last_s - written_s > _OLD_S:
                os.unlink(entry.name, dir_fd=staging)


def _parts(path: str) -> list[str]:
  """Returns the names of a path, which stays below its folder.

  Raises:
    StoreUnavailableError: If a name is empty or begins with a dot.
  """
  parts = path.split("/")
  if any(not part or part.startswith(".") or "\0" in part for part in parts):
    raise StoreUnavailableError(f"{path!r} is no path of an object")
  return parts


def _said(path: str, error: OSError) -> str:
  """Returns what the system refuses, and what to do about it."""
  said = f"{path}: {error.strerror or error}"
  if isinstance(error, PermissionError):
    return f"{said}: let all replicas read and write it, or remove it"
  return said


def _is_same(folder: int, name: str, other: int, other_name: str) -> bool:
  """Returns whether two names are those of one file."""
  return os.path.samestat(
    os.stat(name, dir_fd=folder, follow_symlinks=False),
    os.stat(other_name, dir_fd=other, follow_symlinks=False),
  )


def _remove_empty(opened: Sequence[int], names: Sequence[str]) -> None:
  """Removes folders from the last one on, up to one that is not empty."""
  with contextlib.suppress(OSError):
    for parent, name in reversed(list(zip(opened, names, strict=False))):
      os.rmdir(name, dir_fd=parent)


def _found(folder: int, path: str, depth: int) -> Iterator[tuple[str, int]]:
  """Yields path and size of the files below a folder."""
  with os.scandir(folder) as entries:
    for entry in entries:
      below = f"{path}/{entry.name}"
      if entry.name.startswith("."):
        continue
      # What somebody removes meanwhile is not there.
      with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if entry.is_file(follow_symlinks=False):
          yield below, entry.stat(follow_symlinks=False).st_size
        elif entry.is_dir(follow_symlinks=False) and depth < _DEEPEST:
          with files.opened_folders(folder, [entry.name]) as opened:
            yield from _found(opened[-1], below, depth + 1)


@contextlib.contextmanager
def _alone(root: int) -> Iterator[None]:
  """Holds a lock on a folder that nobody else holds.

  On a file system without such locks, e.g. NFS, it is not held.

  Raises:
    StoreUnavailableError: If another process holds it all the time.
  """
  for _ in range(_LOCK_TRIES):
    try:
      fcntl.flock(root, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      time.sleep(_LOCK_PAUSE_S)
    except OSError:
      break
    else:
      break
  else:
    raise StoreUnavailableError("another process holds a lock on the folder")
  try:
    yield
  finally:
    with contextlib.suppress(OSError):
      fcntl.flock(root, fcntl.LOCK_UN)
