"""Stores objects as files in a folder, without following symbolic links.

An object is first written to a file in the folder `.staged`, and flushed to the
disk. Then the file gets the object's name: by a hard link, which fails if the
name is taken (`create`), or by renaming it, which replaces an old object
(`put`). So nobody sees half of an object.

A link, FIFO, socket, device or folder is not an object: it counts as missing.
If it has the name of an object to be written, it is renamed. Files whose names
begin with a dot are not objects.

Links in the path of the store's folder are followed. The folder is opened again
for every call, because its file system may have been mounted again. Inside it,
a folder is opened by its name in its parent folder (`dilocox_jax.files`).
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
from dilocox_jax.mailbox_protocol.buffers import Data, parts_of

_LOG = logging.getLogger(__name__)
_STAGING = ".staged"
_ASIDE = ".aside"
_OLD_S = 3600.0  # A staged file of this age belongs to a writer that has died.
_DEEPEST = 8  # Objects below more folders than this are not listed.
# How often a call is tried while others change the folder at the same time.
_TRIES = 10
_LOCK_TRIES = 20
_LOCK_PAUSE_S = 0.05
# Errors of `link` on a file system that has no hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class _Staged(NamedTuple):
  """A file in `.staged`, before it gets the name of an object.

  Attributes:
    folder: Descriptor of the open folder `.staged`.
    name: Name of the file in it.
  """

  folder: int
  name: str


class Folder:
  """Reads and writes objects in a folder.

  Every method but the constructor raises `StoreUnavailableError` if the system
  refuses, or if a path is wrong: it has a zero byte, or one of its names is
  empty or begins with a dot.

  Attributes:
    deleted_at_once: Largest number of objects in one call of `delete`.
  """

  deleted_at_once = 1  # A system call deletes one file.

  def __init__(self, path: str):
    """Makes the folder if it is missing.

    Args:
      path: Path of the folder, which may contain symbolic links.

    Raises:
      OSError: If the folder cannot be made.
    """
    self._path = os.path.realpath(pathlib.Path(path).expanduser())
    os.makedirs(self._path, exist_ok=True)

  def get(self, path: str, at_most: int) -> bytes | None:
    """Returns an object; None if it is missing or has over `at_most` bytes."""
    *folders, name = _parts(path)
    with self._call(path) as root:
      try:
        with files.opened_folders(root, folders) as opened:
          return files.read_file(opened[-1], name, at_most)
      except (FileNotFoundError, NotADirectoryError):
        return None

  def get_range(self, path: str, start: int, stop: int) -> bytes | None:
    """Returns the bytes `start` to `stop` - 1 of an object.

    The result is None if the object is missing or ends before `stop`.
    """
    *folders, name = _parts(path)
    with self._call(path) as root:
      try:
        with files.opened_folders(root, folders) as opened:
          return files.read_range(opened[-1], name, start, stop)
      except (FileNotFoundError, NotADirectoryError):
        return None

  def create(self, path: str, data: Data) -> bool:
    """Writes an object unless it exists, and returns whether it was written.

    Raises:
      ClosedError: If the file system has no hard links.
    """
    *folders, _ = _parts(path)
    with self._call(path) as root, self._staged(root, data) as staged:
      for _ in range(_TRIES):
        # Another replica may remove the folder while it is still empty.
        with contextlib.suppress(FileNotFoundError):
          with self._open_or_make(root, folders) as folder:
            is_new = self._link(root, staged, folder=folder, path=path)
            files.flush_folder(folder)
            return is_new
    raise StoreUnavailableError(
      f"{path}: its folder is removed again and again"
    )

  def put(self, path: str, data: Data) -> None:
    """Writes an object, or replaces it as a whole."""
    *folders, _ = _parts(path)
    with self._call(path) as root, self._staged(root, data) as staged:
      for _ in range(_TRIES):
        # Another replica may remove the folder while it is still empty.
        with contextlib.suppress(FileNotFoundError):
          with self._open_or_make(root, folders) as folder:
            self._rename(root, staged, folder=folder, path=path)
            files.flush_folder(folder)
            return
    raise StoreUnavailableError(
      f"{path}: its folder is removed again and again"
    )

  def delete(self, paths: Sequence[str]) -> None:
    """Deletes objects, and the folders that become empty.

    Missing objects are no error.
    """
    for path in paths:
      *folders, name = _parts(path)
      with self._call(path) as root:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
          with files.opened_folders(root, folders) as opened:
            if files.kind_of(opened[-1], name) == files.FILE:
              os.unlink(name, dir_fd=opened[-1])
              _remove_empty(opened, folders)

  def sizes(self, prefix: str) -> dict[str, int]:
    """Returns the sizes in bytes of the objects below a folder, by path.

    It also removes old files that killed writers have left in `.staged`.

    Args:
      prefix: Path of the folder in the store.
    """
    folders = _parts(prefix)
    with self._call(prefix) as root:
      self._clean(root)
      with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        with files.opened_folders(root, folders) as opened:
          return dict(_sizes_below(opened[-1], prefix, len(folders)))
    return {}

  @contextlib.contextmanager
  def _call(self, path: str) -> Iterator[int]:
    """Opens the store's folder for one call, and yields its descriptor.

    An OSError here or in the `with` block becomes a StoreUnavailableError. If
    it comes from the block, the message names `path`.
    """
    try:
      root = files.opened_root(self._path)
    except OSError as error:
      raise StoreUnavailableError(f"{self._path}: {error.strerror}") from None
    try:
      yield root
    except OSError as error:
      raise StoreUnavailableError(_message(path, error)) from None
    finally:
      os.close(root)

  @contextlib.contextmanager
  def _staged(self, root: int, data: Data) -> Iterator[_Staged]:
    """Writes a file in `.staged`, yields it, and removes its name there."""
    name = secrets.token_hex(16)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with self._open_or_make(root, [_STAGING]) as staging:
      try:
        descriptor = os.open(name, flags, 0o666, dir_fd=staging)
      except PermissionError as error:
        raise StoreUnavailableError(_message(_STAGING, error)) from None
      try:
        with open(descriptor, "wb") as file:
          for part in parts_of(data):
            file.write(part)
          file.flush()
          os.fsync(descriptor)
        yield _Staged(staging, name)
      finally:
        with contextlib.suppress(OSError):
          os.unlink(name, dir_fd=staging)

  def _link(self, root: int, staged: _Staged, folder: int, path: str) -> bool:
    """Gives a staged file the name of an object, if the name is free.

    Returns:
      Whether the file has the name then. False: another object has it.

    Raises:
      ClosedError: If the file system has no hard links.
      StoreUnavailableError: If others write and remove the name all the time.
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
          # The file server may have linked it before, and its answer was lost.
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

  def _rename(self, root: int, staged: _Staged, folder: int, path: str) -> None:
    """Gives a staged file the name of an object.

    A file that has the name is replaced; anything else is renamed first.
    """
    name = path.rpartition("/")[2]
    self._put_aside(root, folder, path, files.FILE)
    # What a stranger puts there at this moment would be replaced, except for a
    # folder: the system then raises an error.
    os.replace(staged.name, name, src_dir_fd=staged.folder, dst_dir_fd=folder)

  @contextlib.contextmanager
  def _open_or_make(self, root: int, names: Sequence[str]) -> Iterator[int]:
    """Opens nested folders, and yields the descriptor of the innermost one.

    Missing folders are made. Anything else that has a folder's name is renamed.
    """
    with contextlib.ExitStack() as stack:
      folder = root
      for depth, name in enumerate(names, start=1):
        try:
          inner_folder = files.opened_folder(folder, name)
        except (FileNotFoundError, NotADirectoryError):
          path = "/".join(names[:depth])
          self._put_aside(root, folder, path=path, expected_kind=files.FOLDER)
          files.make_folder(folder, name)
          inner_folder = files.opened_folder(folder, name)
        stack.callback(os.close, inner_folder)
        folder = inner_folder
      yield folder

  def _put_aside(
    self, root: int, folder: int, path: str, expected_kind: str
  ) -> None:
    """Renames the entry at a path if it is of another kind than expected.

    `folder` is the descriptor of its folder, and `root` of the store's folder.
    The expected kind is `files.FILE` or `files.FOLDER`.

    Raises:
      StoreUnavailableError: If the entry cannot be renamed.
    """
    name = path.rpartition("/")[2]
    kind = files.kind_of(folder, name)  # "" if nothing has this name.
    if kind in ("", expected_kind):
      return
    new_name = f"{_ASIDE}.{name}.{secrets.token_hex(4)}"
    with _locked(root):
      # Another replica may meanwhile have written the object.
      if files.kind_of(folder, name) in ("", expected_kind):
        return
      try:
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=folder)
      except OSError as error:
        raise StoreUnavailableError(
          f"{path} is a {kind} and has to be a {expected_kind} of the run, and"
          f" it cannot be renamed ({error.strerror}): remove it"
        ) from None
    _LOG.warning(
      "%s/%s was a %s and has to be a %s of the run: it is called %s now",
      self._path,
      path,
      kind,
      expected_kind,
      new_name,
    )

  def _clean(self, root: int) -> None:
    """Removes files in `.staged` that killed writers left over an hour ago."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      with files.opened_folders(root, [_STAGING]) as opened:
        staging = opened[-1]
        # Measure the age of a file by the clock of the file system, which may
        # differ from this machine's: up to when an entry of the folder was last
        # added or removed.
        last_s = os.fstat(staging).st_mtime
        with os.scandir(staging) as entries:
          for entry in entries:
            with contextlib.suppress(OSError):
              written_s = entry.stat(follow_symlinks=False).st_mtime
              if last_s - written_s > _OLD_S:
                os.unlink(entry.name, dir_fd=staging)


def _parts(path: str) -> list[str]:
  """Splits an object's path at "/", and checks that it stays in the store.

  Raises:
    StoreUnavailableError: If a name is empty, begins with a dot, or has a zero
      byte.
  """
  parts = path.split("/")
  if any(not part or part.startswith(".") or "\0" in part for part in parts):
    raise StoreUnavailableError(f"{path!r} is no path of an object")
  return parts


def _message(path: str, error: OSError) -> str:
  """Returns one line for a system error, with advice if access is denied."""
  message = f"{path}: {error.strerror or error}"
  if isinstance(error, PermissionError):
    return f"{message}: let all replicas read and write it, or remove it"
  return message


def _is_same(folder: int, name: str, other: int, other_name: str) -> bool:
  """Returns whether two names are hard links to the same file.

  `folder` and `other` are the descriptors of the folders of the two names.
  """
  return os.path.samestat(
    os.stat(name, dir_fd=folder, follow_symlinks=False),
    os.stat(other_name, dir_fd=other, follow_symlinks=False),
  )


def _remove_empty(opened: Sequence[int], names: Sequence[str]) -> None:
  """Removes nested folders, the innermost first, until one is not empty.

  `opened` has the descriptor of each folder's parent, the outermost first.
  """
  with contextlib.suppress(OSError):
    for parent, name in reversed(list(zip(opened, names, strict=False))):
      os.rmdir(name, dir_fd=parent)


def _sizes_below(
  folder: int, path: str, depth: int
) -> Iterator[tuple[str, int]]:
  """Yields path and size in bytes of each file below a folder.

  Names that begin with "." are skipped, and so are files below more than
  `_DEEPEST` folders. `path` is the folder's path, with `depth` names.
  """
  with os.scandir(folder) as entries:
    for entry in entries:
      below = f"{path}/{entry.name}"
      if entry.name.startswith("."):
        continue
      # Somebody may remove the entry at the same time.
      with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if entry.is_file(follow_symlinks=False):
          yield below, entry.stat(follow_symlinks=False).st_size
        elif entry.is_dir(follow_symlinks=False) and depth < _DEEPEST:
          with files.opened_folders(folder, [entry.name]) as opened:
            yield from _sizes_below(opened[-1], below, depth + 1)


@contextlib.contextmanager
def _locked(root: int) -> Iterator[None]:
  """Holds an exclusive lock on a folder, if its file system has locks.

  Raises:
    StoreUnavailableError: If another process holds the lock for a second.
  """
  for _ in range(_LOCK_TRIES):
    try:
      fcntl.flock(root, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      time.sleep(_LOCK_PAUSE_S)
    except OSError:
      break  # The file system has no locks.
    else:
      break  # This process holds the lock now.
  else:
    raise StoreUnavailableError("another process holds a lock on the folder")
  try:
    yield
  finally:
    with contextlib.suppress(OSError):
      fcntl.flock(root, fcntl.LOCK_UN)
