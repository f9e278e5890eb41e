"""Objects in a folder, as files. Symbolic links in the folder are not followed.

An object is first written to a file in `.staged` and flushed to the disk. Then
it gets its name. `create` links the name, which fails if the name is taken.
`put` renames the file, which replaces the old object. So nobody sees half of an
object, and a power cut loses none.

A link, a FIFO, a socket, a device or a folder is not an object and counts as
absent. It is neither read nor waited for. If an object has to have its name, it
is renamed, and a line in the log says so: nothing of anybody is deleted. Names
that begin with a dot are not objects.

Each folder is opened by its name in its parent folder (`dilocox_jax.files`). So
no link is followed, even if somebody replaces a folder by a link meanwhile.
The folder that the user names is opened anew for every call, because its file
system may have gone and come back.
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
_DEEPEST = 8  # Largest number of folders in a path. No run has deeper ones.
_TRIES = 10  # Tries of a call while others change the folder at the same time.
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
  """The objects of a folder.

  Attributes:
    deleted_at_once: Largest number of objects in one call of `delete`.
  """

  deleted_at_once = 1

  def __init__(self, path: str):
    """Opens a folder, which is made if missing.

    Args:
      path: The folder. It may be a link, or its path may have links.

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

  def get_range(self, path: str, start: int, stop: int) -> bytes | None:
    """Returns bytes of an object; None if it is absent or too short."""
    *folders, name = _parts(path)
    with self._call(path) as root:
      try:
        with files.opened_folders(root, folders) as opened:
          return files.read_range(opened[-1], name, start, stop)
      except (FileNotFoundError, NotADirectoryError):
        return None

  def create(self, path: str, data: Data) -> bool:
    """Writes an object that must not exist; returns whether it was written."""
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
        with contextlib.suppress(FileNotFoundError):  # As in `create`.
          with self._open_or_make(root, folders) as folder:
            self._rename(root, staged, folder=folder, path=path)
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
    """Returns the sizes in bytes of the objects below a folder, by path."""
    folders = _parts(prefix)
    with self._call(prefix) as root:
      self._clean(root)
      with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        with files.opened_folders(root, folders) as opened:
          return dict(_sizes_below(opened[-1], prefix, len(folders)))
    return {}

  @contextlib.contextmanager
  def _call(self, path: str) -> Iterator[int]:
    """Opens the folder, and turns errors of the system into those of a store.

    Args:
      path: Path of the object, for messages.

    Yields:
      Descriptor of the folder.

    Raises:
      StoreUnavailableError: For an OSError of the system.
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
    """Writes a file in `.staged`, yields it, and removes its staged name."""
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

    Args:
      root: Descriptor of the folder of the store.
      staged: The file.
      folder: Descriptor of the folder of the object.
      path: Path of the object.

    Returns:
      Whether the name was free.
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
    """Gives a staged file the name of an object, and replaces an old object.

    Args:
      root: Descriptor of the folder of the store.
      staged: The file.
      folder: Descriptor of the folder of the object.
      path: Path of the object.
    """
    name = path.rpartition("/")[2]
    if files.kind_of(folder, name) == files.FOLDER:
      self._put_aside(root, folder, path, files.FILE)
    os.replace(staged.name, name, src_dir_fd=staged.folder, dst_dir_fd=folder)

  @contextlib.contextmanager
  def _open_or_make(self, root: int, names: Sequence[str]) -> Iterator[int]:
    """Opens nested folders, and yields the innermost one.

    Missing folders are made. Anything else that has the name of a folder is
    renamed.

    Args:
      root: Descriptor of the folder of the store.
      names: Names of the folders, each of which is in the one before.
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
    """Renames what has the name of an object or folder and is of another kind.

    It does so under a lock. Another replica may have written the object a
    moment ago, and this replica must not rename that object.

    Args:
      root: Descriptor of the folder of the store.
      folder: Descriptor of the folder that has the object or folder.
      path: Path of the object or folder.
      expected_kind: `files.FILE` or `files.FOLDER`. Whatever is of this kind
        stays.
    """
    name = path.rpartition("/")[2]
    kind = files.kind_of(folder, name)
    if kind in ("", expected_kind):
      return
    new_name = f"{_ASIDE}.{name}.{secrets.token_hex(4)}"
    with _locked(root):
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
    """Removes files that writers have staged before they were killed."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      with files.opened_folders(root, [_STAGING]) as opened:
        staging = opened[-1]
        # The age of a file is measured by the clock of the file system: up to
        # the last time that an entry was added or removed.
        last_s = os.fstat(staging).st_mtime
        with os.scandir(staging) as entries:
          for entry in entries:
            with contextlib.suppress(OSError):
              written_s = entry.stat(follow_symlinks=False).st_mtime
              if last_s - written_s > _OLD_S:
                os.unlink(entry.name, dir_fd=staging)


def _parts(path: str) -> list[str]:
  """Returns the names in a path, which cannot lead out of the folder.

  Raises:
    StoreUnavailableError: If a name is empty or begins with a dot.
  """
  parts = path.split("/")
  if any(not part or part.startswith(".") or "\0" in part for part in parts):
    raise StoreUnavailableError(f"{path!r} is no path of an object")
  return parts


def _message(path: str, error: OSError) -> str:
  """Returns the message for an error of the system: what to do about it."""
  message = f"{path}: {error.strerror or error}"
  if isinstance(error, PermissionError):
    return f"{message}: let all replicas read and write it, or remove it"
  return message


def _is_same(folder: int, name: str, other: int, other_name: str) -> bool:
  """Returns whether two names, in two folders, are links to one file."""
  return os.path.samestat(
    os.stat(name, dir_fd=folder, follow_symlinks=False),
    os.stat(other_name, dir_fd=other, follow_symlinks=False),
  )


def _remove_empty(opened: Sequence[int], names: Sequence[str]) -> None:
  """Removes nested folders, the innermost first, until one is not empty.

  Args:
    opened: Descriptors of the outermost folder's parent and of all folders.
    names: Names of the folders.
  """
  with contextlib.suppress(OSError):
    for parent, name in reversed(list(zip(opened, names, strict=False))):
      os.rmdir(name, dir_fd=parent)


def _sizes_below(
  folder: int, path: str, depth: int
) -> Iterator[tuple[str, int]]:
  """Yields path and size in bytes of the files below a folder.

  Args:
    folder: Descriptor of the folder.
    path: Path of the folder.
    depth: Number of names in the path.
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
  """Holds an exclusive lock on a folder.

  A file system without such locks, e.g. some NFS, is used without a lock.

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
