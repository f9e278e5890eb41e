"""What somebody who may write in a folder can put there, without the secret."""

import os
import socket


def link_to_file(path, victim):
  path.symlink_to(victim / "thesis.tex")


def link_to_folder(path, victim):
  path.symlink_to(victim)


def link_to_nothing(path, victim):
  path.symlink_to(victim / "new")


def link_to_root(path, victim):
  path.symlink_to("/")


def link_to_endless(path, victim):
  path.symlink_to("/dev/zero")


def link_to_itself(path, victim):
  path.symlink_to(path.name)


def fifo(path, victim):
  os.mkfifo(path)


def unix_socket(path, victim):
  with socket.socket(socket.AF_UNIX) as bound:
    folder = os.open(path.parent, os.O_RDONLY)
    bound.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def empty_folder(path, victim):
  path.mkdir()


def full_folder(path, victim):
  path.mkdir()
  (path / "file").write_text("a stranger's")


LINKS = [
  *(link_to_file, link_to_folder, link_to_nothing, link_to_root),
  *(link_to_endless, link_to_itself),
]
NO_FOLDER = [*LINKS, fifo, unix_socket]
FOREIGN = [*NO_FOLDER, empty_folder, full_folder]


def planted(place, victim, kind, path):
  """Puts something foreign at a path, in place of what is there."""
  (place / path).parent.mkdir(parents=True, exist_ok=True)
  if (place / path).exists():
    (place / path).rename(place / path.replace("/", "_"))
  kind(place / path, victim)
