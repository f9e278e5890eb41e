"""Opens, replaces and removes files so that no link leads out of a folder.

Anybody who may write in the folder of a run could put a symbolic link under the
name of one of its files. A program that follows the link would write over, or
delete, a file that may belong to somebody else.

The *root* is the folder that a user names. Links in its path are followed.
Below the root, each folder is opened by its name in the open folder above it,
and a link in place of a folder is an error. So it does no harm if somebody puts
a link there while a function runs.
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
# Flags with which folders and files are opened.
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: to open a FIFO or a device does not wait for its other end.
# O_NOCTTY: a terminal that is opened does not become the terminal of this
# process.
_OPEN_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# Errors of the system when a name to be opened is a link, a socket or a FIFO.
_OF_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.ENODEV)
STAMP = "made_by.json"  # File that says which program made a directory.
# Names of the partial files of `replaced`.
_PARTIAL = re.compile(r"\..+\.\d+\.partial")


@contextlib.contextmanager
def replaced(path: Path, root: Path | None = None) -> Iterator[BinaryIO]:
  """Replaces a file as a whole, so that no reader sees half of it.

  Example: the process with the ID 7 writes a new `run.json` into
  `.run.json.7.partial`. At the end of the block, this partial file is flushed
  to the disk and renamed to `run.json`. If the block raises an error, the
  partial file is removed. If `run.json` is a link, the link is replaced, not
  the file to which it points.

  Args:
    path: File to replace; its folder must exist.
    root: Folder that the user names, above the file; None: the file's folder.

  Yields:
    The partial file, empty and open for writing bytes.

  Raises:
    OSError: If the system refuses, or a folder between the root and the file is
      a link. The old file is unchanged.
    ValueError: If the file is not below the root.
  """
  path = pathlib.Path(path)
  with _folder_of(path, root) as (folder, name):
    partial = f".{name}.{os.getpid()}.partial"
    # A killed process with the same ID may have left a partial file.
    _remove(folder, partial)
    try:
      # "x" refuses a partial file that somebody else has put there by now.
      with _opened(path.with_name(partial), "xb", folder) as file:
        yield file
        file.flush()
        # Otherwise a power cut after the rename could leave an empty file.
        os.fsync(file.fileno())
      os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
      _remove(folder, partial)
      raise


def remove_partial(directory: str | os.PathLike[str]) -> None:
  """Removes the partial files that killed processes have left (`replaced`).

  Call it only for a directory in which no other process writes now.
  """
  for name in os.listdir(directory):
    if _PARTIAL.fullmatch(name):
      os.unlink(os.path.join(directory, name))


def opened_to_append(
  path: Path, buffering: int = -1, root: Path | None = None
) -> BinaryIO:
  """Opens a file to write bytes at its end. A missing file is made.

  Args:
    path: The file; its folder must exist.
    buffering: Size of the buffer as for Python's `open`; 0 writes at once.
    root: Folder that the user names, above the file; None: the file's folder.

  Raises:
    OSError: If the path belongs to anything but a regular file, e.g. a link; if
      a folder between the root and the file is a link; or if the system
      refuses.
    ValueError: If the file is not below the root.
  """
  path = pathlib.Path(path)
  with _folder_of(path, root) as (folder, name):

    def no_file_error(error_number: int) -> OSError:
      reason = f"it is a {kind_of(folder, name)}"
      return OSError(error_number, reason, str(path))

    try:
      file = _opened(path, "ab", folder, buffering)
    except OSError as error:
      if error.errno not in _OF_NO_FILE:
        raise
      raise no_file_error(error.errno) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
      file.close()
      raise no_file_error(errno.ENXIO)
    return file


def folder_below(root: Path, *names: str) -> pathlib.Path:
  """Makes a folder below a root, and returns its path.

  Use the path only for libraries and programs that cannot open files by
  descriptors. They follow a link that somebody puts into the path later.

  Args:
    root: The folder that the user names; it must exist.
    *names: Path of the folder below the root, one name for each folder on the
      path. Missing folders are made.

  Raises:
    NotADirectoryError: If a name belongs to anything but a folder.
  """
  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(_closing(opened_root(root)))
    for name in names:
      make_folder(folder, name)
      folder = opened_folder(folder, name)
      stack.callback(os.close, folder)
  return pathlib.Path(root, *names)


def check_folder(root: Path, *names: str) -> None:
  """Raises an error if a name below a root belongs to anything but a folder.

  Args:
    root: The folder that the user names; it must exist.
    *names: Path below the root, one name for each folder on the path. Missing
      folders are accepted.

  Raises:
    NotADirectoryError: If a name belongs to anything but a folder.
  """
  with _closing(opened_root(root)) as top:
    with contextlib.suppress(FileNotFoundError), opened_folders(top, names):
      pass


def remove_folder(root: Path, *names: str) -> None:
  """Removes a folder and all that is in it. No link is followed.

  Args:
    root: The folder that the user names; it must exist.
    *names: Path of the folder below the root, one name for each folder on the
      path, at least one. If one of these is missing, nothing happens.

  Raises:
    NotADirectoryError: If a name belongs to anything but a folder.
  """
  with _closing(opened_root(root)) as top:
    with contextlib.suppress(FileNotFoundError):
      with opened_folders(top, names) as folders:
        shutil.rmtree(names[-1], dir_fd=folders[-2])


# The functions below take and return open folders as file descriptors. The
# caller closes a descriptor that a function returns.


def opened_root(path: Path) -> int:
  """Opens a folder that the user names, and returns its file descriptor.

  Links in its path are followed. The caller closes the descriptor.
  """
  return os.open(path, _OPEN_FOLDER)


def opened_folder(parent: int, name: str) -> int:
  """Opens a folder in an open folder, without following a link.

  Args:
    parent: File descriptor of the open folder.
    name: Name of the folder to open.

  Returns:
    File descriptor of the opened folder. The caller closes it.

  Raises:
    FileNotFoundError: If nothing has the name.
    NotADirectoryError: If the name belongs to anything but a folder, e.g. a
      link.
  """
  try:
    return os.open(name, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=parent)
  except OSError as error:
    # Some systems have another error than ENOTDIR for a link.
    if error.errno not in (errno.ENOTDIR, *_OF_NO_FILE):
      raise
    kind = kind_of(parent, name)
    reason = f"{name} is a {kind} and has to be a folder: remove it"
    raise NotADirectoryError(errno.ENOTDIR, reason, name) from None


def make_folder(parent: int, name: str) -> None:
  """Makes a folder in an open folder, unless the name is taken.

  `parent` is the file descriptor of the open folder. The name of a new folder
  is flushed to the disk (`flush_folder`).
  """
  with contextlib.suppress(FileExistsError):
    os.mkdir(name, dir_fd=parent)
    flush_folder(parent)


def flush_folder(folder: int) -> None:
  """Writes the names in an open folder to the disk: they outlive a power cut.

  `folder` is the file descriptor of the open folder. Nothing happens on a file
  system that cannot flush a folder.
  """
  try:
    os.fsync(folder)
  except OSError as error:
    if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP):
      raise


@contextlib.contextmanager
def opened_folders(root: int, names: Iterable[str]) -> Iterator[list[int]]:
  """Opens all folders of a path below an open folder, without following links.

  Args:
    root: File descriptor of the open folder at which the path begins.
    names: The path, one name for each folder.

  Yields:
    File descriptors of the root and of the folders. The folders, but not the
    root, are closed at the end of the block.

  Raises:
    FileNotFoundError: If a folder is missing.
    NotADirectoryError: If a name belongs to anything but a folder, e.g. a link.
  """
  with contextlib.ExitStack() as stack:
    folders = [root]
    for name in names:
      folders.append(opened_folder(folders[-1], name))
      stack.callback(os.close, folders[-1])
    yield folders


def kind_of(folder: int, name: str) -> str:
  """Returns the kind of the thing that has a name in a folder.

  Examples: "file", "FIFO", and "" if nothing has the name. A link is not
  followed. `folder` is the file descriptor of the open folder.
  """
  try:
    mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
  except FileNotFoundError:
    return ""
  return _KINDS.get(stat.S_IFMT(mode), "thing of an unknown kind")


def read_file(folder: int, name: str, at_most: int) -> bytes | None:
  """Returns the content of a file, without following a link.

  Args:
    folder: File descriptor of the open folder that has the file.
    name: Name of the file.
    at_most: Largest size (bytes).

  Returns:
    The content. None if the file is larger or missing, or if the name belongs
    to anything but a regular file.
  """
  with _file_to_read(folder, name) as file:
    if file is None:
      return None
    size = os.fstat(file.fileno()).st_size
    return file.read(size) if size <= at_most else None


def read_range(folder: int, name: str, start: int, stop: int) -> bytes | None:
  """Returns the bytes `start` to `stop` - 1 of a file.

  Args:
    folder: File descriptor of the open folder that has the file.
    name: Name of the file.
    start: Number of the first byte.
    stop: Number of the byte after the last one.

  Returns:
    The bytes. None if the file ends before `stop` or is missing, or if the name
    belongs to anything but a regular file.
  """
  with _file_to_read(folder, name) as file:
    if file is None or os.fstat(file.fileno()).st_size < stop:
      return None
    file.seek(start)
    return file.read(stop - start)


@contextlib.contextmanager
def _file_to_read(folder: int, name: str) -> Iterator[BinaryIO | None]:
  """Yields a file open for reading, without following a link.

  Yields None if nothing has the name, or it belongs to no regular file.
  """
  # Devices are not even opened, because to open some of them has an effect.
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
    # The file may have been replaced since `kind_of`.
    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    yield file if is_file else None


def _opened(
  path: pathlib.Path, mode: str, folder: int, buffering: int = -1
) -> BinaryIO:
  """Opens the file `path.name` in an open folder.

  No link is followed, and opening a FIFO does not wait. `mode` and `buffering`
  are those of Python's `open`.
  """

  def opener(_: str, flags: int) -> int:
    return os.open(path.name, flags | _OPEN_FILE, 0o666, dir_fd=folder)

  return cast(BinaryIO, open(path, mode, buffering, opener=opener))


def _remove(folder: int, name: str) -> None:
  """Removes a file of an open folder. A missing file is no error."""
  with contextlib.suppress(FileNotFoundError):
    os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def _closing(folder: int) -> Iterator[int]:
  """Yields an open folder, and closes it at the end of the block."""
  try:
    yield folder
  finally:
    os.close(folder)


@contextlib.contextmanager
def _folder_of(
  path: pathlib.Path, root: Path | None
) -> Iterator[tuple[int, str]]:
  """Opens the folder of a file, and closes it at the end of the block.

  Yields the file descriptor of the folder, and the name of the file in it.
  `root` is the folder that the user names; None means the file's own folder.
  """
  root = path.parent if root is None else root
  *names, name = path.relative_to(root).parts
  with _closing(opened_root(root)) as top:
    with opened_folders(top, names) as folders:
      yield folders[-1], name
