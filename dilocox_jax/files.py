"""Files and folders are reached without following a symbolic link.

Whoever may write into the folder of a run could put a link under the name of
one of its files or folders. Opened as usual, what the link points to would be
emptied or deleted, and it may be anybody's.

The folder that a user names (`root`) is the user's own choice: it may be a
link, or lie behind one. Below it every folder is opened by its name in the
folder before. Files are made, renamed and removed in folders that are open. So
it does not help to put a link there between a look and a use.
"""

import contextlib
import errno
import os
import pathlib
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from typing import BinaryIO, cast

Path = str | os.PathLike[str]

FILE = "file"
FOLDER = "folder"
LINK = "symbolic link"
_KINDS = {
  stat.S_IFREG: FILE,
  stat.S_IFDIR: FOLDER,
  stat.S_IFLNK: LINK,
  stat.S_IFIFO: "FIFO",
  stat.S_IFSOCK: "socket",
  stat.S_IFBLK: "device",
  stat.S_IFCHR: "device",
}
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# A FIFO or a device is not waited for, and no terminal becomes ours.
_OPEN_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# What the system says when the name is that of a link, a socket or a FIFO.
_OF_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.ENODEV)
STAMP = "made_by.json"  # Says which program made a directory.
_PARTIAL = re.compile(r"\..+\.\d+\.partial")


@contextlib.contextmanager
def replaced(path: Path, root: Path | None = None) -> Iterator[BinaryIO]:
  """Replaces a file as a whole, so that no reader sees half of it.

  Example: what process 7 writes to `run.json` goes to `.run.json.7.partial`,
  which is flushed to the disk and then renamed. A kill before the rename leaves
  the old `run.json`, a kill after it leaves the new one. A link of that name is
  replaced, and what it points to stays.

  Args:
    path: File to replace; its folder must exist.
    root: Folder above it that the user names; by default its own folder.

  Yields:
    The file to write to, which is empty. It has a name.

  Raises:
    OSError: If the system refuses, or a folder between the root and the file
      is a link. The old file is unchanged.
  """
  path = pathlib.Path(path)
  with _folder_of(path, root) as (folder, name):
    partial = f".{name}.{os.getpid()}.partial"
    _remove(folder, partial)
    try:
      # It must not exist.
      with _opened(path.with_name(partial), "xb", folder) as file:
        yield file
        file.flush()
        # Without this a power cut could leave the new name on an empty file.
        os.fsync(file.fileno())
      os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
      _remove(folder, partial)
      raise


def remove_partial(directory: str | os.PathLike[str]) -> None:
  """Removes the halves of files that killed processes left (`replaced`).

  Args:
    directory: A directory in which nobody else writes now, for example because
      the caller holds its lock.

  Raises:
    OSError: If the system refuses.
  """
  for name in os.listdir(directory):
    if _PARTIAL.fullmatch(name):
      os.unlink(os.path.join(directory, name))


def opened_to_append(
  path: Path, buffering: int = -1, root: Path | None = None
) -> BinaryIO:
  """Opens a file of ours to write at its end; it is made if missing.

  Args:
    path: The file; its folder must exist.
    buffering: As in `open`; 0 writes at once.
    root: Folder above it that the user names; by default its own folder.

  Raises:
    OSError: If it is a link, a FIFO or anything else that is no file, if a
      folder between the root and the file is a link, or the system refuses.
  """
  path = pathlib.Path(path)
  with _folder_of(path, root) as (folder, name):
    try:
      file = _opened(path, "ab", folder, buffering)
      kind = _KINDS.get(stat.S_IFMT(os.fstat(file.fileno()).st_mode))
      if kind == FILE:
        return file
      file.close()
      raise OSError(errno.ENXIO, "")
    except OSError as error:
      if error.errno not in _OF_NO_FILE:
        raise
      reason = f"it is a {kind_of(folder, name)}"
      raise OSError(error.errno, reason, str(path)) from None


def folder_below(root: Path, *names: str) -> pathlib.Path:
  """Makes a folder below one that the user names, and returns its path.

  It is for libraries and programs that open files by their paths. What opens
  files here takes `root` instead, and holds also if a link is put there later.

  Args:
    root: The folder that the user names; it exists.
    *names: Names of the folders, each in the one before.

  Raises:
    NotADirectoryError: If a link or something else has one of the names.
    OSError: If the system refuses.
  """
  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(_closing(opened_root(root)))
    for name in names:
      make_folder(folder, name)
      folder = opened_folder(folder, name)
      stack.callback(os.close, folder)
  return pathlib.Path(root, *names)


def check_folder(root: Path, *names: str) -> None:
  """Raises an error if what is below a root is a link, or no folder.

  Args:
    root: The folder that the user names; it exists.
    *names: Names of the folders, each in the one before. They may be missing.

  Raises:
    NotADirectoryError: If a link or something else has one of the names.
    OSError: If the system refuses.
  """
  with _closing(opened_root(root)) as top:
    with contextlib.suppress(FileNotFoundError), opened_folders(top, names):
      pass


def remove_folder(root: Path, *names: str) -> None:
  """Removes a folder and all that is in it; no link in it is followed.

  Args:
    root: The folder that the user names; it exists.
    *names: Names of the folders on the way. The last one is removed. If it is
      missing, nothing happens.

  Raises:
    NotADirectoryError: If a link or something else has one of the names.
    OSError: If the system refuses.
  """
  with _closing(opened_root(root)) as top:
    with contextlib.suppress(FileNotFoundError):
      with opened_folders(top, names) as folders:
        shutil.rmtree(names[-1], dir_fd=folders[-2])


# Folders and files by their names in a folder that is open (a descriptor).


def opened_root(path: Path) -> int:
  """Opens a folder that the user names, through links if it has some."""
  return os.open(path, _OPEN_FOLDER)


def opened_folder(parent: int, name: str) -> int:
  """Opens a folder.

  Raises:
    FileNotFoundError: If nothing has the name.
    NotADirectoryError: If it is a link, or something else that is no folder.
  """
  try:
    return os.open(name, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=parent)
  except OSError as error:
    # Not every system says ENOTDIR of a link.
    if error.errno not in (errno.ENOTDIR, *_OF_NO_FILE):
      raise
    kind = kind_of(parent, name)
    reason = f"{name} is a {kind} and has to be a folder: remove it"
    raise NotADirectoryError(errno.ENOTDIR, reason, name) from None


def make_folder(parent: int, name: str) -> None:
  """Makes a folder that outlives a power cut, unless the name is taken."""
  with contextlib.suppress(FileExistsError):
    os.mkdir(name, dir_fd=parent)
    flush_folder(parent)


def flush_folder(folder: int) -> None:
  """Has the names in a folder outlive a power cut, where the system can."""
  try:
    os.fsync(folder)
  except OSError as error:
    if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP):
      raise


@contextlib.contextmanager
def opened_folders(root: int, names: Iterable[str]) -> Iterator[list[int]]:
  """Opens folders of which each is in the one before.

  Args:
    root: The folder that the first one is in.
    names: Names of the folders.

  Yields:
    The root and the folders, which are closed afterwards.

  Raises:
    FileNotFoundError: If one is missing.
    NotADirectoryError: If one is a link, or something else that is no folder.
  """
  with contextlib.ExitStack() as stack:
    folders = [root]
    for name in names:
      folders.append(opened_folder(folders[-1], name))
      stack.callback(os.close, folders[-1])
    yield folders


def kind_of(folder: int, name: str) -> str:
  """Returns what has a name, such as `FILE` or "FIFO"; "" if nothing has it."""
  try:
    mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
  except FileNotFoundError:
    return ""
  return _KINDS.get(stat.S_IFMT(mode), "thing of an unknown kind")


def read_file(folder: int, name: str, at_most: int) -> bytes | None:
  """Returns the content of a file.

  Args:
    folder: The folder.
    name: Name of the file.
    at_most: Bytes that it may have. Of a larger file nothing is read.

  Returns:
    The content. None if it is larger, or missing, or if it is a link, a FIFO or
    anything else that is no file: that is not waited for.

  Raises:
    OSError: If the system refuses.
  """
  with _file_to_read(folder, name) as file:
    if file is None:
      return None
    size = os.fstat(file.fileno()).st_size
    return file.read(size) if size <= at_most else None


def read_range(folder: int, name: str, start: int, stop: int) -> bytes | None:
  """Returns bytes of a file.

  Args:
    folder: The folder.
    name: Name of the file.
    start: First byte.
    stop: End of the range.

  Returns:
    The bytes. None if the file ends before `stop`, or if `read_file` would not
    read it.

  Raises:
    OSError: If the system refuses.
  """
  with _file_to_read(folder, name) as file:
    if file is None or os.fstat(file.fileno()).st_size < stop:
      return None
    file.seek(start)
    return file.read(stop - start)


@contextlib.contextmanager
def _file_to_read(folder: int, name: str) -> Iterator[BinaryIO | None]:
  """Opens a file, and yields it; None if nothing has the name, or no file."""
  # Devices are not even opened: of some this alone has an effect.
  if kind_of(folder, name) != FILE:
    yield None
    return
  try:
    descriptor = os.open(name, os.O_RDONLY | _OPEN_FILE, dir_fd=folder)
  except OSError as error:
    if error.errno in (errno.ENOENT, *_OF_NO_FILE):
      yield None
      return
    raise
  with open(descriptor, "rb") as file:
    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    yield file if is_file else None


def _opened(
  path: pathlib.Path, mode: str, folder: int, buffering: int = -1
) -> BinaryIO:
  """Opens a file of an open folder, without following a link or waiting."""

  def opener(_: str, flags: int) -> int:
    return os.open(path.name, flags | _OPEN_FILE, 0o666, dir_fd=folder)

  return cast(BinaryIO, open(path, mode, buffering, opener=opener))


def _remove(folder: int, name: str) -> None:
  with contextlib.suppress(FileNotFoundError):
    os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def _closing(folder: int) -> Iterator[int]:
  try:
    yield folder
  finally:
    os.close(folder)


@contextlib.contextmanager
def _folder_of(
  path: pathlib.Path, root: Path | None
) -> Iterator[tuple[int, str]]:
  """Opens the folder of a file; yields it and the name of the file."""
  root = path.parent if root is None else root
  *names, name = path.relative_to(root).parts
  with _closing(opened_root(root)) as top:
    with opened_folders(top, names) as folders:
      yield folders[-1], name
